from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from google.protobuf import json_format

from feature_store.errors import CorruptArtefact, FailedPrecondition, InvalidInput
from feature_store.replay import Replay
from feature_store.world import DAY_MS, START_MS
from model.training import artefact
from model.training.evaluate import POOLED, flat
from model.training.fitting import FitConfig
from model.training.learner import Learner
from model.training.optimizers import OptimizerConfig
from model.training.parallel import Processes
from model.training.published import Version, load_foundation, load_vertical, publish_foundation
from model.training.rows import ReplayRows
from model.training.state import BatchOrder
from model.training.teacher import Teacher, TeacherConfig, TeacherCriterion
from model.training.trainer import RunConfig, Snapshot, preset, train, walk_forward

PRESET = "model.gem.presets:tiny"
FIT = FitConfig(batch_requests=32, window_requests=256)
RUN = RunConfig(
    preset=PRESET, train_from_ms=START_MS, train_to_ms=START_MS + 3 * DAY_MS, fit=FIT,
    optimizer=OptimizerConfig(warmup_steps=2, dense_rate=3e-3),
)  # fmt: skip


@pytest.fixture(scope="module")
def snapshots(world: Replay) -> list[tuple[Snapshot, dict[str, torch.Tensor]]]:
    """Each snapshot with a copy of its weights as they were when it was yielded."""
    walked = walk_forward(RUN, world, until_ms=START_MS + 5 * DAY_MS)
    return [(s, {name: value.clone() for name, value in s.teacher.state_dict().items()}) for s in walked]


def seen_by_definition(world: Replay, boundary_ms: int) -> set[bytes]:
    """Examples of which a label could have entered by a boundary, from the tables alone, row by row."""
    objectives = {o.name: (o.attribution_window_seconds * 1000, o.parent) for o in world.spec.message.objectives}
    impressions = world.tables.read("impressions", columns=["example_id", "event_ms"]).to_pylist()
    outcomes = {(row["example_id"], row["objective"]): row for row in world.tables.read("outcomes").to_pylist()}
    seen = set()
    for row in impressions:
        example, at = row["example_id"], row["event_ms"]
        for window, parent in objectives.values():
            happened = outcomes.get((example, parent))
            if parent and (
                happened is None or happened["available_ms"] > boundary_ms
                or happened["occurred_ms"] > at + objectives[parent][0]
            ):  # fmt: skip
                continue
            if at < boundary_ms and at + window <= boundary_ms:
                seen.add(example)
    return seen


def test_a_teacher_has_never_seen_a_label_of_what_it_annotates(
    world: Replay, snapshots: list[tuple[Snapshot, dict[str, torch.Tensor]]]
) -> None:
    log = world.impressions
    assert [(s.annotate_from_ms, s.annotate_to_ms) for s, _ in snapshots] == [
        (START_MS + day * DAY_MS, START_MS + (day + 1) * DAY_MS) for day in (3, 4)
    ]
    for snapshot, _ in snapshots:
        ids = {bytes(name) for name in log.example_id[snapshot.seen]}
        assert ids == seen_by_definition(world, snapshot.annotate_from_ms)
        taught = (log.event_ms >= snapshot.annotate_from_ms) & (log.event_ms < snapshot.annotate_to_ms)
        assert taught.any()
        assert not (taught & snapshot.seen).any()
        assert snapshot.watermark_ms == log.event_ms[snapshot.seen].max() < snapshot.annotate_from_ms


