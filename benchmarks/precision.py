"""Measures what MXFP8 costs in accuracy: of numbers in a trained model, and of a model that is trained or read with it.

    python -m benchmarks.precision --json OUT

Everything is emulated: no figure here is a speed. The model is the foundation model on a generated world; which of its
layers are quantized, `model.training.precision` decides. Knows arms and errors. Does not know formats.

Error: SQNR = 10 log10(Σx² / Σ(x̂ − x)²) of each layer's weights, activations and gradients, median and worst of layers,
and the share of numbers that were not 0 and are read as 0.
Training: NE on later days against float32's on the same rows, seed by seed the same batches.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.learning import TaskCriterion, against, begun, learner_of, scorer
from benchmarks.measure import finish, parser
from feature_store.replay import Replay
from feature_store.spec import load_spec
from feature_store.tables import Tables
from feature_store.world import DAY_MS, START_MS, WorldConfig, generate
from model.gem.foundation import FoundationModel
from model.kernels.quantize import (
    BLOCK,
    E4M3,
    E5M2,
    Format,
    Scaling,
    Tile,
    dequantize,
    quantize,
)
from model.kernels.quantized_matmul import Recipe, hadamard, rotate
from model.training.evaluate import POOLED, Predictions, evaluate, predict
from model.training.fitting import FitConfig, fit
from model.training.metrics import Undefined
from model.training.precision import from_mx, to_mx
from model.training.quarantine import Quarantine
from model.training.rows import ReplayRows
from model.training.trainer import preset
from services.cli.console import table

WORLD = Path(__file__).resolve().parents[1] / "feature_store/datasets/world.yaml"
FLOAT = "float32"
ARMS: Mapping[str, Recipe] = {
    "32×32": Recipe(),
    "1×32": Recipe(square=False),
    "32×32, rotated, E5M2 gradients": Recipe(rotation=16, backward=E5M2),
    "32×32, exact weight gradient": Recipe(exact_weight_gradient=True),
}
"""Trained and read with MXFP8. A rotation of 16 fills every layer of every preset."""
READ = "float32, read as 1×32"
OPERANDS = ("weights", "activations", "gradients")
_PROBE = 64
"""Requests whose activations and gradients are measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to quantize a matrix."""

    format: Format | None = E4M3
    """None is bfloat16, for scale."""
    tile: Tile | None = (BLOCK, BLOCK)
    """None is the whole matrix."""
    scaling: Scaling = "up"
    rotated: bool = False
    stochastic: bool = False

    def __str__(self) -> str:
        if self.format is None:
            return "bfloat16"
        tile = "one scale" if self.tile is None else "{}×{}".format(*self.tile)
        flags = [name for name in ("rotated", "stochastic") if getattr(self, name)]
        return ", ".join([self.format.name, tile, self.scaling, *flags])

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(what was quantized, what is read back)."""
        if self.format is None:
            return x, x.bfloat16().float()
        turned = rotate(x, hadamard(math.gcd(x.shape[1], BLOCK), seed=0)) if self.rotated else x
        noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) if self.stochastic else None
        tile = self.tile or (x.shape[0], x.shape[1])
        return turned, dequantize(quantize(turned, self.format, tile=tile, scaling=self.scaling, noise=noise))


VARIANTS = (
    Variant(format=None),
    *(Variant(format=f, tile=tile) for f in (E4M3, E5M2) for tile in ((1, BLOCK), (BLOCK, BLOCK), None)),
    *(Variant(tile=tile, scaling="floor") for tile in ((1, BLOCK), (BLOCK, BLOCK))),
    *(Variant(tile=tile, rotated=True) for tile in ((1, BLOCK), (BLOCK, BLOCK), None)),
    *(Variant(format=f, stochastic=True) for f in (E4M3, E5M2)),
)


