"""Fits how normalized entropy falls with training compute: Kunlun against InterFormer, on a generated world.

    python -m benchmarks.scaling --runs DIR --seeds 3 --json OUT --plot OUT.svg

Knows the sizes and the law NE = NE_0 − η·log10(C/C_0). Does not know training. Runs lie in DIR: the same command goes on where
it was stopped, and only fits and draws once all are there. The world's functional form is ours.

A size can only tell where there are rows enough to fill it: with a quarter of these users widths 16 and 32 had been level, so
there are as many as this. Requests are whole, as they are trained on in production: the ads shown share one history.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.learning import Make
from benchmarks.measure import finish, parser
from benchmarks.trials import Reading, Trial, WorldTrials
from feature_store.world import DAY_MS, START_MS, WorldConfig
from model.baselines.interformer import InterFormerConfig, InterFormerNetwork
from model.gem.config import GemConfig
from model.gem.foundation import FoundationModel
from model.training.rows import ReplayRows
from model.training.throughput import TRAINING_FACTOR

WORLD = WorldConfig(users=2400, ads=400, days=8, dim=4)
QUICK = WorldConfig(users=16, ads=40, days=3, requests_per_user=4, dim=4)
SIZES = ((16, 2), (24, 2), (32, 2), (48, 4), (64, 4))
"""Width and layers of each compute point."""
BATCH = 32
"""Requests of a step."""
REQUESTS = Reading(
    name="requests",
    train=lambda replay, world: ReplayRows(replay, START_MS, world.end_ms - DAY_MS),
    test=lambda replay, world: ReplayRows(replay, world.end_ms - DAY_MS, world.end_ms),
    samples=2_000,
    scored=64,
)
MODELS = ("Kunlun", "InterFormer")
DRAWS = 2000
_COLORS = {"Kunlun": "#12508f", "InterFormer": "#c2452d"}


@dataclass(frozen=True, slots=True)
class Law:
    """NE = at_reference − slope · log10(C / reference)."""

    slope: float
    """η: NE gained by ten times the compute."""
    low: float
    """Of 95 in 100 bootstrap draws over seeds."""
    high: float
    at_reference: float
    reference: float
    """C_0, FLOPs: the geometric mean of the model's runs."""


def kunlun(width: int, layers: int) -> GemConfig:
    """A foundation model of one compute point."""
    return GemConfig(
        width=width, heads=4 if width >= 48 else 2, layers=layers, rank=width // 4, hidden=4 * width, id_width=width // 4,
        experts=2, factor_tokens=8, linear_tokens=8, seeds=32, sequence_tokens=8, block=16, radius=1,
    )  # fmt: skip


def interformer(width: int, layers: int) -> InterFormerConfig:
    """The rival of the same width; its cost differs, so each is drawn at its own."""
    return InterFormerConfig(
        width=width, heads=4 if width >= 48 else 2, layers=layers, hidden=4 * width, id_width=width // 4,
        generator_hidden=width // 2, dot_hidden=width, cross_rank=width // 2, mlp_hidden=3 * width,
    )  # fmt: skip