def test_the_offset_log_is_what_the_batches_held_and_every_label_enters_once(world: Replay) -> None:
    entered = np.zeros((len(world.impressions), len(world.spec.objectives)), dtype=int)
    place = {bytes(name): row for row, name in enumerate(world.impressions.example_id)}
    cuts = [START_MS + day * DAY_MS for day in (3, 4, 5)]
    for number, cut in enumerate(cuts):
        since = cuts[number - 1] if number else None
        first = START_MS if since is None else since - 2 * DAY_MS
        rows = ReplayRows(world, max(START_MS, first), cut, known_by_ms=cut, settled_after_ms=since)
        order = BatchOrder(num_rows=len(rows), batch_rows=32, window_rows=64)
        held = set()
        for step in range(order.num_steps):
            _, targets = rows.batch(order.rows(step))
            for name, mask in zip(targets.example_id, targets.label_mask, strict=True):
                entered[place[bytes(name)]] += mask
                held |= {place[bytes(name)]} if mask.any() else set()
        assert held == set(rows.trained().tolist())
    _, last = ReplayRows(world, START_MS, cuts[-1], known_by_ms=cuts[-1]).batch(np.arange(5))
    whole = ReplayRows(world, START_MS, cuts[-1], known_by_ms=cuts[-1])
    _, targets = whole.batch(np.arange(len(whole)))
    settled = np.zeros_like(entered)
    settled[[place[bytes(name)] for name in targets.example_id]] = targets.label_mask
    np.testing.assert_array_equal(entered, settled)
    assert len(last.labels)


def test_only_the_first_stretch_is_passed_again(
    world: Replay, snapshots: list[tuple[Snapshot, dict[str, torch.Tensor]]]
) -> None:
    """Tables start over with each further pass; a later stretch passed twice would forget the ids of all before it."""
    twice = dataclasses.replace(RUN, fit=dataclasses.replace(FIT, epochs=2))
    steps = [len(s.log.losses) for s in walk_forward(twice, world, until_ms=START_MS + 5 * DAY_MS)]
    first, *later = [len(snapshot.log.losses) for snapshot, _ in snapshots]
    assert steps == [2 * first, *later]


def test_positives_known_early_wait_for_the_negatives(world: Replay) -> None:
    """A window that is open at the cut enters neither as a positive nor as a negative."""
    cut = START_MS + 3 * DAY_MS
    rows = ReplayRows(world, START_MS, cut, known_by_ms=cut)
    _, targets = rows.batch(np.arange(len(rows)))
    at = dict(zip((bytes(n) for n in world.impressions.example_id), world.impressions.event_ms, strict=True))
    when = np.array([at[bytes(name)] for name in targets.example_id])
    for k, objective in enumerate(world.spec.message.objectives):
        open_N = when + objective.attribution_window_seconds * 1000 > cut
        assert open_N.any()
        assert not targets.label_mask[open_N, k].any()


def test_one_space_over_all_snapshots_and_foundation_weights_that_move(
    world: Replay, snapshots: list[tuple[Snapshot, dict[str, torch.Tensor]]]
) -> None:
    (_, first), (last, second) = snapshots
    same = {name for name in first if torch.equal(first[name], second[name])}
    compressor = {name for name in first if name.startswith("compressor.")}
    assert compressor - same == {"compressor.encoder.2.weight", "compressor.encoder.2.bias"}, "only these follow the model"
    assert any(name.startswith("foundation.layers") for name in set(first) - same)
    assert last.drift > 0.0


