"""What the foundation model's design saves: skipped parts, blocks of attention, no padding; and training against rivals.

    python -m benchmarks.efficiency --json OUT --plot OUT.svg

On one thread. `schedule`: CompSkip against every part in every layer, in FLOPs and in time. `attention`: time of blocks and of
full softmax attention by length. `padding`: a forward of jagged histories against all of them as long as the longest.
`training`: steps (forward, backward, optimizer) of rivals of the same width on the same rows; examples are candidates, MFU is
three forwards' model FLOPs over the fastest step's time and over the fastest square matrix product measured here.
Knows models and clocks. Does not know data: rows are random, histories have chosen lengths.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.batches import batch_of, layout
from benchmarks.measure import Timing, alternate, finish, parser, peak_megabytes
from feature_store.batch import FeatureBatch
from model.baselines import frame
from model.baselines.frame import Baseline
from model.baselines.hstu import HstuConfig, HstuNetwork
from model.baselines.interformer import InterFormerConfig, InterFormerNetwork
from model.gem.batch import Batch
from model.gem.config import GemConfig
from model.gem.flops import flops_by_module, forward_flops
from model.gem.foundation import FoundationModel
from model.gem.presets import public_m, public_s, tiny
from model.kernels.block_attention import block_attention, blocks
from model.nn.jagged import jagged
from model.training.optimizers import Optimizer, OptimizerConfig
from model.training.throughput import TRAINING_FACTOR, measure_ceiling

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Run = Callable[[], object]
Cell = dict[str, Any]
Model = FoundationModel | Baseline
HEADS, WIDTH, BLOCK = 4, 16, 64
FLOPS_SAVED, MORE_EXAMPLES, SLOPE = (0.40, 0.46), 1.30, 1.1
"""What is wanted of CompSkip and of blocks."""


def published() -> GemConfig:
    """The reference sizes at which CompSkip is published to save 43 %: 1000 events, width 384, blocks of 64."""
    return GemConfig(
        width=384, heads=3, layers=4, summary_tokens=128, seeds=256, sequence_tokens=32, kron_terms=8, block=64, experts=4,
        factor_tokens=20, linear_tokens=24, rank=24, hidden=2048, max_events=1024, fresh_summary=False,
    )  # fmt: skip


def main() -> None:
    """Runs the parts that were asked for, and prints figures with spread beside what is wanted."""
    options = _options()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    cells = [cell for part in options.parts for cell in PARTS[part](options)]
    rows = [[f"{c['part']}: {c['case']}", c["measure"], c["value"], _verdict(c), _spread(c["times"])] for c in cells]
    if options.plot:
        _draw([cell for cell in cells if cell["part"] == "attention"], options.plot)
    result = {"benchmark": "efficiency on one thread", "cells": cells, "seed": options.seed, "rounds": options.rounds}
    columns = ["case", "measure", "value", "wanted", "median ms (low … high)"]
    finish(result, out=options.json, columns=columns, rows=rows)


def _options() -> argparse.Namespace:
    made = parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    made.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="some of " + ", ".join(PARTS))
    made.add_argument("--rounds", type=int, default=9, help="times that everything is timed")
    made.add_argument("--seed", type=int, default=0, help="of weights and features")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw time of attention over length here (.svg or .png)")
    options = made.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        made.error(f"parts {sorted(unknown)} are unknown; take some of {', '.join(PARTS)}")
    if options.quick:
        options.rounds = 2
    return options


def _cell(
    part: str, case: str, measure: str, value: float, *, wanted: str = "", reached: bool | None = None,
    times: dict[str, Timing] | None = None, **more: object,
) -> Cell:  # fmt: skip
    return {
        "part": part, "case": case, "measure": measure, "value": value, "wanted": wanted, "reached": reached,
        "times": times or {}, **more,
    }  # fmt: skip


def _schedule(options: argparse.Namespace) -> Iterator[Cell]:
    """FLOPs by count; examples a second where the model fits: the published shape forward only, its optimizer would not fit."""
    shapes = (("tiny", tiny(), 20), ("public_s", public_s(), 100)) if options.quick else (
        ("public_s", public_s(), 100), ("public_m", public_m(), 1000),
    )  # fmt: skip
    yield from _saved("published shape", published(), batch_of([1000], [1]), wanted=True)
    for name, config, events in shapes:
        batch = batch_of([events] * (4 if options.quick else 6400 // events), [1] * (4 if options.quick else 6400 // events))
        yield from _saved(name, config, batch)
        steps = {s: _step(FoundationModel(c, layout()), batch) for s, c in _schedules(config).items()}
        yield _faster(f"{name}, {events} events, training", steps, options.rounds)
    if not options.quick:
        few = Batch.from_numpy(batch_of([1000] * 4, [1] * 4))
        models = {s: _ready(FoundationModel(c, layout())) for s, c in _schedules(published()).items()}
        runs = {s: _forward(model, few) for s, model in models.items()}
        yield _faster("published shape, 1000 events, forward", runs, options.rounds)


def _schedules(config: GemConfig) -> dict[str, GemConfig]:
    return {"compskip": dataclasses.replace(config, schedule="compskip"), "full": dataclasses.replace(config, schedule="full")}


def _saved(name: str, config: GemConfig, batch: FeatureBatch, *, wanted: bool = False) -> Iterator[Cell]:
    layers, whole = {}, {}
    for schedule, chosen in _schedules(config).items():
        with torch.device("meta"):
            flops = flops_by_module(FoundationModel(chosen, layout()), batch)
        whole[schedule] = sum(flops.values())
        layers[schedule] = sum(count for part, count in flops.items() if part.startswith("layer"))
    for what, flops in (("layers", layers), ("whole model", whole)):
        saved, asked = 1 - flops["compskip"] / flops["full"], wanted and what == "layers"
        reached = FLOPS_SAVED[0] <= saved <= FLOPS_SAVED[1] if asked else None
        yield _cell(
            "schedule", f"{name}, {what}", "FLOPs saved", saved, wanted="0.43 ± 0.03" if asked else "", reached=reached
        )


def _faster(case: str, runs: dict[str, Run], rounds: int) -> Cell:
    times = alternate(runs, rounds=rounds)
    ratio = times["full"].median / times["compskip"].median
    return _cell(
        "schedule", case, "examples/s, CompSkip / full", ratio, wanted=f"≥ {MORE_EXAMPLES}", reached=ratio >= MORE_EXAMPLES,
        times=times,
    )  # fmt: skip


def _attention(options: argparse.Namespace) -> Iterator[Cell]:
    """One sequence; index maps are made beforehand, as once a batch in the model."""
    lengths = [512 * 2**power for power in range(4 if options.quick else 6)]
    runs: dict[str, Run] = {}
    with torch.no_grad():
        for length in lengths:
            q, k, v = (torch.randn(length, HEADS, WIDTH) for _ in range(3))
            maps = blocks(jagged(torch.tensor([0, length])), block=BLOCK, radius=1)
            runs[f"blocks {length}"] = _bound(block_attention, q, k, v, maps)
            runs[f"full {length}"] = _bound(_full, q, k, v)
        times = alternate(runs, rounds=options.rounds)
    for kind in ("blocks", "full"):
        medians = [times[f"{kind} {length}"].median for length in lengths]
        slope = float(np.polyfit(np.log(lengths), np.log(medians), 1)[0])
        asked = kind == "blocks"
        yield _cell(
            "attention", f"{kind}, {lengths[0]} … {lengths[-1]}", "slope of log time on log length", slope,
            wanted=f"≤ {SLOPE}" if asked else "", reached=slope <= SLOPE if asked else None,
            times={str(length): times[f"{kind} {length}"] for length in lengths}, kind=kind,
        )  # fmt: skip


def _full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)


def _padding(options: argparse.Namespace) -> Iterator[Cell]:
    """Lengths uniform from 1 on, so that half of the padded places are empty."""
    sequences, longest = (8, 100) if options.quick else (64, 200)
    lengths = np.random.default_rng(options.seed).permutation(np.linspace(1, longest, sequences).astype(int)).tolist()
    model = FoundationModel(public_s(), layout())
    _ready(model)
    batches = {"jagged": batch_of(lengths, [1] * sequences), "padded": batch_of([longest] * sequences, [1] * sequences)}
    runs = {name: _forward(model, Batch.from_numpy(batch)) for name, batch in batches.items()}
    times = alternate(runs, rounds=options.rounds)
    case = f"public_s, {sequences} × {longest}, fill {sum(lengths) / sequences / longest:.2f}"
    yield _cell("padding", case, "forward time, padded / jagged", times["padded"].median / times["jagged"].median, times=times)
    flops = {name: forward_flops(model, batch) for name, batch in batches.items()}
    yield _cell("padding", case, "FLOPs, padded / jagged", flops["padded"] / flops["jagged"])
    memory = {name: peak_megabytes(run) for name, run in runs.items()}
    if memory["jagged"] and memory["padded"]:
        yield _cell("padding", case, "peak memory, padded / jagged", memory["padded"] / memory["jagged"], megabytes=memory)


def _training(options: argparse.Namespace) -> Iterator[Cell]:
    """Every model has the width of public_s, reads the same events and takes the same optimizer's steps."""
    made, config = layout(), public_s()
    width, heads, events_kept = config.width, config.heads, config.max_events
    models: dict[str, Model] = {
        "public_s": FoundationModel(config, made),
        "HSTU": HstuNetwork(HstuConfig(width=width, heads=heads, max_events=events_kept), made),
        "InterFormer": InterFormerNetwork(InterFormerConfig(width=width, heads=heads, max_events=events_kept), made),
    }
    for events, shown in ((20, 2),) if options.quick else ((100, 1), (100, 4), (250, 1)):
        requests = 4 if options.quick else 64
        batch = batch_of([events] * requests, [shown] * requests)
        times = alternate({name: _step(model, batch) for name, model in models.items()}, rounds=options.rounds)
        ceiling = measure_ceiling(seconds=0.2 if options.quick else 2.0)
        case = f"{requests} requests × {events} events × {shown} candidates"
        for name, model in models.items():
            yield from _trained(case, name, model, batch, times, ceiling.measured)


