"""Puts a sink together from its settings.

Knows its parts by their constructors. Does not know what they do.
"""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry

from feature_store.streams import open_stream
from feature_store.tables import Tables
from services.router.afterwards import SERVED
from services.router.sink.drain import Drain, SinkMetrics
from services.router.sink.settings import SinkSettings
from services.runtime.server import Service


def start(
    settings: SinkSettings, registry: CollectorRegistry, resources: ExitStack
) -> Sequence[Service]:
    """Begin to drain in a thread that ends, with nothing left, when `resources` are closed; it serves no service."""
    stream = resources.enter_context(open_stream(settings.store, SERVED))
    drain = Drain(
        stream,
        Tables(Path(settings.tables)),
        consumer=f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
        batch=settings.sink_batch,
        reclaim_seconds=settings.sink_reclaim_seconds,
        metrics=SinkMetrics(registry),
    )
    stopping = threading.Event()
    thread = threading.Thread(
        target=drain.run, args=(stopping,), kwargs={"pause_seconds": settings.sink_pause_seconds}
    )
    resources.callback(thread.join)
    resources.callback(stopping.set)
    thread.start()
    return []
