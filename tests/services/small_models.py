"""Artefacts of real models, small enough to build in a test, and requests for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from feature_store.batch import FIELDS, FeatureBatch
from feature_store.layout import Column, Layout, total_width
from feature_store.spec import Spec, load_spec
from model.gem.presets import tiny
from model.loopfm.config import CompressorConfig
from model.training.published import Version, publish_foundation, publish_vertical
from model.training.teacher import Teacher, TeacherConfig
from model.vertical.presets import arm
from model.vertical.tower import VerticalTower

ROOT = Path(__file__).resolve().parents[2]
SPEC_PATH = ROOT / "feature_store/datasets/world.yaml"
T0 = 1_700_000_000_000
LOOPFM_SPACE, SOLARIS_SPACE = b"loopfm-1", b"solaris1"
DIM = 64


def world_spec() -> Spec:
    return load_spec(SPEC_PATH)


def requests(
    spec: Spec, candidates: list[int], *, events: int = 12, memory: int = 6, seed: int = 0
) -> FeatureBatch:
    """A batch of requests with random features; `candidates` says how many ads each has."""
    rng, layout = np.random.default_rng(seed), Layout(spec)
    r, n = len(candidates), sum(candidates)
    sizes = {"request": r, "candidate": n, "event": r * events, "memory": r * memory}
    columns: dict[str, tuple[Column, ...]] = {
        name: getattr(layout, name)
        for name in ("user_ids", "user_dense", "ad_ids", "ad_dense", "event_ids", "event_dense")
    }
    widths = {name: total_width(found) for name, found in columns.items()}
    widths |= {"memory_q": DIM // 2, "pair_q": DIM, "pair_meta": 3}
    values: dict[str, Any] = {}
    for name, field in FIELDS.items():
        shape = (sizes[field.axis],) + ((widths[name],) if field.ndim > 1 else ())
        drawn = rng.normal(size=shape) if field.dtype is np.float32 else rng.integers(0, 2, shape)
        values[name] = drawn.astype(field.dtype)
    for name in ("user_ids", "ad_ids", "event_ids"):
        values[name] = rng.integers(0, 1_000, values[name].shape)
    values["memory_q"] = rng.integers(0, 256, values["memory_q"].shape).astype(np.uint8)
    values["pair_q"] = rng.integers(-127, 128, values["pair_q"].shape).astype(np.int8)
    values["pair_level"] = rng.integers(0, 5, n).astype(np.int32)
    values["pair_meta"] = np.abs(values["pair_meta"])
    values["pair_scale"] = np.abs(values["pair_scale"])
    values["request_ms"][:] = T0
    for name in ("event_ms", "memory_ms"):
        values[name] = np.sort(T0 - rng.integers(1, 10**8, len(values[name])))
    offsets = {
        "event_offsets": np.arange(r + 1, dtype=np.int64) * events,
        "candidate_offsets": np.concatenate([[0], np.cumsum(candidates)]).astype(np.int64),
        "memory_offsets": np.arange(r + 1, dtype=np.int64) * memory,
    }
    return FeatureBatch(**values, **offsets)


def vertical(
    root: Path, spec: Spec, name: str, *, version: str = "1", surface: str = "feed"
) -> Path:
    """A published vertical of a standard arm (A0 … A3), its weights as they were drawn."""
    torch.manual_seed(0)
    tower = VerticalTower(arm(name, surface), Layout(spec))
    golden = requests(spec, [4, 3], seed=1)
    tower.fit_statistics([golden])
    return publish_vertical(
        root, Version(f"{surface}-{name.lower()}", version, T0), tower, spec, golden,
        watermark_ms=T0, metrics={}, loopfm_space_id=LOOPFM_SPACE, solaris_space_id=SOLARIS_SPACE,
    )  # fmt: skip


def foundation(root: Path, spec: Spec, *, version: str = "1") -> Path:
    """A published tiny foundation model, its weights as they were drawn."""
    torch.manual_seed(0)
    teacher = Teacher(TeacherConfig(foundation=tiny(), compressor=CompressorConfig()), Layout(spec))
    golden = requests(spec, [4, 3], seed=1)
    teacher.foundation.fit_statistics([golden])
    return publish_foundation(
        root, Version("gem", version, T0), teacher, spec, golden, watermark_ms=T0, metrics={}
    )
