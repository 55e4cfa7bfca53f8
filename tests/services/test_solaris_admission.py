from __future__ import annotations

from collections import Counter

from gem.solaris.v1.task_pb2 import SpeculationTask
from hypothesis import given
from hypothesis import strategies as st

from services.solaris.admission import Claimed, plan


def claimed(
    entry: str, request_ms: int, ads: list[str], *, user: str = "u", expires: int = 0
) -> Claimed:
    task = SpeculationTask(
        user_id=user, request_ms=request_ms, ad_ids=ads, expires_ms=expires,
        scores=[float(i) for i in range(len(ads))],
    )  # fmt: skip
    return Claimed(entry, task)


def test_the_newest_task_comes_first_and_the_rest_waits() -> None:
    tasks = [claimed(str(t), t, ["a"], user=f"u{t}") for t in (3, 9, 5, 7)]
    chosen = plan(tasks, now_ms=10, batch_tasks=2, max_backlog_tasks=10)
    assert [c.entry_id for c in chosen.work] == ["9", "7"]
    assert [c.entry_id for c in chosen.rest] == ["5", "3"]
    assert (chosen.done, chosen.dropped) == ([], {})


def test_a_pair_in_several_tasks_is_computed_once_for_the_newest() -> None:
    tasks = [claimed("old", 1, ["a", "b"]), claimed("new", 2, ["b", "c"])]
    chosen = plan(tasks, now_ms=10, batch_tasks=8, max_backlog_tasks=10)
    assert [list(c.task.ad_ids) for c in chosen.work] == [["b", "c"], ["a"]]
    assert list(chosen.work[1].task.scores) == [0.0]
    assert chosen.dropped == {"coalesced": 1}


def test_a_task_with_nothing_left_to_compute_is_done() -> None:
    tasks = [claimed("old", 1, ["a"]), claimed("new", 2, ["a"])]
    chosen = plan(tasks, now_ms=10, batch_tasks=8, max_backlog_tasks=10)
    assert chosen.done == ["old"]


def test_the_same_ad_of_two_users_is_two_pairs() -> None:
    tasks = [claimed("1", 1, ["a"], user="u"), claimed("2", 2, ["a"], user="v")]
    assert len(plan(tasks, now_ms=10, batch_tasks=8, max_backlog_tasks=10).work) == 2


def test_an_expired_or_malformed_task_is_dropped_with_its_reason() -> None:
    tasks = [
        claimed("expired", 1, ["a", "b"], expires=10),
        claimed("alive", 2, ["a"], expires=11),
        claimed("empty", 3, []),
        claimed("nobody", 4, ["a"], user=""),
    ]
    chosen = plan(tasks, now_ms=10, batch_tasks=8, max_backlog_tasks=10)
    assert [c.entry_id for c in chosen.work] == ["alive"]
    assert chosen.dropped == {"expired": 2, "malformed": 2}


def test_a_burst_beyond_the_backlog_drops_the_oldest_and_counts_them() -> None:
    tasks = [claimed(str(t), t, ["a"], user=f"u{t}") for t in range(100)]
    chosen = plan(tasks, now_ms=0, batch_tasks=4, max_backlog_tasks=10)
    assert [c.entry_id for c in chosen.work] == ["99", "98", "97", "96"]
    assert len(chosen.rest) == 6
    assert chosen.dropped == {"overflowed": 90}
    assert len(chosen.done) == 90


TASKS = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from("uv"), st.lists(st.sampled_from("abcd"), max_size=4, unique=True)),
    max_size=30,
)  # fmt: skip


@given(TASKS)
def test_every_offered_pair_is_computed_waits_or_is_counted(
    offers: list[tuple[int, str, list[str]]],
) -> None:
    tasks = [claimed(str(i), t, ads, user=user) for i, (t, user, ads) in enumerate(offers)]
    chosen = plan(tasks, now_ms=5, batch_tasks=3, max_backlog_tasks=6)
    kept = Counter((c.task.user_id, ad) for c in chosen.work + chosen.rest for ad in c.task.ad_ids)
    assert all(count == 1 for count in kept.values())
    offered = sum(max(1, len(ads)) for _, _, ads in offers)
    assert kept.total() + sum(chosen.dropped.values()) == offered
    entries = [c.entry_id for c in chosen.work + chosen.rest] + chosen.done
    assert sorted(entries) == sorted(c.entry_id for c in tasks)
