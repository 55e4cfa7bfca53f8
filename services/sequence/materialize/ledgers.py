"""Puts the ledgers of all users together at once, as appending their events would have.

Knows a replayed log and packed facts. Does not know stores.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from feature_store.asof import known_bits
from feature_store.replay import Replay
from feature_store.spec import IMPRESSION
from services.sequence.appender import horizon_ms
from services.sequence.ledger import fact_dtype
from services.sequence.materialize.segments import by_user, distinct, halves

Ints = npt.NDArray[np.int64]
Facts = npt.NDArray[np.void]


def ledgers(replay: Replay, until_ms: int) -> Iterator[tuple[int, Facts]]:
    """Every user who has one, ascending, and the facts known at an instant that are recent by the user's newest."""
    parts = [_events(replay, until_ms)]
    if IMPRESSION in replay.spec.event_sources:
        parts.append(_impressions(replay, until_ms))
    users = np.concatenate([users for users, _ in parts])
    facts = np.concatenate([facts for _, facts in parts])
    high, low = halves(facts["name"])
    order = np.lexsort((low, high, facts["source"], facts["event_ms"], users))
    keep = order[distinct(*(column[order] for column in (users, facts["source"], high, low)))]
    users, facts = users[keep], facts[keep]
    last = np.flatnonzero(np.append(users[1:] != users[:-1], [True])[: len(users)])
    latest = np.repeat(facts["event_ms"][last], np.diff(last, prepend=-1))
    recent = facts["event_ms"] >= latest - horizon_ms(replay.spec)
    return by_user(users[recent], facts[recent])


def _impressions(replay: Replay, until_ms: int) -> tuple[Ints, Facts]:
    log = replay.impressions
    rows = _known(log.event_ms, log.available_ms, until_ms)
    facts = _facts(replay, log.example_id[rows], log.event_ms[rows], log.surface[rows], log.ad_ids[rows])
    facts["source"] = replay.spec.event_sources.index(IMPRESSION)
    facts["labels"] = known_bits(log.label_ms[rows], np.full(len(rows), until_ms, dtype=np.int64))
    return log.user_key[rows], facts


def _events(replay: Replay, until_ms: int) -> tuple[Ints, Facts]:
    log = replay.events
    rows = _known(log.event_ms, log.available_ms, until_ms)
    facts = _facts(replay, log.event_id[rows], log.event_ms[rows], log.surface[rows], log.ad_ids[rows])
    facts["source"] = log.source[rows]
    return log.user_key[rows], facts


def _facts(
    replay: Replay, names: npt.NDArray[np.void], event_ms: Ints, surface: npt.NDArray[np.int32], ad_ids: Ints
) -> Facts:
    facts = np.zeros(len(names), dtype=fact_dtype(len(replay.layout.ad_ids)))
    facts["name"], facts["event_ms"], facts["surface"], facts["ad_ids"] = names, event_ms, surface, ad_ids
    return facts


def _known(event_ms: Ints, available_ms: Ints, until_ms: int) -> Ints:
    return np.flatnonzero((event_ms < until_ms) & (available_ms <= until_ms))
