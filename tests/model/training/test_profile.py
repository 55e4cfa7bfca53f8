"""Every part of a teacher is watched from outside: its time, forward and backward, its bytes and its FLOPs."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from feature_store.errors import FailedPrecondition, InvalidInput
from feature_store.replay import Replay
from model.gem.batch import Batch
from model.gem.flops import flops_by_part, forward_flops
from model.gem.presets import tiny
from model.training.profile import (
    BETWEEN,
    COMPRESSOR,
    GATHER,
    LOSSES,
    OPTIMIZER,
    Profile,
    Profiler,
    compressor_flops,
    parts_of,
    require_memory,
    scoring_batch,
    untrained,
)
from model.training.rows import ReplayRows
from model.training.teacher import TeacherConfig
from model.training.throughput import measure_bandwidth
from model.training.watch import At, Traffic, Watch, watched
from tests.model.world_batches import batch_of, layout

CONFIG = TeacherConfig(foundation=dataclasses.replace(tiny(), layers=3))
PAUSE = 0.03


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradient * 2.0, None, None


class Slow(nn.Module):
    """Takes its time, each way another."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.pauses = (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        return _Pause.apply(x, *self.pauses)


def test_time_belongs_to_the_innermost_part_forward_and_to_the_part_that_made_the_node_backward() -> None:
    inner, outer = Slow(PAUSE, 4 * PAUSE), Slow(2 * PAUSE, 0.0)
    both = nn.Sequential(outer, nn.Linear(3, 3), inner)
    watch, start = Watch(), time.perf_counter()
    with watched(watch, {"both": (both,), "inner": (inner,)}), watch.started("outside"):
        loss = both(torch.ones(2, 3)).sum()
        watch.follow([loss], "after")
        time.sleep(PAUSE)
        loss.backward()
    whole, found = time.perf_counter() - start, watch.seconds
    assert sum(found.values()) <= whole
    assert found[At("inner", "forward")] >= PAUSE
    assert found[At("both", "forward")] >= 2 * PAUSE
    assert found[At("after", "forward")] >= PAUSE
    assert found[At("inner", "backward")] >= 4 * PAUSE
    assert found[At("both", "backward")] > 0
    assert not both._forward_hooks
    assert not both._forward_pre_hooks
    assert watch.at is None


def test_a_watch_that_is_not_started_sees_nothing() -> None:
    module, watch = nn.Linear(3, 3), Watch()
    with watched(watch, {"part": (module,)}):
        loss = module(torch.ones(2, 3)).sum()
        watch.follow([loss], "after")
        watch.switch("other")
        loss.backward()
    assert not watch.seconds


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda x, rows: x + x[0], (64 * 8 + 8 + 64 * 8) * 4),
        (lambda x, rows: x @ x[:8], (64 * 8 + 8 * 8 + 64 * 8) * 4),
        (lambda x, rows: x.view(8, 64).t(), 0),
        (lambda x, rows: x.index_select(0, rows), 2 * 2 * 8 * 4 + 2 * 8),
        (lambda x, rows: x.mul_(2.0), 2 * 64 * 8 * 4),
        (lambda x, rows: x.zero_(), 64 * 8 * 4),
        (lambda x, rows: x[:1].expand(64, 8) * 1.0, (8 + 64 * 8) * 4),
        (lambda x, rows: torch.empty(64, 8), 0),
        (lambda x, rows: torch.zeros(64, 8).index_copy_(0, rows, x[:2]), 64 * 8 * 4 + 2 * (2 * 8 * 4 + 2 * 8)),
        (lambda x, rows: nn.functional.linear(x, x[:4], x[0, :4]), (64 * 8 + 4 * 8 + 4 + 64 * 4) * 4),
    ],
    ids=["broadcast", "product", "views", "look-up", "in place", "overwrite", "expanded", "empty", "rows", "composite"],
)
@torch.inference_mode()
def test_bytes_are_those_that_an_operation_must_read_and_write(operation: Any, expected: int) -> None:
    x, rows, watch = torch.ones(64, 8), torch.tensor([3, 5]), Watch()
    with watch.started("part"), Traffic(watch) as traffic:
        operation(x, rows)
    assert traffic.bytes[At("part", "forward")] == expected


@pytest.fixture(scope="module")
def profiles(world: Replay) -> tuple[Profile, Profile]:
    world.count("request", lambda done, total: None)
    at = world.impressions.event_ms
    rows = ReplayRows(world, int(at.min()), int(at.max()) + 1)
    profiler = Profiler(untrained(CONFIG, rows), rows, batch_requests=32)
    request = scoring_batch(rows.batch(np.arange(64))[0], candidates=20, history=30)
    return profiler.training(2), profiler.scoring(request, 2)


def test_every_part_with_products_has_flops_bytes_and_seconds_each_way(profiles: tuple[Profile, Profile]) -> None:
    training, scoring = profiles
    for profile in profiles:
        found = {cost.name: cost for cost in profile.costs}
        counted = set(flops_by_part(_meta(), batch_of([3], [1])))
        assert counted | {COMPRESSOR, BETWEEN, "embeddings"} <= set(found)
        for name in counted | {COMPRESSOR}:
            assert min(found[name].flops, found[name].bytes, found[name].forward_seconds) > 0
            assert (found[name].backward_seconds > 0) == (profile is training)
    assert {GATHER, LOSSES, OPTIMIZER} <= {cost.name for cost in training.costs}
    assert {GATHER, LOSSES, OPTIMIZER}.isdisjoint(cost.name for cost in scoring.costs)


