from __future__ import annotations

from pathlib import Path

import pytest
import torch

from feature_store.replay import Replay
from feature_store.spec import load_spec
from feature_store.tables import Tables
from feature_store.world import WorldConfig, generate

DATASETS = Path(__file__).resolve().parents[3] / "feature_store" / "datasets"


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """A generated log of five days, 40 users."""
    torch.set_num_threads(1)
    tables = Tables(tmp_path_factory.mktemp("world"))
    generate(WorldConfig(users=40, ads=60, days=5, requests_per_user=8.0), tables)
    return Replay(load_spec(DATASETS / "world.yaml"), tables)
