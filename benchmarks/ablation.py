"""Takes parts of the foundation model away, one at a time, and says what each was worth, on a generated world or a real log.

    python -m benchmarks.ablation --runs DIR --seeds 3 --json OUT
    python -m benchmarks.ablation --data kuairand --source LOG --runs DIR --seeds 3 --json OUT

Knows which module stands for which part: variants are made from outside, the model has no switch for them. Does not know
training. Runs lie in DIR: the same command goes on where it was stopped. The world's functional form is ours. A real log is
passed twice, as `benchmarks.quality` does, and its test rows are scored.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.learning import against
from benchmarks.logs import LOGS
from benchmarks.measure import finish, names_of, parser
from benchmarks.trials import OBJECTIVE, LogTrials, Trial, Trials, WorldTrials
from feature_store.layout import Layout
from feature_store.spec import Spec
from feature_store.world import WorldConfig
from model.gem.config import EventConfig, GemConfig
from model.gem.encoder import KunlunLayer, StreamLayer
from model.gem.encoder import Sequence as Events
from model.gem.foundation import CandidateRead, FoundationModel
from model.kernels.jagged_attention import jagged_attention
from model.nn.jagged import Jagged
from model.nn.norm import rms_norm
from model.training.evaluate import POOLED
from model.training.fitting import FitConfig
from model.training.metrics import Undefined

Part = TypeVar("Part", bound=nn.Module)
SIZE = WorldConfig(users=600, ads=400, days=8, dim=4)
QUICK = WorldConfig(users=16, ads=40, days=3, requests_per_user=4, dim=4)
CONFIG = GemConfig(
    width=32, heads=2, layers=4, seeds=32, sequence_tokens=8, rank=8, hidden=128, experts=2, factor_tokens=8, linear_tokens=8,
    block=16, radius=1,
)  # fmt: skip
REAL = FitConfig(batch_requests=256, epochs=2)
"""How a real log is passed."""
QUICK_ROWS = 400
"""Of each part of a real log, in a quick run."""
HALF = EventConfig(merge_group="of a source", width=16, heads=1, seeds=16, sequence_tokens=4, layers=2, block=8)
"""Of the second source's stream. Half of what the others have: as the published pair of clicks and impressions differ, but
for the depth (3 and 2 there)."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A model that lacks something."""

    make: Callable[[Layout], FoundationModel]
    published: str = ""
    """What its NE minus the whole model's is, says the paper: + worse, ≈ equal, with the figure where there is one."""
    counted: bool = False
    """The analytic FLOPs are its own: a configuration says all that it is."""


