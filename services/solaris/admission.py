"""Decides which offered pairs are worth computing, and in which order.

Knows tasks and times. Does not know streams, stores or models.

Under overload what is computed stays fresh: the newest task comes first, the backlog is bounded, and everything that is
left out is counted by reason, never lost silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gem.solaris.v1 import task_pb2

EXPIRED, OVERFLOWED, COALESCED, FRESH, MALFORMED = (
    "expired", "overflowed", "coalesced", "fresh", "malformed",
)  # fmt: skip
"""Reasons for which a pair is not computed."""


class Claimed(NamedTuple):
    """A task taken from the stream and not yet acknowledged."""

    entry_id: str
    task: task_pb2.SpeculationTask


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to do with a backlog."""

    work: list[Claimed]
    """Newest first. A pair stands in one task only; ads keep their order of score."""
    done: list[str]
    """Entries that need no work, to be acknowledged at once."""
    rest: list[Claimed]
    """Tasks for a later turn, newest first."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason → pairs left out."""


def plan(
    backlog: Iterable[Claimed], *, now_ms: int, batch_tasks: int, max_backlog_tasks: int
) -> Plan:
    """Chooses the next tasks.

    A pair that stands in several tasks is computed for the newest of them: the state of the user that it will read is as
    fresh as that of the others.

    Args:
        backlog: tasks in any order.
        now_ms: instant against which a task's expiry is held.
        batch_tasks: tasks to do now.
        max_backlog_tasks: tasks to keep in all; the oldest beyond are dropped.
    """
    dropped: Counter[str] = Counter()
    done: list[str] = []
    kept: list[Claimed] = []
    seen: set[tuple[str, str]] = set()
    for claimed in sorted(backlog, key=_newest_first):
        reason = _refusal(claimed.task, now_ms, full=len(kept) >= max_backlog_tasks)
        fresh = [] if reason else _unseen(claimed.task, seen)
        if fresh:
            dropped[COALESCED] += len(claimed.task.ad_ids) - len(fresh)
            kept.append(Claimed(claimed.entry_id, with_ads(claimed.task, fresh)))
            continue
        dropped[reason or COALESCED] += max(1, len(claimed.task.ad_ids))
        done.append(claimed.entry_id)
    return Plan(
        work=kept[:batch_tasks],
        done=done,
        rest=kept[batch_tasks:],
        dropped={reason: count for reason, count in dropped.items() if count},
    )


def _newest_first(claimed: Claimed) -> tuple[int, str]:
    return -claimed.task.request_ms, claimed.entry_id


def _refusal(task: task_pb2.SpeculationTask, now_ms: int, *, full: bool) -> str | None:
    if not task.user_id or not task.ad_ids:
        return MALFORMED
    if task.expires_ms and task.expires_ms <= now_ms:
        return EXPIRED
    return OVERFLOWED if full else None


def _unseen(task: task_pb2.SpeculationTask, seen: set[tuple[str, str]]) -> list[int]:
    """Positions of the ads that no newer task asks for; marks them as asked for."""
    positions: list[int] = []
    for position, ad_id in enumerate(task.ad_ids):
        if (task.user_id, ad_id) not in seen:
            seen.add((task.user_id, ad_id))
            positions.append(position)
    return positions


def with_ads(task: task_pb2.SpeculationTask, positions: list[int]) -> task_pb2.SpeculationTask:
    """The task with only the ads at these positions, in this order."""
    if len(positions) == len(task.ad_ids):
        return task
    kept = task_pb2.SpeculationTask()
    kept.CopyFrom(task)
    scores = list(task.scores)
    kept.ClearField("scores")
    kept.ClearField("ad_ids")
    kept.ad_ids.extend(task.ad_ids[position] for position in positions)
    kept.scores.extend(scores[position] for position in positions if position < len(scores))
    return kept