class World:
    """Days to train on, and later days to score."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        tables = Tables(folder)
        config = WorldConfig(users=options.users, ads=max(40, options.users // 4), days=options.days)
        generate(config, tables)
        self.replay = Replay(load_spec(WORLD), tables)
        cut_ms = START_MS + (options.days - 1) * DAY_MS
        self.train = ReplayRows(self.replay, START_MS, cut_ms, known_by_ms=cut_ms)
        self.test = ReplayRows(self.replay, cut_ms, config.end_ms)


def main() -> None:
    """Trains every arm, measures both kinds of error and prints them."""
    options = _options()
    runs: dict[str, list[Predictions]] = defaultdict(list)
    errors: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        world = World(options, Path(folder))
        for seed in range(options.seeds):
            for arm, recipe in {FLOAT: None, **ARMS}.items():
                start = time.monotonic()
                model = _trained(world, recipe, seed, options)
                runs[arm].append(predict(scorer(model), world.test))
                if recipe is None:
                    errors = errors or _errors(model, world)  # of the first seed
                    to_mx(model, Recipe(square=False))
                    runs[READ].append(predict(scorer(model), world.test))
                print(f"seed {seed}, {arm}: {time.monotonic() - start:.0f} s", flush=True)  # a benchmark prints
        cells = list(_training_cells(runs, world, draws=100 if options.quick else 1000))
    _report(errors, cells, world, options)


def _options() -> argparse.Namespace:
    made = parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    made.add_argument("--preset", default="model.gem.presets:public_s", help="foundation model")
    made.add_argument("--users", type=int, default=1500, help="of the world")
    made.add_argument("--days", type=int, default=8, help="of the world; the last one is scored")
    made.add_argument("--batch", type=int, default=64, help="requests of a step")
    made.add_argument("--seeds", type=int, default=1, help="runs of every arm")
    options = made.parse_args()
    if options.quick:
        options.preset, options.users, options.days, options.seeds = "model.gem.presets:tiny", 40, 3, 1
    return options


def _trained(world: World, recipe: Recipe | None, seed: int, options: argparse.Namespace) -> FoundationModel:
    """A model after one pass over the training days; first weights, batches and dropout are the same for every recipe."""
    make = partial(FoundationModel, preset(options.preset))
    model = begun(make, world.replay.layout, world.train.samples(20_000), seed)
    if recipe is not None:
        to_mx(model, recipe)
    how = FitConfig(batch_requests=options.batch, seed=seed)
    fit(learner_of(model, seed), world.train, how, quarantine=Quarantine(world.replay.layout))
    return model.eval()


def _errors(model: FoundationModel, world: World) -> list[dict[str, Any]]:
    """SQNR of every variant and operand over the layers that would be quantized."""
    found, cells = _operands(model, world), []
    for variant in VARIANTS:
        for operand in OPERANDS:
            pairs = [variant.read(x) for x in found[operand]]
            decibels = [_sqnr(true, read) for true, read in pairs]
            lost = [float((read[true != 0] == 0).float().mean()) for true, read in pairs]
            cells.append({
                "variant": str(variant), "operand": operand, "layers": len(pairs), "lost": max(lost),
                "sqnr": float(np.median(decibels)), "sqnr_low": min(decibels),
            })  # fmt: skip
    return cells


def _operands(model: FoundationModel, world: World) -> Mapping[str, list[Tensor]]:
    """Matrices that one batch of later requests makes the layers multiply, forward and backward."""
    weights, activations, outputs = [], [], []

    def keep(layer: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> None:
        weights.append(layer.weight.detach())
        activations.append(inputs[0].detach())
        output.retain_grad()
        outputs.append(output)

    names = to_mx(model, Recipe())
    from_mx(model)
    handles = [model.get_submodule(name).register_forward_hook(keep) for name in names]
    sums = TaskCriterion(model)(*world.test.batch(np.arange(min(_PROBE, len(world.test)))))["task"]
    torch.autograd.backward(sums.loss_K.sum() / sums.weight_K.sum())
    model.zero_grad(set_to_none=True)
    for handle in handles:
        handle.remove()
    gradients = [output.grad for output in outputs if output.grad is not None]
    found = zip(OPERANDS, (weights, activations, gradients), strict=True)
    return {name: [x.flatten(0, -2) for x in tensors if x.any()] for name, tensors in found}


def _sqnr(true: Tensor, read: Tensor) -> float:
    noise = float((read - true).double().square().sum())
    return 10 * math.log10(float(true.double().square().sum()) / noise) if noise else math.inf


def _training_cells(
    runs: Mapping[str, Sequence[Predictions]], world: World, *, draws: int
) -> Iterator[dict[str, Any]]:
    spec = world.replay.spec
    for arm, made in runs.items():
        measured = [evaluate(run, spec.surfaces, spec.objectives) for run in made]
        between = against(made, runs[FLOAT], spec.surfaces, spec.objectives, num_draws=draws)
        for objective in spec.objectives:
            interval = None if arm == FLOAT else between[POOLED, objective]
            yield {
                "arm": arm, "objective": objective, "rows": measured[0][POOLED, objective].rows,
                "ne": [_number(one[POOLED, objective].ne) for one in measured],
                "against_float32": interval and {"low": _number(interval.low), "high": _number(interval.high)},
            }  # fmt: skip


def _number(value: float | Undefined) -> float | None:
    return None if isinstance(value, Undefined) else float(value)


def _report(
    errors: Sequence[Mapping[str, Any]], cells: Sequence[Mapping[str, Any]], world: World, options: argparse.Namespace
) -> None:
    by_variant: dict[str, list[object]] = {}
    for cell in errors:
        shown = f"{cell['sqnr']:.1f} ({cell['sqnr_low']:.1f}) {cell['lost']:.2%}"
        by_variant.setdefault(cell["variant"], [cell["variant"]]).append(shown)
    title = "SQNR in dB, median of layers (worst), and most numbers of a layer that became 0"
    Console(width=160).print(table(title, ["variant", *OPERANDS], list(by_variant.values())))
    base = {cell["objective"]: cell["ne"] for cell in cells if cell["arm"] == FLOAT}
    rows = [[c["objective"], c["arm"], *_differences(c, base[c["objective"]]), c["rows"]] for c in cells]
    steps = -(-len(world.train) // options.batch)
    result = {
        "benchmark": "MXFP8, emulated", "cells": cells, "errors": errors, "steps": steps,
        **{name: getattr(options, name) for name in ("preset", "users", "days", "batch", "seeds", "quick")},
    }  # fmt: skip
    columns = ["objective", "arm", "NE of float32", "NE − float32's, by seed", "95 %, first seed", "rows"]
    finish(result, out=options.json, columns=columns, rows=rows)


def _differences(cell: Mapping[str, Any], base: Sequence[float | None]) -> list[str]:
    def signed(values: Sequence[float | None], mark: str) -> str:
        return mark.join("undefined" if v is None else f"{v:+.4f}" for v in values)

    pairs = zip(cell["ne"], base, strict=True)
    gaps = [None if a is None or b is None else a - b for a, b in pairs]
    interval = cell["against_float32"]
    shown = signed((interval["low"], interval["high"]), " … ") if interval else ""
    return [signed(base, ", ").replace("+", ""), signed(gaps, ", "), shown]


if __name__ == "__main__":
    main()
