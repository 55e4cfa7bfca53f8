"""An untrained model says the base rates of its training rows, not one half."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from feature_store.batch import Targets
from feature_store.replay import Replay
from feature_store.world import DAY_MS, START_MS
from model.gem.batch import Batch
from model.gem.foundation import FoundationModel
from model.gem.presets import tiny
from model.training.base_rates import base_logits
from model.training.rows import ReplayRows
from model.vertical.presets import arm
from model.vertical.tower import VerticalTower
from tests.model.world_batches import batch_of


def targets(labels: list[list[float]], mask: list[list[bool]]) -> Targets:
    rows, objectives = np.shape(labels)
    return Targets(
        labels=np.array(labels, np.float32),
        label_mask=np.array(mask),
        example_id=np.zeros(rows, "V16"),
        user_key=np.zeros(rows, np.int64),
        teacher_logits=np.zeros((rows, objectives), np.float32),
        teacher_mask=np.zeros(rows, bool),
    )


def test_rates_count_settled_rows_alone_and_shrink_towards_the_rate_of_all_surfaces() -> None:
    batch = batch_of([0, 0], [3, 1])._replace(surface=np.array([1, 0], np.int32))
    known = targets([[1, 0], [1, 1], [0, np.nan], [0, 0]], [[True, False], [True, False], [True, False], [True, False]])
    logits = base_logits([(batch, known)], 3)
    everywhere = 2.5 / 5
    for surface, (positive, settled) in enumerate([(0, 1), (2, 3), (0, 0)]):
        rate = (positive + 50 * everywhere) / (settled + 50)
        assert logits[surface, 0].sigmoid().item() == pytest.approx(rate, abs=1e-6)
    assert logits[:, 1].tolist() == [0.0, 0.0, 0.0]


def test_an_untrained_foundation_model_says_the_rates_of_its_surfaces(world: Replay) -> None:
    rows = ReplayRows(world, START_MS, START_MS + 3 * DAY_MS)
    samples = rows.samples(500)
    model = FoundationModel(tiny(), world.layout).eval()
    model.fit_statistics(batch for batch, _ in samples)
    logits = base_logits(samples, len(world.spec.surfaces))
    model.start_at(logits)
    batch = samples[0][0]
    surface_N = torch.from_numpy(np.repeat(batch.surface, np.diff(batch.candidate_offsets))).long()
    torch.testing.assert_close(model(Batch.from_numpy(batch)).logits_NK, logits[surface_N])


def test_a_vertical_starts_both_of_its_heads_at_its_own_surface(world: Replay) -> None:
    tower = VerticalTower(arm("A3", "reels"), world.layout)
    logits = torch.arange(15.0).reshape(5, 3)
    tower.start_at(logits)
    assert tower.serving[-1].bias.tolist() == tower.auxiliary.bias.tolist() == logits[1].tolist()  # type: ignore[union-attr]