def test_flops_of_the_parts_are_those_of_the_model(profiles: tuple[Profile, Profile]) -> None:
    training, scoring = profiles
    for profile in profiles:
        parts = sum(cost.flops for cost in profile.costs if cost.name != COMPRESSOR)
        assert parts == pytest.approx(profile.flops, rel=1e-9)
    assert (scoring.requests, scoring.candidates, scoring.events) == (1, 20, 30)
    assert training.requests == 32


def test_shares_add_up_and_layers_are_taken_together(profiles: tuple[Profile, Profile]) -> None:
    for profile in profiles:
        kinds = profile.by_kind()
        assert sum(profile.share(cost) for cost in kinds) == pytest.approx(1.0)
        assert [cost.seconds for cost in kinds] == sorted((cost.seconds for cost in kinds), reverse=True)
        (interaction,) = [cost for cost in kinds if cost.kind == "interaction"]
        own = [cost for cost in profile.costs if cost.kind == "interaction"]
        assert len(own) == 3
        assert interaction.flops == sum(cost.flops for cost in own)
        assert interaction.seconds == pytest.approx(sum(cost.seconds for cost in own))


def test_mfu_is_of_the_ceiling_that_is_given(profiles: tuple[Profile, Profile]) -> None:
    for profile in profiles:
        assert profile.mfu(1e9) == pytest.approx(profile.flops / profile.seconds / 1e9)
        assert profile.local_mfu(2e9) == pytest.approx(profile.local_mfu(1e9) / 2)
        speeds = [cost.speed for cost in profile.costs if cost.flops and cost.name != COMPRESSOR]
        assert min(speeds) < profile.local_mfu(1.0) < max(speeds)


def test_a_watched_step_moves_weights_as_any_other(world: Replay) -> None:
    world.count("request", lambda done, total: None)
    at = world.impressions.event_ms
    rows = ReplayRows(world, int(at.min()), int(at.max()) + 1)
    moved = []
    for watch_it in (False, True):
        profiler = Profiler(untrained(CONFIG, rows), rows, batch_requests=32)
        batch, targets = rows.batch(np.arange(32))
        with watched(profiler._watch, profiler._parts):
            if watch_it:
                with profiler._watch.started(BETWEEN):
                    profiler._learner.step(0, 9, batch, targets)
                assert At("heads", "backward") in profiler._watch.seconds
            else:
                profiler._learner.step(0, 9, batch, targets)
        moved.append({name: value.detach().clone() for name, value in profiler.teacher.named_parameters()})
    assert all(torch.equal(value, moved[1][name]) for name, value in moved[0].items())


def test_flops_of_the_compressor_are_what_torch_counts(world: Replay) -> None:
    at = world.impressions.event_ms
    teacher = untrained(CONFIG, ReplayRows(world, int(at.min()), int(at.max()) + 1))
    with torch.no_grad():
        taps = teacher.foundation(Batch.from_numpy(batch_of([4], [9]))).taps
    with FlopCounterMode(display=False) as counter:
        teacher.compressor(taps)
    assert compressor_flops(teacher.compressor, 9, training=False) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        teacher.compressor.reconstruction_loss(taps).backward()
    free = 2 * 9 * teacher.compressor.encoder[0].weight.numel()  # nothing before it learns
    assert compressor_flops(teacher.compressor, 9, training=True) == counter.get_total_flops() + free


@pytest.mark.parametrize(("candidates", "history"), [(1, 0), (7, 5), (4, 40)])
def test_a_scoring_batch_has_the_sizes_that_were_asked_for_and_keeps_the_order_of_time(candidates: int, history: int) -> None:
    whole = batch_of([3, 12, 5], [2, 1, 2])
    made = scoring_batch(whole, candidates=candidates, history=history)
    assert (made.num_requests, made.num_candidates, len(made.event_ms)) == (1, candidates, history)
    assert (np.diff(made.event_ms) >= 0).all()
    own = whole.event_ms[3:15]
    assert set(made.event_ms.tolist()) == set(own[-history:].tolist() if history else [])
    assert made.event_offsets.tolist() == [0, history]
    assert forward_flops(_meta(), made) > 0


def test_without_any_event_a_scoring_batch_has_no_history() -> None:
    assert len(scoring_batch(batch_of([0], [2]), candidates=3, history=9).event_ms) == 0


def test_what_does_not_fit_into_memory_is_refused_before_it_is_made() -> None:
    wide = TeacherConfig(foundation=dataclasses.replace(tiny(), hidden=2**28))
    with pytest.raises(FailedPrecondition, match=r"training needs [\d,.]+ GiB .* take a smaller preset"):
        require_memory(wide, layout())
    require_memory(CONFIG, layout())


def test_no_step_and_no_candidate_are_refused(world: Replay) -> None:
    at = world.impressions.event_ms
    rows = ReplayRows(world, int(at.min()), int(at.max()) + 1)
    profiler = Profiler(untrained(CONFIG, rows), rows)
    with pytest.raises(InvalidInput, match="0 steps measure nothing"):
        profiler.training(0)
    with pytest.raises(InvalidInput, match="no row to measure on"):
        profiler.scoring(batch_of([2], [0]), 1)


def test_bandwidth_is_of_bytes_read_and_written() -> None:
    assert 1e8 < measure_bandwidth(size=2**22, seconds=0.02) < 1e14


def test_parts_share_no_module(world: Replay) -> None:
    at = world.impressions.event_ms
    parts = parts_of(untrained(CONFIG, ReplayRows(world, int(at.min()), int(at.max()) + 1)))
    modules = [module for each in parts.values() for module in each]
    assert len(modules) == len({id(module) for module in modules})


def _meta() -> Any:
    from model.gem.foundation import FoundationModel

    with torch.device("meta"):
        return FoundationModel(CONFIG.foundation, layout())