def _trained(
    case: str, name: str, model: Model, batch: FeatureBatch, times: dict[str, Timing], ceiling: float
) -> Iterator[Cell]:
    own = {name: times[name]}
    rate = batch.num_candidates / times[name].median
    count = frame.forward_flops(model, batch) if isinstance(model, Baseline) else forward_flops(model, batch)
    yield _cell("training", case, f"examples/s, {name}", rate, times=own)
    if name != "public_s":
        yield _cell("training", case, f"examples/s, public_s / {name}", times[name].median / times["public_s"].median)
    utilization = TRAINING_FACTOR * count / times[name].low / ceiling
    yield _cell("training", case, f"MFU, {name}", utilization, ceiling=ceiling, forward_flops=count)


def _step(model: Model, batch: FeatureBatch) -> Run:
    """A training step on random labels."""
    _ready(model).train()
    optimizer, tensors = Optimizer(model, OptimizerConfig()), Batch.from_numpy(batch)
    labels = torch.randint(0, 2, (batch.num_candidates, len(model.shape.objectives))).float()

    def step() -> None:
        optimizer.clear()
        torch.autograd.backward(F.binary_cross_entropy_with_logits(_logits(model, tensors), labels))
        optimizer.step(100, 1000)

    return step


def _forward(model: Model, batch: Batch) -> Run:
    def run() -> Tensor:
        with torch.inference_mode():
            return _logits(model, batch)

    return run