def main() -> None:
    """Trains what is missing, then fits, prints and draws."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        trials = WorldTrials(options.runs or Path(folder), QUICK if options.quick else WORLD, batch=BATCH, reading=REQUESTS)
        runs = _runs(trials, 2 if options.quick else options.seeds, SIZES[:2] if options.quick else SIZES)
        bayes = trials.bayes
    laws = {model: law(of) for model, of in runs.items()}
    ratio = slope_ratio(runs["Kunlun"], runs["InterFormer"])
    if options.plot:
        _draw(runs, laws, bayes, options.plot)
    _finish(options, runs, laws, ratio, bayes)


def _options() -> argparse.Namespace:
    made = parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    made.add_argument("--runs", type=Path, help="folder that keeps runs; without it nothing is kept")
    made.add_argument("--seeds", type=int, default=3, help="runs of each size")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw NE over compute here (.svg or .png)")
    return made.parse_args()


def _runs(trials: WorldTrials, seeds: int, sizes: Sequence[tuple[int, int]]) -> dict[str, list[Trial]]:
    """Seed by seed and size by size, both models in turn: a stopped benchmark has comparable runs of both."""
    runs: dict[str, list[Trial]] = {model: [] for model in MODELS}
    for seed in range(seeds):
        for width, layers in sizes:
            makes: Mapping[str, Make] = {
                "Kunlun": partial(FoundationModel, kunlun(width, layers)),
                "InterFormer": partial(InterFormerNetwork, interformer(width, layers)),
            }
            for model, make in makes.items():
                runs[model].append(trials.run(f"{model}-{width}x{layers}", seed, make))
    return runs


def compute(runs: Sequence[Trial]) -> npt.NDArray[np.float64]:
    """[n] training FLOPs of each run."""
    return np.array([TRAINING_FACTOR * run.flops * run.rows for run in runs])


def law(runs: Sequence[Trial], *, draws: int = DRAWS) -> Law:
    """The line through all runs, and how far its slope moves when seeds are drawn anew at every size."""
    c, ne = compute(runs), np.array([run.ne for run in runs])
    reference = float(np.exp(np.log(c).mean()))
    slopes = [_line(c[rows], ne[rows], reference)[0] for rows in _draws(runs, draws)]
    slope, level = _line(c, ne, reference)
    low, high = np.percentile(slopes, [2.5, 97.5])
    return Law(slope, float(low), float(high), level, reference)


def slope_ratio(ours: Sequence[Trial], theirs: Sequence[Trial], *, draws: int = DRAWS) -> tuple[float, float, float]:
    """(η / η_rival, low, high); an interval that reaches no slope of the rival is infinite."""
    slopes = [law_slope(ours, rows) / law_slope(theirs, other) for rows, other in zip(_draws(ours, draws), _draws(theirs, draws), strict=True)]
    low, high = np.percentile(slopes, [2.5, 97.5])
    every = np.arange(len(ours))
    return law_slope(ours, every) / law_slope(theirs, np.arange(len(theirs))), float(low), float(high)


def law_slope(runs: Sequence[Trial], rows: npt.NDArray[np.int64]) -> float:
    """η of some runs."""
    c, ne = compute(runs), np.array([run.ne for run in runs])
    return _line(c[rows], ne[rows], 1.0)[0]


def _line(c: npt.NDArray[np.float64], ne: npt.NDArray[np.float64], reference: float) -> tuple[float, float]:
    slope, level = np.polyfit(np.log10(c / reference), ne, 1)
    return -float(slope), float(level)


def _draws(runs: Sequence[Trial], draws: int) -> list[npt.NDArray[np.int64]]:
    """Rows of `draws` bootstrap samples: of every size one run fewer than there are, which keeps the spread of few unbiased."""
    random = np.random.default_rng(0)
    groups = [np.flatnonzero([run.name == name for run in runs]) for name in dict.fromkeys(run.name for run in runs)]
    return [np.concatenate([random.choice(group, max(1, len(group) - 1)) for group in groups]) for _ in range(draws)]


def _draw(runs: Mapping[str, Sequence[Trial]], laws: Mapping[str, Law], bayes: float, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for model, of in runs.items():
        c, fit = compute(of), laws[model]
        axes.scatter(c, [run.ne for run in of], color=_COLORS[model], s=18, alpha=0.7)
        ends = np.array([c.min(), c.max()])
        axes.plot(
            ends, fit.at_reference - fit.slope * np.log10(ends / fit.reference), color=_COLORS[model],
            label=f"{model}: η = {fit.slope:.4f} ({fit.low:.4f} … {fit.high:.4f})",
        )  # fmt: skip
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="NE of clicks", title=f"NE over compute, generated world (Bayes {bayes:.3f})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def _finish(
    options: argparse.Namespace,
    runs: Mapping[str, Sequence[Trial]],
    laws: Mapping[str, Law],
    ratio: tuple[float, float, float],
    bayes: float,
) -> None:
    rows: list[list[object]] = []
    for of in runs.values():
        for name in dict.fromkeys(run.name for run in of):
            own = [run for run in of if run.name == name]
            ne = [run.ne for run in own]
            speed = float(np.median([run.rows / run.seconds for run in own]))
            rows.append([name, own[0].flops / 1e6, float(np.median(ne)), (max(ne) - min(ne)) / 2, speed])
    rows += [[f"η {model}", None, fit.slope, (fit.high - fit.low) / 2, None] for model, fit in laws.items()]
    rows.append(["η ratio", None, ratio[0], (ratio[2] - ratio[1]) / 2, None])
    cells = [asdict(run) for of in runs.values() for run in of]
    result = {
        "benchmark": "scaling on a generated world", "cells": cells, "bayes": bayes, "world": asdict(QUICK if options.quick else WORLD),
        "laws": {model: asdict(fit) for model, fit in laws.items()}, "ratio": dict(zip(("value", "low", "high"), ratio, strict=True)),
        "quick": options.quick,
    }  # fmt: skip
    finish(result, out=options.json, columns=["model", "MFLOP an example", "NE, or η", "±", "examples a second"], rows=rows)


if __name__ == "__main__":
    main()
