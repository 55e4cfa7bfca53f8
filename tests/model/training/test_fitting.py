from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.batch import FeatureBatch, Targets
from feature_store.errors import CorruptArtefact, FailedPrecondition, InvalidInput, NotFound
from model.training import checkpoint
from model.training.evaluate import Progressive, sigmoid
from model.training.fitting import FitConfig, FitLog, Place, Progress, fit, save
from model.training.learner import Learner
from model.training.loss import Sums
from model.training.optimizers import OptimizerConfig
from model.training.parallel import Processes
from model.training.quarantine import Quarantine
from model.training.state import BatchOrder, dealt
from tests.model.training import small

OPTIMIZER = OptimizerConfig(dense_rate=0.01, table_rate=0.1, warmup_steps=2)


def learner(**model: float) -> Learner:
    made = small.SmallModel(**model)
    return Learner(made, small.SmallCriterion(made), OPTIMIZER, Processes(), seed=3)


def run(who: Learner, folder: Path, rows: int = 200, **rest: object) -> FitLog:
    config = FitConfig(batch_requests=8, window_requests=50, seed=5, **rest.pop("config", {}))  # type: ignore[arg-type]
    return fit(who, small.SmallRows(rows), config, quarantine=Quarantine(small.small_layout(folder)), **rest)  # type: ignore[arg-type]


@settings(max_examples=50)
@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 90), st.integers(1, 3), st.integers(0, 9))
def test_every_epoch_takes_every_row_once_and_none_moves_beyond_its_window(
    n: int, batch: int, window: int, epochs: int, seed: int
) -> None:
    order = BatchOrder(num_rows=n, batch_rows=batch, window_rows=window, seed=seed, epochs=epochs)
    taken = [order.rows(step) for step in range(order.num_steps)]
    for epoch in range(epochs):
        own = np.concatenate([np.zeros(0, np.int64), *taken[epoch * order.epoch_steps : (epoch + 1) * order.epoch_steps]])
        assert sorted(own) == list(range(n))
        assert all(abs(int(row) - place) < window for place, row in enumerate(own))
    with pytest.raises(InvalidInput, match="does not exist"):
        order.rows(order.num_steps)


