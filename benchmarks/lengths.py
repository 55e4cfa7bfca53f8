"""Fits how normalized entropy falls with the length of histories and with compute, up to 4,000 events, on a generated world.

    python -m benchmarks.lengths --runs DIR --seeds 3 --json OUT --plot OUT.svg

The law is ΔNE(C, T) = a·log(C/C_0) + b·(T/T_0)^−β + c·log(C/C_0)·log(T/T_0), natural logarithms. ΔNE is a change of NE, where
less is better: c < 0 says that larger models gain more from length and longer histories more from size, c > 0 the opposite.

Knows sizes, lengths and the law. Does not know training. Runs lie in DIR: the same command goes on where it was stopped, and
only fits and draws once all are there. The world's functional form is ours; in this one intents last for weeks, so that old
events are worth reading, and what would stand in for histories of any length is not read: ids and profiles of users, counters.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from gem.schema.v1.dataset_spec_pb2 import OWNER_USER

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.measure import finish, parser
from benchmarks.scaling import kunlun
from benchmarks.trials import OBJECTIVE, WORLD, Reading, Trial, WorldTrials
from feature_store.asof import Queries, before, expand
from feature_store.replay import Examples, Replay
from feature_store.spec import IMPRESSION, Spec, load_spec
from feature_store.versions import positions
from feature_store.world import DAY_MS, START_MS, WorldConfig
from model.gem.foundation import FoundationModel
from model.training import metrics
from model.training.rows import ReplayRows, spread
from model.training.throughput import TRAINING_FACTOR

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
DRAWS = 2000
PROFILE = "u0"
"""The one feature of a user that the world's clicks depend on besides interest and intent."""
HELD_OUT = 4
"""One user of so many is tested, never trained on."""
_EXPONENTS = np.geomspace(0.02, 4.0, 300)
"""β that are tried: positive, from hardly bent to spent within the shortest lengths."""
_COLORS = ("#7fb0dc", "#2f78b7", "#0b3a66", "#c2452d", "#5b2a86")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A world, what is read of it and the grid."""

    world: WorldConfig
    lengths: tuple[int, ...]
    """T: newest events of a request that a model reads; every row has the longest of them."""
    sizes: tuple[tuple[int, int], ...]
    """Width and layers."""
    train: int
    """Requests."""
    test: int
    batch: int


FULL = Plan(
    world=WorldConfig(
        users=600, ads=100, days=8, requests_per_user=220, shown=32, dim=4, sequence_strength=0, cross_surface=1, returning=0,
        intent_half_life_days=30,
    ),
    lengths=(50, 200, 800, 4000), sizes=((16, 2), (24, 2), (48, 2)), train=2400, test=400, batch=8,
)  # fmt: skip
"""Of few dimensions and ads, so that models of this size find out within these rows what a history says."""
QUICK = Plan(
    world=WorldConfig(users=24, ads=40, days=3, requests_per_user=20, dim=4, intent_half_life_days=30),
    lengths=(8, 16, 32, 64), sizes=((8, 2), (16, 2)), train=64, test=48, batch=16,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """NE = level + a·x + b·(T/T_0)^−β + c·x·log(T/T_0), x = log(C/C_0)."""

    level: float
    a: float
    b: float
    beta: float
    c: float
    low: float
    """c's, of 95 in 100 bootstrap draws over seeds."""
    high: float
    c_0: float
    """FLOPs: the geometric mean of the cells."""
    t_0: float
    """Events: the shortest length."""
    error: float
    """Root mean square of what the law misses the cells' means by."""
    resolved: bool
    """Of β: it lies within those that are tried. Where NE does not fall in length as a power, it is one of their ends."""

    def __call__(self, c: Floats, t: Floats) -> Floats:
        """NE [n] at compute and length."""
        x, far = np.log(c / self.c_0), t / self.t_0
        return np.asarray(self.level + self.a * x + self.b * far**-self.beta + self.c * x * np.log(far), np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One size at one length, over seeds."""

    size: str
    length: int
    compute: float
    """Training FLOPs of a run, over actual lengths."""
    ne: tuple[float, ...]
    """Of each seed."""
    speed: float
    """Candidates a second in training."""


def main() -> None:
    """Trains what is missing, then fits, prints and draws."""
    options = _options()
    plan, seeds = (QUICK, 2) if options.quick else (FULL, options.seeds)
    with tempfile.TemporaryDirectory() as folder:
        trials = WorldTrials(options.runs or Path(folder), plan.world, batch=plan.batch, reading=reading(plan))
        runs = _runs(trials, seeds, plan)
        facts = _facts(trials)
    cells = [_cell(f"{width}x{layers}", length, of) for (width, layers, length), of in sorted(runs.items())]
    laws = {"training FLOPs": law(cells), "FLOPs at the shortest length": law(alike(cells))}
    if options.plot:
        _draw(cells, laws["training FLOPs"], facts, options.plot)
    _finish(options, plan, cells, laws, facts)


def _options() -> argparse.Namespace:
    made = parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    made.add_argument("--runs", type=Path, help="folder that keeps runs; without it nothing is kept")
    made.add_argument("--seeds", type=int, default=3, help="runs of each size at each length; at least 2")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw NE over length here (.svg or .png)")
    return made.parse_args()


def _runs(trials: WorldTrials, seeds: int, plan: Plan) -> dict[tuple[int, int, int], list[Trial]]:
    """Seed by seed: a stopped benchmark has comparable runs of all sizes and lengths."""
    runs: dict[tuple[int, int, int], list[Trial]] = {}
    for seed in range(seeds):
        for length in plan.lengths:
            for width, layers in plan.sizes:
                config = replace(kunlun(width, layers), max_events=length)
                run = trials.run(f"{width}x{layers}-{length}", seed, partial(FoundationModel, config))
                runs.setdefault((width, layers, length), []).append(run)
    return runs


def _cell(size: str, length: int, runs: Sequence[Trial]) -> Cell:
    return Cell(
        size=size,
        length=length,
        compute=float(np.mean([TRAINING_FACTOR * run.flops * run.rows for run in runs])),
        ne=tuple(run.ne for run in runs),
        speed=float(np.median([run.rows / run.seconds for run in runs])),
    )


def reading(plan: Plan) -> Reading:
    """Whole requests with the longest history: those of most users to train on, of the others on the last day to test on."""
    longest = max(plan.lengths)
    return Reading(
        name=f"histories of {longest}, {plan.train} and {plan.test} requests",
        spec=partial(long_spec, longest),
        train=lambda replay, world: _rows(replay, (START_MS, world.end_ms - DAY_MS), longest, plan.train, tested=False),
        test=lambda replay, world: _rows(replay, (world.end_ms - DAY_MS, world.end_ms), longest, plan.test, tested=True),
        samples=256,
        scored=16,
    )


def long_spec(longest: int) -> Spec:
    """The world's spec with long histories; of users it has but the code that clicks depend on, and no counters."""
    message = load_spec(WORLD).message
    for source in message.event_sources:
        source.max_length = longest
    features = [feature for feature in message.features if feature.owner != OWNER_USER or feature.name == PROFILE]
    message.ClearField("features")
    message.features.extend(features)
    message.ClearField("aggregates")
    return Spec(message)


def _rows(replay: Replay, span: tuple[int, int], longest: int, most: int, *, tested: bool) -> ReplayRows:
    rows = ReplayRows(replay, *span)
    user = replay.impressions.user_key[rows.examples.impression[rows.examples.offsets[:-1]]]
    own = (user % HELD_OUT == 0) == tested
    chosen = np.flatnonzero(own & (_impressions_before(replay, rows.examples, user) >= longest))
    if not len(chosen):
        raise ValueError(f"no request of this world has {longest} impressions before it; take more days or requests a user")
    rows.examples = chosen_of(rows.examples, chosen[spread(len(chosen), most)])
    return rows


def _impressions_before(replay: Replay, examples: Examples, user_key: Ints) -> Ints:
    """[R] of each request's user: its history is at least as long, as searches come on top."""
    history = replay.histories[replay.spec.event_sources.index(IMPRESSION)]
    queries = Queries(positions(history.users, user_key), examples.request_ms, examples.own)
    return before(history.segments, queries) - history.segments.start[queries.segment]


def chosen_of(examples: Examples, rows: Ints) -> Examples:
    """Some requests of many, in their order."""
    _, at = expand(examples.offsets[rows], examples.offsets[rows + 1])
    sizes = np.diff(examples.offsets)[rows]
    return replace(
        examples, impression=examples.impression[at], offsets=np.append(0, np.cumsum(sizes)),
        request_ms=examples.request_ms[rows], own=examples.own[rows],
    )  # fmt: skip


def _facts(trials: WorldTrials) -> dict[str, float]:
    """What no model changes, kept beside the runs: NE of the world's own probabilities and of each surface's rate, and rows."""
    path = trials.folder / "facts.json"
    if not path.exists():
        path.write_text(json.dumps(_measured(trials)))
    facts: dict[str, float] = json.loads(path.read_text())
    return facts


def _measured(trials: WorldTrials) -> dict[str, float]:
    k = trials.replay.spec.objectives.index(OBJECTIVE)
    labels, surfaces, events, users = {}, {}, {}, {}
    for name, rows in (("train", trials.train), ("test", trials.test)):
        parts = [rows.batch(part) for part in np.array_split(np.arange(len(rows)), -(-len(rows) // 64))]
        labels[name] = np.concatenate([targets.labels[:, k] for _, targets in parts])
        surfaces[name] = np.concatenate([np.repeat(batch.surface, np.diff(batch.candidate_offsets)) for batch, _ in parts])
        events[name] = np.concatenate([np.diff(batch.event_offsets) for batch, _ in parts])
        users[name] = np.unique(np.concatenate([batch.user_key for batch, _ in parts]))
    rates = np.array([labels["train"][surfaces["train"] == s].mean() for s in range(len(trials.replay.spec.surfaces))])
    surface = metrics.ne(rates[surfaces["test"]], labels["test"])
    if isinstance(surface, metrics.Undefined):
        raise ValueError(f"the last day of this world has no metric: {surface}; take a larger world")
    return {
        "bayes": trials.bayes, "surface": float(surface), "median_events": float(np.median(events["test"])),
        **{f"{name}_fewest_events": float(found.min()) for name, found in events.items()},
        **{f"{name}_requests": float(len(found)) for name, found in events.items()},
        **{f"{name}_candidates": float(len(found)) for name, found in labels.items()},
        **{f"{name}_users": float(len(found)) for name, found in users.items()},
    }  # fmt: skip


def alike(cells: Sequence[Cell]) -> list[Cell]:
    """Every cell at its size's compute at the shortest length: what is left of C is how large a model is, whatever it reads."""
    least = {cell.size: cell.compute for cell in sorted(cells, key=lambda cell: -cell.length)}
    return [replace(cell, compute=least[cell.size]) for cell in cells]


def law(cells: Sequence[Cell], *, draws: int = DRAWS) -> Law:
    """The law through the cells' means, and how far c moves when seeds are drawn anew within every cell.

    All but β enter it linearly: for each β the others are those of least squares, and the β that leaves least is taken.
    """
    c, t = np.array([cell.compute for cell in cells]), np.array([float(cell.length) for cell in cells])
    c_0, t_0 = float(np.exp(np.log(c).mean())), float(t.min())
    x, far = np.log(c / c_0), np.log(t / t_0)
    terms = np.stack(
        [np.stack([np.ones_like(x), x, np.exp(-beta * far), x * far], axis=1) for beta in _EXPONENTS]
    )
    means = np.array([[np.mean(cell.ne) for cell in cells], *_drawn(cells, draws)])
    found = np.linalg.pinv(terms) @ means.T  # [β, terms, draws]
    missed = np.sqrt(((terms @ found - means.T) ** 2).mean(axis=1))
    best = missed.argmin(axis=0)
    level, a, b, c_own = (float(value) for value in found[best[0], :, 0])
    drawn = found[best[1:], 3, np.arange(1, len(means))]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Law(
        level=level, a=a, b=b, beta=float(_EXPONENTS[best[0]]), c=c_own, low=float(low), high=float(high),
        c_0=c_0, t_0=t_0, error=float(missed[best[0], 0]), resolved=bool(0 < best[0] < len(_EXPONENTS) - 1),
    )  # fmt: skip


def _drawn(cells: Sequence[Cell], draws: int) -> Floats:
    """[draws, cells] means of bootstrap samples: of every cell one seed fewer than there are, which keeps the spread of few unbiased."""
    random = np.random.default_rng(0)
    columns = [random.choice(cell.ne, (draws, max(1, len(cell.ne) - 1))).mean(axis=1) for cell in cells]
    return np.stack(columns, axis=1)


def recovered(ne: float, facts: Mapping[str, float]) -> float:
    """Share of what is between each surface's rate and the world's own probabilities."""
    return (facts["surface"] - ne) / (facts["surface"] - facts["bayes"])


def _draw(cells: Sequence[Cell], fit: Law, facts: Mapping[str, float], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for color, size in zip(_COLORS, dict.fromkeys(cell.size for cell in cells), strict=False):
        own = [cell for cell in cells if cell.size == size]
        t, c = np.array([float(cell.length) for cell in own]), np.array([cell.compute for cell in own])
        for cell in own:
            axes.scatter([cell.length] * len(cell.ne), cell.ne, color=color, s=16, alpha=0.6)
        axes.plot(t, [np.mean(cell.ne) for cell in own], color=color, label=f"{size}: {c[0]:.1e} … {c[-1]:.1e} FLOPs")
        fine = np.geomspace(t[0], t[-1], 100)
        axes.plot(fine, fit(np.interp(fine, t, c), fine), color=color, linestyle=":")  # FLOPs grow in proportion to events
    axes.set(
        xscale="log", xlabel="events of a history", ylabel="NE of clicks",
        title=f"NE over length, generated world (Bayes {facts['bayes']:.3f}, surface rates {facts['surface']:.3f})\n"
        f"dotted: the law, β {'=' if fit.resolved else 'not resolved:'} {fit.beta:.2f}, c = {fit.c:+.5f} ({fit.low:+.5f} … {fit.high:+.5f})",
    )  # fmt: skip
    axes.title.set_fontsize(10)
    axes.set_xticks([cell.length for cell in own], [f"{cell.length:,}" for cell in own])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def _finish(
    options: argparse.Namespace,
    plan: Plan,
    cells: Sequence[Cell],
    laws: Mapping[str, Law],
    facts: Mapping[str, float],
) -> None:
    rows: list[list[object]] = [
        [
            cell.size, cell.length, cell.compute, float(np.median(cell.ne)), (max(cell.ne) - min(cell.ne)) / 2,
            recovered(float(np.mean(cell.ne)), facts), cell.speed,
        ]
        for cell in cells
    ]  # fmt: skip
    for name, fit in laws.items():
        rows.append([f"c, C: {name}", None, None, fit.c, (fit.high - fit.low) / 2, None, None])
        rows.append([f"β{'' if fit.resolved else ' (not resolved)'}, C: {name}", None, None, fit.beta, None, None, None])
    result = {
        "benchmark": "length scaling on a generated world", "cells": [asdict(cell) for cell in cells], "facts": facts,
        "laws": {name: asdict(fit) for name, fit in laws.items()}, "reinforcing": "c < 0: larger models gain more from length",
        "plan": asdict(plan), "quick": options.quick,
    }  # fmt: skip
    columns = ["size", "events", "training FLOPs", "NE, c or β", "±", "recovered", "examples a second"]
    finish(result, out=options.json, columns=columns, rows=rows)


if __name__ == "__main__":
    main()