def test_the_compressor_never_moves_the_foundation_model(world: Replay) -> None:
    rows = ReplayRows(world, START_MS, START_MS + 2 * DAY_MS)
    states = []
    for reconstruct in (True, False):
        torch.manual_seed(0)
        teacher = Teacher(TeacherConfig(foundation=preset(PRESET)), world.layout)
        criterion = TeacherCriterion(teacher, objective_weights=(1.0, 1.0, 1.0), reconstruct=reconstruct)
        learner = Learner(teacher, criterion, OptimizerConfig(warmup_steps=1), Processes(), clip_apart=("compressor",))
        for step in range(4):
            learner.step(step, 4, *rows.batch(np.arange(16 * step, 16 * step + 16)))
        states.append(teacher.foundation.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_run_says_what_it_did_and_its_model_comes_back_from_its_folder(world: Replay, tmp_path: Path) -> None:
    run = dataclasses.replace(RUN, valid_to_ms=START_MS + 4 * DAY_MS)
    trained = train(run, world)
    assert trained.log.skipped == trained.quarantine.rows == 0
    assert np.mean(trained.log.losses[-3:]) < np.mean(trained.log.losses[:3])
    assert set(trained.evaluation) == {
        (surface, objective) for surface in (*world.spec.surfaces, POOLED) for objective in world.spec.objectives
    }
    assert trained.evaluation[POOLED, "click"].rows > 0
    assert trained.flops_per_example > 0
    assert 0 < trained.mfu < 1
    assert set(trained.stages.seconds) == {"ceiling", "load", "statistics", "train", "evaluate"}
    golden = ReplayRows(world, START_MS + 3 * DAY_MS, START_MS + 4 * DAY_MS).batch(np.arange(4))[0]
    folder = publish_foundation(
        tmp_path, Version("gem", "1", 0), trained.teacher, world.spec, golden,
        watermark_ms=trained.watermark_ms, metrics=flat(trained.evaluation),
    )  # fmt: skip
    loaded = load_foundation(tmp_path / "gem", world.spec)
    np.testing.assert_array_equal(loaded.teacher.score(golden), trained.teacher.score(golden))
    assert loaded.model_version == "gem/1"
    assert loaded.teacher.space_id("gem") == loaded.manifest.loopfm_space_id == trained.teacher.space_id("gem")
    assert loaded.manifest.solaris_space_id != loaded.manifest.loopfm_space_id
    assert loaded.manifest.metrics["all/click/ne"] == trained.evaluation[POOLED, "click"].ne
    with pytest.raises(FailedPrecondition, match="a vertical model is needed"):
        load_vertical(folder, world.spec)
    config = artefact.read_manifest(folder)
    config.config_json = config.config_json.replace('"width": 32', '"width": 64')
    (folder / "manifest.json").write_text(json_format.MessageToJson(config))
    with pytest.raises(CorruptArtefact, match="was written for architecture"):
        load_foundation(folder, world.spec)


def test_a_resumed_run_ends_as_the_one_that_was_never_stopped(world: Replay, tmp_path: Path) -> None:
    run = dataclasses.replace(RUN, fit=dataclasses.replace(FIT, checkpoint_steps=3))
    class Stopped(Exception):
        pass

    def stop(progress: object) -> None:
        if progress.step == 5:  # type: ignore[attr-defined]
            raise Stopped

    whole = train(run, world)
    with pytest.raises(Stopped):
        train(run, world, checkpoints=tmp_path, on_progress=stop)
    rest = train(run, world, checkpoints=tmp_path)
    assert rest.log.first_step == 3
    assert rest.log.losses == whole.log.losses[3:]
    with pytest.raises(FailedPrecondition, match="is of another run"):
        train(dataclasses.replace(run, statistics_requests=7), world, checkpoints=tmp_path)


@pytest.mark.parametrize(
    "path", ["model.gem.presets", "model.gem.presets:huge", "nowhere:tiny", "model.training.trainer:preset", "builtins:dict"]
)
def test_a_preset_that_is_none_is_refused_at_once(path: str) -> None:
    with pytest.raises(InvalidInput, match=r"try model\.gem\.presets:tiny"):
        preset(path)


def test_a_stretch_without_requests_and_missing_weights_are_refused(world: Replay) -> None:
    with pytest.raises(InvalidInput, match="there is no request"):
        train(dataclasses.replace(RUN, train_from_ms=0, train_to_ms=1), world)
    with pytest.raises(InvalidInput, match="objective_weights has 2 values"):
        train(dataclasses.replace(RUN, objective_weights=(1.0, 1.0)), world)
    with pytest.raises(InvalidInput, match="must lie after train_from_ms"):
        dataclasses.replace(RUN, train_to_ms=START_MS)
