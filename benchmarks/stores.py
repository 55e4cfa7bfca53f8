"""Makes what a serving benchmark runs on: a small home with published models, and its rows in each kind of store.

Knows homes, files and Redis. Does not know what is measured.
"""

from __future__ import annotations

import shutil
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from feature_store.errors import NotReady
from feature_store.online import OnlineStore, open_store
from feature_store.world import WorldConfig
from services.cli.console import Console
from services.cli.home import Home
from services.demo.config import DemoConfig
from services.demo.loop import run_demo

WORLD = WorldConfig(users=100, ads=1200, days=5, requests_per_user=6.0, dim=4)
"""Few users, for the models are not what is measured; more ads than the largest request has."""
_START_SECONDS, _COPY_SECONDS, _PART = 5.0, 30.0, 2000


def small_home(root: Path) -> Home:
    """A home whose models were trained, published and served once, on a generated world: half a minute to a minute."""
    home = Home(root)
    run_demo(DemoConfig(world=WORLD, requests=20, annotated_days=2), home, Console())
    return home


@contextmanager
def sqlite_store(home: Home, folder: Path) -> Iterator[str]:
    """The URL of a copy of a home's store: every round begins with the same rows."""
    path = folder / "online.sqlite"
    path.unlink(missing_ok=True)
    with sqlite3.connect(home.store_url.removeprefix("sqlite:///")) as held, sqlite3.connect(path) as copy:
        held.backup(copy)
        copy.executescript("DELETE FROM item; DELETE FROM stream_end; DELETE FROM consumer_group; DELETE FROM pending;")
    yield f"sqlite:///{path}"
    for own in folder.glob("online.sqlite*"):
        own.unlink()


@contextmanager
def redis_store(home: Home, folder: Path) -> Iterator[str]:
    """The URL of a Redis of our own that holds a home's rows and writes nothing to disk.

    Raises:
        NotReady: it did not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        with open_store(home.store_url) as source, open_store(url, timeout_seconds=_COPY_SECONDS) as target:
            _wait(target)
            _copy(source, target)
        yield url
    finally:
        process.terminate()
        process.wait()


STORES = {"sqlite": sqlite_store, "redis": redis_store}


def available() -> list[str]:
    """Kinds of stores that this machine can run."""
    return [name for name in STORES if name != "redis" or shutil.which("redis-server")]


def _wait(store: OnlineStore) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            return store.ping()
        except NotReady:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _copy(source: OnlineStore, target: OnlineStore) -> None:
    """Every row, of any kind; times to live begin anew without an end."""
    names = source.find("*")
    for first in range(0, len(names), _PART):
        part = names[first : first + _PART]
        values = dict(zip(part, source.get_many(part), strict=True))
        target.put_many({name: value for name, value in values.items() if value is not None})
        for name in [name for name, value in values.items() if value is None]:
            target.hset_many(name, source.hget_all(name))
