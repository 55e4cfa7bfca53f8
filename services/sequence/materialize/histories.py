"""Puts the histories of all users together at once, as appending their events would have.

Knows a replayed log and packed entries. Does not know stores.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from feature_store.asof import NEVER
from feature_store.history import SPARE, Entries, Shape, event_shape, request_number
from feature_store.replay import Replay
from services.sequence.materialize.segments import by_user, distinct, halves, newest

Ints = npt.NDArray[np.int64]


def histories(replay: Replay, until_ms: int) -> Iterator[tuple[int, Entries]]:
    """Every user who has one, ascending, and the entries that were known just before an instant."""
    shape = event_shape(replay.spec)
    requests = np.fromiter(map(request_number, replay.impressions.request_ids), dtype=np.int64)
    parts = [_of_source(replay, shape, requests, source, until_ms) for source in range(len(replay.histories))]
    users = np.concatenate([users for users, _ in parts])
    entries = np.concatenate([entries for _, entries in parts])
    rank = np.array([window.priority for window in shape.windows])[entries["source"]]
    order = np.lexsort((entries["low"], entries["high"], rank, entries["event_ms"], users))
    users, entries = users[order], entries[order]
    keep = distinct(users, entries["source"], entries["high"], entries["low"])
    return by_user(users[keep], entries[keep])


def _of_source(
    replay: Replay, shape: Shape, requests: Ints, source: int, until_ms: int
) -> tuple[Ints, Entries]:
    """Users and entries of one source: the newest of each user that a read may need."""
    history, log = replay.histories[source], replay.impressions
    when, available = history.segments.event_ms, history.segments.available_ms
    owners = np.repeat(history.users, history.segments.stop - history.segments.start)
    rows = np.flatnonzero((when < until_ms) & (available <= until_ms))
    rows = rows[newest(owners[rows], shape.windows[source].total + SPARE)]
    entries = np.zeros(len(rows), dtype=shape.dtype)
    shown = history.impression[rows]
    known = shown >= 0
    entries["event_ms"], entries["available_ms"] = when[rows], available[rows]
    entries["high"], entries["low"] = halves(history.names[rows])
    entries["source"], entries["surface"] = source, history.surface[rows]
    entries["ids"], entries["dense"] = history.ids[rows], history.dense[rows]
    entries["request"], entries["label_ms"] = request_number(""), NEVER
    entries["request"][known] = requests[log.request[shown[known]]]
    labels = log.label_ms[shown[known]]
    entries["label_ms"][known] = np.where(labels <= until_ms, labels, NEVER)
    return owners[rows], entries
