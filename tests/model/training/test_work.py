from __future__ import annotations

import numpy as np
import pytest

from feature_store.batch import FeatureBatch
from feature_store.replay import Replay
from feature_store.world import DAY_MS, START_MS
from model.gem.flops import forward_flops
from model.gem.foundation import FoundationModel
from model.gem.presets import tiny
from model.training.parallel import Processes
from model.training.rows import ReplayRows
from model.training.state import dealt
from model.training.work import counts_of, prices_of, work_of


@pytest.fixture(scope="module")
def rows(world: Replay) -> ReplayRows:
    return ReplayRows(world, START_MS, START_MS + 5 * DAY_MS)


def candidates_and_events(batch: FeatureBatch) -> float:
    return 5.0 * len(batch.event_ms) + 70.0 * batch.num_candidates + 11.0


def test_prices_are_found_from_what_a_few_requests_cost(rows: ReplayRows) -> None:
    assert prices_of(rows, candidates_and_events).tolist() == [5, 70, 11]


def test_requests_that_cost_nothing_are_worth_their_events_and_candidates(rows: ReplayRows) -> None:
    assert prices_of(rows, lambda batch: 0.0).tolist() == [1, 1, 1]


def test_one_process_asks_what_no_request_costs(rows: ReplayRows) -> None:
    work = work_of(rows, lambda batch: pytest.fail("asked"), Processes())
    asked = np.array([3, 0])
    assert work(asked).tolist() == (rows.lengths(asked).sum(axis=1) + 1).tolist()


def test_steps_shared_by_prices_leave_less_to_wait_for_than_steps_shared_by_turns(rows: ReplayRows) -> None:
    """In FLOPs of the foundation model, where a candidate costs about as much as seven events."""
    model = FoundationModel(tiny(), rows.replay.layout)
    prices = prices_of(rows, lambda batch: forward_flops(model, batch))
    assert prices[1] > 4 * prices[0] > 0
    order, hands, over = np.random.default_rng(0).permutation(len(rows)), 4, {"turns": [], "work": []}
    for step in order[: len(order) // 64 * 64].reshape(-1, 64):
        flops = np.array([forward_flops(model, rows.batch(row[None])[0]) for row in step])
        shares = {"turns": np.arange(len(step)) % hands, "work": dealt(counts_of(rows, step) @ prices, hands)}
        for name, hand_of in shares.items():
            sums = np.bincount(hand_of, weights=flops)
            over[name].append(sums.max() / sums.mean() - 1.0)
    assert np.mean(over["work"]) < 0.01 < 0.02 < np.mean(over["turns"])
