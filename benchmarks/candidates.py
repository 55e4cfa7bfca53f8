"""Scores one user's candidates: the foundation model against HSTU and DIN, of this tree and of public libraries.

    python -m benchmarks.candidates --json OUT

Latency and peak memory on one thread by candidates and by length of the history, untrained weights, features in memory. No
model gets more than 1,000 candidates a pass; HSTU is also timed at 100, its cost being quadratic in them, and its better time
counts. The peers are DINs (extra `peers`), with their inputs laid out for nothing.
Knows models and passes. Does not know services.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.batches import batch_of, layout
from benchmarks.measure import Timing, alternate, finish, parser, peak_megabytes
from benchmarks.peers import Make, Run, installed
from feature_store.batch import FeatureBatch
from model.baselines.din import DeepInterestNetwork, DinConfig
from model.baselines.frame import Baseline
from model.baselines.hstu import HstuConfig, HstuNetwork
from model.gem.batch import Batch
from model.gem.foundation import FoundationModel
from model.gem.presets import public_s, tiny
from model.nn.shape import InputShape, input_shape

Prepare = Callable[[FeatureBatch], Run]
OURS = ("public_s", "tiny")
MOST, FEW = 1000, 100
"""Candidates a pass."""
LONGEST = 1024
TARGET = 5.0
"""Times that the best rival should take of ours at 1,000 candidates."""


def main() -> None:
    """Prepares every model for every size, and prints medians, spread, memory and ratios."""
    made = parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    made.add_argument("--seed", type=int, default=0, help="of weights and features")
    options = made.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rivals, absent = _rivals()
    for reason in absent.values():
        print(f"left out: {reason}")
    sizes, lengths = ((1, 100), (20,)) if options.quick else ((1, 10, 100, 1000, 10_000), (100, 1000))
    cells: list[dict[str, Any]] = []
    with torch.inference_mode():
        for events in lengths:
            for shown in sizes:
                cells += _cells(rivals, events, shown, options.seed)
    columns = ["history × candidates", "model", "ms", "low … high", "rounds", "MB at most", "/ public_s", "/ tiny"]
    result = {"benchmark": "one user's candidates on one thread", "cells": cells, "absent": absent, "seed": options.seed}
    finish(result | {"target": _reached(cells)}, out=options.json, columns=columns, rows=[_row(cell) for cell in cells])


def _rivals() -> tuple[dict[str, Prepare], dict[str, str]]:
    """(ours and theirs by name, why a library is left out)."""
    made = layout()
    models: dict[str, FoundationModel | Baseline] = {
        "public_s": FoundationModel(dataclasses.replace(public_s(), max_events=LONGEST), made),
        "tiny": FoundationModel(dataclasses.replace(tiny(), max_events=LONGEST), made),
        "HSTU": HstuNetwork(HstuConfig(max_events=LONGEST), made),
        "DIN": DeepInterestNetwork(DinConfig(max_events=LONGEST), made),
    }
    training = [batch_of([100] * 20, [2] * 20)]
    out: dict[str, Prepare] = {}
    for name, model in models.items():
        model.eval()
        model.fit_statistics(training)
        out[name] = _in_passes(_model(model), MOST)
    out[f"HSTU, {FEW} a pass"] = _in_passes(_model(models["HSTU"]), FEW)
    found, absent = installed()
    shape = input_shape(made)
    return out | {name: _in_passes(_peer(made, shape), MOST) for name, made in found.items()}, absent


def _model(model: FoundationModel | Baseline) -> Prepare:
    def prepare(batch: FeatureBatch) -> Run:
        tensors = Batch.from_numpy(batch)
        if isinstance(model, Baseline):
            return lambda: model(tensors)
        return lambda: model(tensors).logits_NK

    return prepare


def _peer(make: Make, shape: InputShape) -> Prepare:
    return lambda batch: make(shape, batch)


def _in_passes(prepare: Prepare, most: int) -> Prepare:
    """Scores the candidates of a request, at most `most` at a time."""

    def whole(batch: FeatureBatch) -> Run:
        parts = [prepare(_shown(batch, at, most)) for at in range(0, batch.num_candidates, most)]
        return lambda: torch.cat([part() for part in parts])

    return whole


def _shown(batch: FeatureBatch, start: int, most: int) -> FeatureBatch:
    """The request with some of its candidates."""
    kept = slice(start, start + most)
    parts = {name: value[kept] for name, value in batch._asdict().items() if name.startswith(("ad_", "pair_"))}
    return batch._replace(candidate_offsets=np.array([0, len(parts["ad_ids"])]), **parts)


def _cells(rivals: Mapping[str, Prepare], events: int, shown: int, seed: int) -> Iterator[dict[str, Any]]:
    """What each took for one size; those whose passes would be the same as another's are left out."""
    batch = batch_of([events], [shown], seed=seed)
    runs = {name: make(batch) for name, make in rivals.items() if shown > FEW or not name.endswith("a pass")}
    times = alternate(runs, rounds=_rounds(events, shown))
    memory = {name: peak_megabytes(run) for name, run in runs.items()}
    for name, timing in times.items():
        yield {
            "model": name,
            "events": events,
            "candidates": shown,
            "times": timing,
            "megabytes": memory[name],
            "ratios": {ours: timing.median / times[ours].median for ours in OURS},
        }


def _rounds(events: int, shown: int) -> int:
    """Fewer where a round takes minutes."""
    if shown > MOST:
        return 1 if events > FEW else 3
    return 15 if shown <= FEW else 7


def _reached(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best rival over ours at 1,000 candidates, by history."""
    at = [cell for cell in cells if cell["candidates"] == MOST]
    out = []
    for events in sorted({cell["events"] for cell in at}):
        rivals = [cell for cell in at if cell["events"] == events and cell["model"] not in OURS]
        best = min(rivals, key=lambda cell: cell["times"].median)
        out.append({"events": events, "best": best["model"], "wanted": TARGET, **best["ratios"]})
    return out


def _row(cell: dict[str, Any]) -> list[object]:
    timing: Timing = cell["times"]
    spread = f"{timing.low * 1e3:.1f} … {timing.high * 1e3:.1f}"
    size, memory = f"{cell['events']} × {cell['candidates']}", cell["megabytes"]
    shown = None if memory is None else f"{memory:.0f}"
    return [size, cell["model"], timing.median * 1e3, spread, timing.rounds, shown, *(cell["ratios"][o] for o in OURS)]


if __name__ == "__main__":
    main()