def _logits(model: Model, batch: Batch) -> Tensor:
    out: Tensor = model(batch) if isinstance(model, Baseline) else model(batch).logits_NK
    return out


def _ready(model: Model) -> Model:
    model.fit_statistics([batch_of([100] * 20, [2] * 20)])
    return model.eval()


def _bound(call: Callable[..., object], *arguments: object) -> Run:
    return lambda: call(*arguments)


def _verdict(cell: Cell) -> str:
    return f"{cell['wanted']}: {'yes' if cell['reached'] else 'no'}" if cell["wanted"] else ""


def _spread(times: dict[str, Timing]) -> str:
    shown = (f"{name} {t.median * 1e3:.1f} ({t.low * 1e3:.1f} … {t.high * 1e3:.1f})" for name, t in times.items())
    return "\n".join(shown)


def _draw(cells: Sequence[Cell], out: Path) -> None:
    """Median time with its spread over length, both axes logarithmic."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for cell in cells:
        lengths, times = [int(name) for name in cell["times"]], list(cell["times"].values())
        medians = np.array([1e3 * t.median for t in times])
        below, above = medians - [1e3 * t.low for t in times], [1e3 * t.high for t in times] - medians
        label = f"{cell['kind']}: slope {cell['value']:.2f}"
        axes.errorbar(lengths, medians, yerr=[below, above], marker="o", capsize=3, label=label)
    axes.set(xscale="log", yscale="log", xlabel="events", ylabel="ms, one thread", title="Self-attention by length of the history")
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Cell]]] = {
    "schedule": _schedule, "attention": _attention, "padding": _padding, "training": _training,
}  # fmt: skip


if __name__ == "__main__":
    main()
