from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from feature_store.batch import Targets
from feature_store.errors import FailedPrecondition, InvalidInput
from feature_store.replay import Replay
from feature_store.world import DAY_MS, START_MS
from model.gem.batch import Batch
from model.training.distill import VerticalCriterion
from model.training.fitting import FitConfig
from model.training.learner import Learner
from model.training.loss import DistillConfig, distillation
from model.training.optimizers import OptimizerConfig
from model.training.parallel import Processes
from model.training.published import Version, load_vertical, publish_vertical, score_of
from model.training.rows import ReplayRows
from model.training.vertical import VerticalRun, train_vertical
from model.vertical.presets import ARMS, arm
from model.vertical.tower import VerticalTower

WEIGHTS = (1.0, 1.0, 1.0)


def taught(targets: Targets, *, seed: int = 0) -> Targets:
    """The targets with soft labels for half of the rows."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=targets.labels.shape).astype(np.float32)
    return targets._replace(teacher_logits=logits, teacher_mask=generator.random(len(logits)) < 0.5)


def tower_of(world: Replay, **changes: object) -> VerticalTower:
    torch.manual_seed(0)
    return VerticalTower(dataclasses.replace(arm("A1", "feed"), **changes), world.layout)  # type: ignore[arg-type]


def trajectory(world: Replay, *, kd: bool, feed: bool, weight: float = 1.0) -> dict[str, torch.Tensor]:
    """Weights after eight steps, without the auxiliary head's."""
    rows = ReplayRows(world, START_MS, START_MS + 3 * DAY_MS, surface="feed")
    tower = tower_of(world, kd=kd)
    criterion = VerticalCriterion(tower, objective_weights=WEIGHTS, distill=DistillConfig(weight=weight))
    learner = Learner(tower, criterion, OptimizerConfig(warmup_steps=1), Processes())
    for step in range(8):
        batch, targets = rows.batch(np.arange(8 * step, 8 * step + 8))
        learner.step(step, 8, batch, taught(targets) if feed else targets)
    return {name: value for name, value in tower.state_dict().items() if not name.startswith("auxiliary")}


def test_without_its_feed_distillation_leaves_training_as_if_it_were_off(world: Replay) -> None:
    off = trajectory(world, kd=False, feed=True)
    outage = trajectory(world, kd=True, feed=False)
    weightless = trajectory(world, kd=True, feed=True, weight=0.0)
    on = trajectory(world, kd=True, feed=True)
    assert all(torch.equal(off[name], outage[name]) for name in off)
    assert all(torch.equal(off[name], weightless[name]) for name in off)
    assert any(not torch.equal(off[name], on[name]) for name in off)


def test_soft_labels_send_nothing_into_the_serving_head(world: Replay) -> None:
    tower = tower_of(world)
    batch, targets = ReplayRows(world, START_MS, START_MS + DAY_MS, surface="feed").batch(np.arange(8))
    targets = taught(targets)
    output = tower(Batch.from_numpy(batch))
    assert output.kd_logits_NK is not None
    sums = distillation(
        output.kd_logits_NK, torch.from_numpy(targets.teacher_logits), torch.from_numpy(targets.teacher_mask), DistillConfig()
    )
    sums.loss_K.sum().backward()
    assert all(parameter.grad is None for parameter in tower.serving.parameters())
    assert tower.auxiliary is not None
    assert tower.auxiliary.weight.grad is not None
    assert tower.backbone.weight.grad is not None
    assert tower.backbone.weight.grad.any()


def test_the_backbone_gradient_of_soft_labels_scales_with_beta(world: Replay) -> None:
    batch, targets = ReplayRows(world, START_MS, START_MS + DAY_MS, surface="feed").batch(np.arange(8))
    targets, gradients = taught(targets), []
    for beta in (1.0, 4.0):
        tower = tower_of(world, kd_gradient_scale=beta)
        torch.manual_seed(5)
        output = tower(Batch.from_numpy(batch))
        sums = distillation(
            output.kd_logits_NK, torch.from_numpy(targets.teacher_logits), torch.from_numpy(targets.teacher_mask), DistillConfig()
        )
        sums.loss_K.sum().backward()
        gradients.append((output.logits_NK.detach(), tower.backbone.weight.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    torch.testing.assert_close(4.0 * gradients[0][1], gradients[1][1])


def run_of(name: str, **changes: object) -> VerticalRun:
    run = VerticalRun(
        model=arm(name, "feed"), train_from_ms=START_MS, train_to_ms=START_MS + 3 * DAY_MS, test_to_ms=START_MS + 4 * DAY_MS,
        fit=FitConfig(batch_requests=32), optimizer=OptimizerConfig(warmup_steps=2),
    )  # fmt: skip
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(ARMS))
def test_every_arm_trains_scores_its_surface_and_comes_back_from_its_folder(
    world: Replay, tmp_path: Path, name: str
) -> None:
    trained = train_vertical(run_of(name), world)
    assert trained.predictions is not None
    feed = world.spec.surface_index("feed")
    assert (trained.predictions.surface_N == feed).all()
    assert trained.evaluation["feed", "click"].rows == len(trained.predictions.user_N)
    assert trained.evaluation["reels", "click"].rows == 0
    golden = ReplayRows(world, START_MS, START_MS + DAY_MS, surface="feed").batch(np.arange(2))[0]
    config = trained.tower.config
    publish_vertical(
        tmp_path, Version(f"feed-{name}", "1", 0), trained.tower, world.spec, golden, watermark_ms=trained.watermark_ms,
        metrics={}, loopfm_space_id=b"l" * 8, solaris_space_id=b"s" * 8,
    )  # fmt: skip
    loaded = load_vertical(tmp_path / f"feed-{name}", world.spec)
    np.testing.assert_array_equal(score_of(loaded.tower)(golden), score_of(trained.tower)(golden))
    assert loaded.manifest.loopfm_space_id == (b"l" * 8 if config.loopfm else b"")
    assert loaded.manifest.solaris_space_id == (b"s" * 8 if config.solaris else b"")
    assert loaded.manifest.surface == "feed"


def test_arms_are_compared_on_identical_rows(world: Replay) -> None:
    one, two = (train_vertical(run_of(name), world).predictions for name in ("A0", "A1"))
    assert one is not None
    assert two is not None
    assert one.example_id_N.tobytes() == two.example_id_N.tobytes()


def test_a_model_that_reads_a_space_must_name_it(world: Replay, tmp_path: Path) -> None:
    golden = ReplayRows(world, START_MS, START_MS + DAY_MS, surface="feed").batch(np.arange(2))[0]
    tower = VerticalTower(arm("A2", "feed"), world.layout)
    with pytest.raises(FailedPrecondition, match="reads loopfm, but no space is given"):
        publish_vertical(tmp_path, Version("feed-A2", "1", 0), tower, world.spec, golden, watermark_ms=0, metrics={})


def test_a_surface_without_requests_is_refused(world: Replay) -> None:
    with pytest.raises(InvalidInput, match="surface 'feed' has no request"):
        train_vertical(run_of("A0", train_from_ms=0, train_to_ms=1, test_to_ms=0), world)