@given(st.lists(st.integers(0, 1000), max_size=50), st.integers(1, 5))
def test_shares_are_disjoint_cover_the_batch_in_order_and_differ_by_a_row_at_most(lengths: list[int], world: int) -> None:
    rows, known = 7 * np.arange(len(lengths)), dict(zip(7 * np.arange(len(lengths)), lengths, strict=True))
    shares = [
        Processes(rank=rank, world_size=world).share(rows, lambda asked: np.array([known[row] for row in asked], np.int64))
        for rank in range(world)
    ]
    assert sorted(np.concatenate(shares)) == rows.tolist()
    assert all((np.diff(share) > 0).all() for share in shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_process_takes_the_batch_as_it_is_and_asks_for_no_work() -> None:
    rows = np.array([3, 1, 2])
    assert Processes().share(rows, lambda asked: pytest.fail("asked")) is rows


def test_rows_of_the_same_work_go_to_the_processes_by_turns() -> None:
    assert dealt(np.full(7, 5), 3).tolist() == [0, 1, 2, 0, 1, 2, 0]


def skew(lengths: np.ndarray, hand_of: np.ndarray, hands: int) -> float:
    """How much more than the mean the fullest hand has."""
    sums = np.bincount(hand_of, weights=lengths, minlength=hands)
    return float(sums.max() / sums.mean()) - 1.0


@pytest.mark.parametrize(("power", "longest"), [(1.2, 1000), (2.0, 4096)])
@pytest.mark.parametrize(("rows", "hands"), [(128, 2), (1024, 8), (8192, 8)])
def test_rows_dealt_by_work_leave_less_to_wait_for_than_rows_shuffled(
    power: float, longest: int, rows: int, hands: int
) -> None:
    """Lengths follow a power law. Luck may shuffle two processes' rows better, but not where dealing leaves 5 % or more."""
    generator, ours, shuffled = np.random.default_rng(0), [], []
    for _ in range(20):
        lengths = np.minimum(longest, 10 * (1.0 + generator.pareto(power, rows))).astype(np.int64)
        ours.append(skew(lengths, dealt(lengths, hands), hands))
        shuffled.append(skew(lengths, generator.permutation(rows) % hands, hands))
    assert all(own <= other or own < 0.05 for own, other in zip(ours, shuffled, strict=True))
    assert np.mean(ours) < 0.02 < 0.08 < np.mean(shuffled)


def test_training_changes_every_weight_and_lowers_the_loss(tmp_path: Path) -> None:
    who = learner(dropout=0.0)
    before = {name: p.detach().clone() for name, p in who.model.named_parameters()}
    seen: list[Progress] = []
    log = run(who, tmp_path, rows=1600, on_progress=seen.append, flops=lambda batch: 100.0, ceiling=1e9)
    assert all((p != before[name]).any() for name, p in who.model.named_parameters())
    assert np.mean(log.losses[-50:]) < np.mean(log.losses[:20]) - 0.05
    assert [p.step for p in seen] == list(range(1, 201))
    assert seen[-1].eta_seconds == 0.0
    assert log.flops == 3 * 100.0 * 200
    assert log.rows == 3200


def test_every_row_is_scored_before_it_is_trained_on(tmp_path: Path) -> None:
    who = learner(dropout=0.0)
    progressive = Progressive(who.model.score)
    before = small.SmallModel(dropout=0.0).score(small.SmallRows(200).batch(np.arange(200))[0])
    run(who, tmp_path, before_step=progressive)
    found = progressive.predictions()
    assert sorted(bytes(name) for name in found.example_id_N) == sorted(
        bytes(name) for name in small.SmallRows(200).batch(np.arange(200))[1].example_id
    )
    first = [int.from_bytes(bytes(name)[8:], "big") for name in found.example_id_N[:16]]
    np.testing.assert_allclose(found.probabilities_NK[:16], sigmoid(before[first].astype(np.float64)), atol=1e-6)
    last = [int.from_bytes(bytes(name)[8:], "big") for name in found.example_id_N[-16:]]
    assert np.abs(found.probabilities_NK[-16:] - sigmoid(before[last].astype(np.float64))).max() > 1e-3


def test_no_rows_are_no_steps(tmp_path: Path) -> None:
    log = run(learner(), tmp_path, rows=0)
    assert (log.losses, log.steps, log.last) == ([], 0, None)


def test_rows_that_no_batch_held_keep_their_embedding(tmp_path: Path) -> None:
    who = learner()
    table = next(p for name, p in who.model.named_parameters() if name.startswith("ids."))
    before = table.detach().clone()
    run(who, tmp_path)
    touched = (table != before).any(dim=1)
    assert 0 < int(touched.sum()) <= 30
    assert not touched[0]


@pytest.mark.parametrize("rows", [200, 80, 56], ids=["in the first pass", "between passes", "in the second pass"])
def test_twenty_steps_are_ten_and_ten_to_the_bit(tmp_path: Path, rows: int) -> None:
    whole, half, rest = learner(), learner(), learner()
    straight = run(whole, tmp_path, rows, until_step=20, config={"epochs": 2})
    place, config = Place(folder=tmp_path / "run", facts={"spec": "a"}), {"checkpoint_steps": 10, "epochs": 2}
    first = run(half, tmp_path, rows, until_step=10, place=place, config=dict(config))
    second = run(rest, tmp_path, rows, until_step=20, place=place, config=dict(config))
    assert first.losses + second.losses == straight.losses
    assert second.first_step == 10
    for (name, one), two in zip(whole.model.state_dict().items(), rest.model.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    for (name, one), two in zip(whole.optimizer.state().items(), rest.optimizer.state().values(), strict=True):
        assert torch.equal(one, two), name


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    place = Place(folder=tmp_path / "run", facts={"spec": "a"})
    save(learner(), place, 3)
    with pytest.raises(FailedPrecondition, match="spec: a → b"):
        run(learner(), tmp_path, place=Place(folder=place.folder, facts={"spec": "b"}))


def test_a_damaged_checkpoint_names_the_file_and_a_missing_one_says_so(tmp_path: Path) -> None:
    place = Place(folder=tmp_path / "run", facts={})
    save(learner(), place, 3)
    file = next(place.folder.glob("step-*/model.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\0\0")
    with pytest.raises(CorruptArtefact, match=r"model\.safetensors has digest"):
        checkpoint.load(place.folder)
    with pytest.raises(NotFound, match="holds no checkpoint"):
        checkpoint.load(tmp_path)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    place = Place(folder=tmp_path / "run", facts={})
    who = learner()
    for step in (1, 2, 3, 10):
        save(who, place, step)
    assert [path.name for path in sorted(place.folder.glob("step-*"))] == ["step-0000000003", "step-0000000010"]
    assert checkpoint.load(place.folder).step == 10


class Poisoned:
    """The small criterion, with an infinite gradient at one step."""

    def __init__(self, inner: object) -> None:
        self.weights: Mapping[str, tuple[float, ...]] = {"task": (1.0, 1.0)}
        self.calls, self._inner = 0, inner

    def __call__(self, batch: FeatureBatch, targets: Targets) -> Mapping[str, Sums]:
        self.calls += 1
        sums = self._inner(batch, targets)["task"]  # type: ignore[operator]
        return {"task": sums._replace(loss_K=sums.loss_K * (math.inf if self.calls == 2 else 1.0))}


def test_an_infinite_gradient_moves_nothing_and_is_counted(tmp_path: Path) -> None:
    model = small.SmallModel()
    who = Learner(model, Poisoned(small.SmallCriterion(model)), OPTIMIZER, Processes())
    rows = small.SmallRows(16)
    logs, states = [], []
    for step in range(3):
        logs.append(who.step(step, 3, *rows.batch(np.arange(8))))
        states.append({name: value.clone() for name, value in {**model.state_dict(), **who.optimizer.state()}.items()})
    assert [log.moved for log in logs] == [True, False, True]
    assert who.skipped == 1
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[1][name], states[2][name]) for name in states[0])


def test_a_batch_without_any_settled_label_moves_nothing(tmp_path: Path) -> None:
    who = learner()
    before = {name: p.detach().clone() for name, p in who.model.named_parameters()}
    batch, targets = small.SmallRows(8).batch(np.arange(8))
    log = who.step(0, 1, batch, targets._replace(label_mask=np.zeros_like(targets.label_mask)))
    assert (log.loss, log.gradient_norm, log.weights) == (0.0, 0.0, {"task": (0.0, 0.0)})
    assert all(torch.equal(p, before[name]) for name, p in who.model.named_parameters())


@pytest.mark.parametrize("fresh", [True, False])
def test_tables_start_over_with_every_pass(tmp_path: Path, fresh: bool) -> None:
    """A row that the second pass has not met yet is back at its first size, and no table knows the first pass's labels."""
    who = learner()
    table = next(p for name, p in who.model.named_parameters() if name.startswith("ids."))
    learned, norms = torch.zeros_like(table), []

    def keep(progress: Progress) -> None:
        norms.append(float(table.detach().norm()))
        if progress.step == 10:
            learned.copy_(table.detach())
        if progress.step == 11:
            kept = (table.detach() == learned).all(dim=1)
            assert kept.any() != fresh

    run(who, tmp_path, rows=80, config={"epochs": 2, "fresh_tables": fresh}, on_progress=keep)
    assert (norms[10] < norms[9]) == fresh


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_an_infinite_feature_is_set_aside_with_its_name_and_row(tmp_path: Path, bad: float) -> None:
    layout = small.small_layout(tmp_path)
    batch, targets = small.SmallRows(4).batch(np.arange(4))
    price = batch.ad_dense.copy()
    price[3, 0] = bad
    labels = targets.labels.copy()
    labels[5, 0] = math.nan
    lenient = Quarantine(layout)
    clean, kept = lenient.clean(batch._replace(ad_dense=price), targets._replace(labels=labels))
    assert (lenient.rows, dict(lenient.by_feature)) == (2, {"price": 1, "label/click": 1})
    assert lenient.example_ids == [bytes(targets.example_id[row]).hex() for row in (3, 5)]
    assert np.isnan(clean.ad_dense[3, 0])
    assert kept.label_mask.any(axis=1).tolist() == [True, True, True, False, True, False, True, True]
    assert np.isfinite(kept.labels).all()
    with pytest.raises(InvalidInput, match=r"example 01010101.* is not finite in \['price'\]"):
        Quarantine(layout, strict=True).clean(batch._replace(ad_dense=price), targets)


def test_an_infinite_user_feature_blames_all_candidates_of_its_request(tmp_path: Path) -> None:
    batch, targets = small.SmallRows(3).batch(np.arange(3))
    taste = batch.user_dense.copy()
    taste[1] = math.inf
    lenient = Quarantine(small.small_layout(tmp_path))
    _, kept = lenient.clean(batch._replace(user_dense=taste), targets)
    assert dict(lenient.by_feature) == {"taste": 2}
    assert kept.label_mask[:, 0].tolist() == [True, True, False, False, True, True]


@pytest.mark.parametrize("world", [2])
def test_processes_together_train_as_one_alone(tmp_path: Path, world: int) -> None:
    """Seven-request steps leave shares uneven; the last step leaves some without rows."""
    alone = small.train_share(Processes(), str(tmp_path), None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(Path(small.__file__)), str(tmp_path), str(port), str(world)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE) for rank in range(world)]
    printed = [process.communicate(timeout=90)[0].decode().split() for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world
    losses = [[float(value) for value in each] for each in printed]
    assert all(each == losses[0] for each in losses)
    np.testing.assert_allclose(losses[0], alone.losses, rtol=2e-5)
    together = checkpoint.load(tmp_path / f"world-{world}")
    one = checkpoint.load(tmp_path / "world-1")
    batch = small.SmallRows(40, seed=9).batch(np.arange(40))[0]
    scores = []
    for found in (one, together):
        model = small.SmallModel()
        checkpoint.load_state(model, found.model)
        scores.append(model.score(batch))
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)
    assert set(one.optimizer) == set(together.optimizer)
