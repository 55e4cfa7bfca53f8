"""Counts and times calls, and shows the figures on /metrics.

Knows methods, codes and seconds: labels with few values, never an id. Does not know what the calls are for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Histogram, start_http_server

SECONDS_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip


class CallMetrics:
    """Seconds of the calls a process answers and of those it makes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.answered = Histogram(
            "gem_request_seconds",
            "Seconds a call took to answer",
            ("method", "code"),
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.made = Histogram(
            "gem_hop_seconds",
            "Seconds a call to another service took",
            ("method", "code"),
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )


def short_method(full_method: str) -> str:
    """`Rank` of `/gem.router.v1.RankingService/Rank`: the bounded label of a method."""
    return full_method.rsplit("/", 1)[-1]


@contextmanager
def exposed(registry: CollectorRegistry, listen: str) -> Iterator[int]:
    """Serve /metrics on host:port for as long as the context lasts; yields the port, 0 if `listen` is empty."""
    if not listen:
        yield 0
        return
    host, port = split_address(listen)
    server, thread = start_http_server(port, host, registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`.

    Raises:
        ValueError: it is written otherwise.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{address!r} is not an address; write host:port, such as 127.0.0.1:50051")
    return host.strip("[]"), int(port)
