"""Writes a log aside and publishes it as a whole: what is killed in between is as if it never began, or is carried through.

Knows tables and transactions. Does not know where rows come from.

Rows lie in `_unpublished` below the tables until all are there; then each table takes its rows in one transaction that
bears the log's name, impressions last. A table that has a transaction of the name is not written again.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from feature_store.tables import Tables

FOLDER = "_unpublished"
_ORDER = ("rejects", "users", "catalogue", "events", "outcomes", "impressions")
"""Impressions last: where there are some, their log is whole."""


def write_whole(tables: Tables, name: str, write: Callable[[Tables], Mapping[str, Any]]) -> dict[str, Any]:
    """Lets `write` fill tables aside, then publishes them; returns its report, of plain values.

    A log of the same name that was killed while being published is not written again: it is published, and its report
    returned. If `write` fails nothing is published; what it wrote lies aside until the next log is written.
    """
    aside = Tables(tables.root / FOLDER)
    finished = aside.root / "finished.json"
    if finished.exists():
        earlier = json.loads(finished.read_text())
        _publish(aside, tables, earlier["key"])
        _remove(aside)
        if earlier["name"] == name:
            return dict(earlier["report"])
    _remove(aside)
    report = dict(write(aside))
    key = uuid.uuid4().hex
    _write_file(finished, json.dumps({"name": name, "key": key, "report": report}))
    _publish(aside, tables, key)
    _remove(aside)
    return report


def _publish(aside: Tables, tables: Tables, key: str) -> None:
    for name in _ORDER:
        if aside.exists(name) and not tables.holds(name, key):
            tables.append(name, aside.reader(name), key=key)


def _remove(aside: Tables) -> None:
    """Rows first: as long as one is left the file says that all are published or can be."""
    for name in _ORDER:
        shutil.rmtree(aside.path(name), ignore_errors=True)
    shutil.rmtree(aside.root, ignore_errors=True)


def _write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
