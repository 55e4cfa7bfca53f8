"""Batches of random features in the generated world's layout, whole or a request at a time."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.batches import WORLD as WORLD
from benchmarks.batches import batch_of as batch_of
from benchmarks.batches import layout as layout
from feature_store.batch import FeatureBatch
from feature_store.layout import Layout
from feature_store.spec import load_spec


def grouped() -> Layout:
    """The world's layout with searches in a stream of their own."""
    spec = load_spec(WORLD)
    message = type(spec.message).FromString(spec.message.SerializeToString())
    for source in message.event_sources:
        source.merge_group = source.name
    return Layout(dataclasses.replace(spec, message=message))


def rows_of(batch: FeatureBatch, request: int) -> FeatureBatch:
    """One request of a batch."""
    e, c = batch.event_offsets[request : request + 2], batch.candidate_offsets[request : request + 2]
    kept: dict[str, np.ndarray] = {}
    for name, value in batch._asdict().items():
        if name.endswith("_offsets"):
            kept[name] = value[request : request + 2] - value[request]
        elif name.startswith("event_"):
            kept[name] = value[e[0] : e[1]]
        elif name.startswith(("ad_", "pair_")):
            kept[name] = value[c[0] : c[1]]
        elif name.startswith("memory_"):
            kept[name] = value
        else:
            kept[name] = value[request : request + 1]
    return FeatureBatch(**kept)