def main() -> None:
    """Trains what is missing and prints what each part was worth."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        trials = _trials(options, options.runs or Path(folder))
        names = [name for name in VARIANTS if name == WHOLE or name in options.variants]
        seeds = range(1 if options.quick else options.seeds)
        runs: dict[str, list[Trial]] = {name: [] for name in names}
        for seed in seeds:  # seed by seed: a stopped benchmark has comparable runs of all
            for name in names:
                runs[name].append(trials.run(name.replace(" ", "-"), seed, VARIANTS[name].make))
        rows, cells = _compared(trials, runs)
        known = {"bayes": trials.bayes, "world": asdict(trials.world)} if isinstance(trials, WorldTrials) else {"data": options.data}
    title = f"ablation on {'a generated world' if options.data == 'world' else LOGS[options.data].title}"
    result = {
        "benchmark": title, "cells": cells, "config": asdict(CONFIG), "seeds": len(seeds), "quick": options.quick, **known,
    }  # fmt: skip
    columns = ["variant", "NE", "±", "NE − whole", "95 % over users", "published", "MFLOP an example", "examples a second"]
    finish(result, out=options.json, columns=columns, rows=rows)


def _options() -> argparse.Namespace:
    made = parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    made.add_argument("--runs", type=Path, help="folder that keeps runs; without it nothing is kept")
    made.add_argument("--seeds", type=int, default=3, help="runs of each variant")
    made.add_argument("--data", choices=["world", *LOGS], default="world", help="what is learned from")
    made.add_argument("--source", type=Path, help="folder of a real log's files")
    every = ",".join(VARIANTS)
    made.add_argument("--variants", type=names_of(VARIANTS), default=every, help="set against the whole model, separated by commas")
    options = made.parse_args()
    if options.data != "world" and not options.source:
        made.error(f"--data {options.data} is a real log; name the folder of its files by --source")
    return options


def _trials(options: argparse.Namespace, folder: Path) -> Trials:
    if options.data == "world":
        return WorldTrials(folder, QUICK if options.quick else SIZE)
    return LogTrials(folder, options.data, options.source, REAL, most=QUICK_ROWS if options.quick else None)


def _compared(
    trials: Trials, runs: Mapping[str, Sequence[Trial]]
) -> tuple[list[list[object]], list[dict[str, object]]]:
    base = [trials.predictions(run) for run in runs[WHOLE]]
    spec = trials.replay.spec
    rows: list[list[object]] = []
    cells: list[dict[str, object]] = []
    for name, own in runs.items():
        made = [trials.predictions(run) for run in own]
        found = against(made, base, spec.surfaces, spec.objectives)[POOLED, OBJECTIVE]
        worth, low, high = (None if isinstance(end, Undefined) else float(end) for end in (found.difference, found.low, found.high))
        ne = [run.ne for run in own]
        speed = float(np.median([run.rows / run.seconds for run in own]))
        shown = "–" if name == WHOLE or low is None else f"{low:+.4f} … {high:+.4f}"
        flops = own[0].flops if VARIANTS[name].counted else None
        rows.append([
            name, float(np.median(ne)), (max(ne) - min(ne)) / 2, worth, shown, VARIANTS[name].published,
            flops and flops / 1e6, speed,
        ])  # fmt: skip
        cells.append({"variant": name, "ne": ne, "minus_whole": worth, "low": low, "high": high, "flops": flops, "speed": speed})
    return rows, cells


def configured(layout: Layout, **changes: object) -> FoundationModel:
    """The whole model, or one that a configuration can express."""
    return FoundationModel(dataclasses.replace(CONFIG, **changes), layout)  # type: ignore[arg-type]  # checked by it


def one_way(layout: Layout) -> FoundationModel:
    """Sequences inform tokens; nothing informs sequences: no PFFN."""
    model = configured(layout)
    for stream in _of(model, StreamLayer):
        stream.pffn = None
    return model


def separate(layout: Layout) -> FoundationModel:
    """Tokens and sequences meet in the heads only."""
    model = one_way(layout)
    for layer in _of(model, KunlunLayer):
        layer.add_module("interaction", Blind(layer.interaction, CONFIG.summary_tokens))
    return model


def sole(layout: Layout) -> FoundationModel:
    """No sequences at all: what tokens and counters know."""
    model = separate(layout)
    for layer in _of(model, KunlunLayer):
        layer.poolings = nn.ModuleList(Silent(CONFIG.sequence_tokens) for _ in layer.poolings)
    for stream in _of(model, StreamLayer):
        stream.attention = None
    model.reads = nn.ModuleList(Silent(0) for _ in model.reads)
    return model


def pooled_by_attention(layout: Layout) -> FoundationModel:
    """PMA in place of HSP: as many seeds as summary tokens, nothing to compress."""
    model = configured(layout)
    for layer in _of(model, KunlunLayer):
        layer.poolings = nn.ModuleList(PooledByAttention(CONFIG) for _ in layer.poolings)
    return model


def nameless(layout: Layout) -> FoundationModel:
    """Candidates do not compare ids with events: what a read prefers is what its projections have learned."""
    model = configured(layout)
    for read in _of(model, CandidateRead):
        read.same_id = nn.Parameter(read.same_id[:, :0])
    return model


def full_attention(layout: Layout) -> FoundationModel:
    """One block of all the events that a request can have."""
    return configured(layout, block=sum(source.max_length for source in layout.spec.message.event_sources), radius=0)


def unmerged(layout: Layout, **changes: object) -> FoundationModel:
    """A stream of events for every source, in place of one."""
    message = type(layout.spec.message)()
    message.CopyFrom(layout.spec.message)
    for source in message.event_sources:
        source.merge_group = source.name
    return configured(Layout(Spec(message)), **changes)


def personalized(layout: Layout) -> FoundationModel:
    """The second source's stream is smaller than the first's."""
    return unmerged(layout, events=(dataclasses.replace(HALF, merge_group=layout.spec.event_sources[1]),))


def _of(model: nn.Module, kind: type[Part]) -> list[Part]:
    return [module for module in model.modules() if isinstance(module, kind)]


class Blind(nn.Module):
    """An interaction that sees zeros behind the first `seen` tokens."""

    def __init__(self, interaction: nn.Module, seen: int) -> None:
        super().__init__()
        self.interaction, self.seen = interaction, seen

    def forward(self, x: Tensor) -> Tensor:
        """As the interaction's."""
        made: Tensor = self.interaction(torch.cat([x[:, : self.seen], torch.zeros_like(x[:, self.seen :])], dim=1))
        return made


class Silent(nn.Module):
    """Zeros in place of a pooling, of `tokens` tokens, or of a candidate's read, of none."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, x: Tensor, *rest: Jagged | Events | Tensor) -> Tensor:
        """[R, K, D] or [N, D]"""
        if not self.tokens:
            return torch.zeros_like(x)
        (layout,) = rest
        assert isinstance(layout, Jagged)
        return x.new_zeros(layout.num_sequences, self.tokens, x.shape[1])


class PooledByAttention(nn.Module):
    """Pooling by multi-head attention: learned queries, one a summary token (Set Transformer)."""

    def __init__(self, config: GemConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.seeds = nn.Parameter(torch.randn(config.sequence_tokens, width) * width**-0.5)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, s_TD: Tensor, layout: Jagged) -> Tensor:
        """[R, K, D]"""
        seeds = self.query(rms_norm(self.seeds)).unflatten(-1, (self.heads, -1))[None]
        k, v = self.key_value(rms_norm(s_TD)).unflatten(-1, (2 * self.heads, -1)).chunk(2, dim=1)
        return rms_norm(self.out(jagged_attention(seeds, k, v, layout).flatten(2)) + self.seeds)


WHOLE = "bidirectional"
VARIANTS: dict[str, Variant] = {
    WHOLE: Variant(configured, counted=True),
    "one-way": Variant(one_way, "+"),
    "separate": Variant(separate, "+, more than one-way"),
    "sole": Variant(sole, "+, most"),
    "PMA for HSP": Variant(pooled_by_attention, "+0.08 %"),
    "linear PFFN": Variant(partial(configured, pffn_activations=("identity",)), "+0.04 %", counted=True),
    "ids not compared": Variant(nameless, "none: our own addition"),
    "full attention": Variant(full_attention, "≈ (0.02 %)", counted=True),
    "no CompSkip": Variant(partial(configured, schedule="full"), "≈ (0.02 %)", counted=True),
    "candidate context": Variant(partial(configured, pffn_context="candidate"), "none: our own choice", counted=True),
    "separate sequences": Variant(unmerged, "+0.02 %", counted=True),
    "personalized events": Variant(personalized, "none given; FLOPs −11 %", counted=True),
}
"""What the published ablations of Kunlun and InterFormer take away, and two decisions that are ours."""


if __name__ == "__main__":
    main()
