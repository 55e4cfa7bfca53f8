"""Sets the foundation model's sequence layers beside HSTU and SASRec in retrieving the next film of MovieLens-1M.

    python -m benchmarks.movielens --source DIR --runs RUNS --json OUT

Knows the data set's file and the protocol of facebookresearch/generative-recommenders (configs/ml-1m, hstu- and
sasrec-sampled-softmax-n128-final): newest 200 items, AdamW, 128 sampled negatives, ranks among all items. Does not know models.

The last item of every user is the test target; what the user had before is removed from the ranks. The authors' code trains on
all other items for 101 passes and reads the test targets after each. Here the item before the last is held out too: the pass
with the highest NDCG@10 on it is tested, once, with it in the history; so training has one item a user less. The file has an
order and no times, so no rival here knows time, which the authors' HSTU does. Their filter of films differs slightly from this
file's, and they remove only the 200 items that a model reads: figures that end in `_read` are of that. Negatives are shared by
few places (`sampled_softmax`), where theirs are drawn for each. A run lies in RUNS and goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import finish, names_of, parser
from benchmarks.next_item import (
    LAYERS,
    NextItem,
    NextItemConfig,
    rank_metrics,
    ranks,
    sampled_softmax,
)
from model.nn.jagged import Jagged, jagged

PUBLISHED = {
    "SASRec (HSTU's authors)": (0.2853, 0.1603), "HSTU": (0.3097, 0.1720), "HSTU-large": (0.3294, 0.1893),
    "SASRec (gSASRec's authors)": (0.2392, 0.1259), "gSASRec": (0.3003, 0.1726),
}  # fmt: skip
"""HR@10 and NDCG@10, as the READMEs of facebookresearch/generative-recommenders and asash/gSASRec-pytorch state them; the
latter has exactly this file, and width 128."""
TEST, VALID, TRAIN = 1, 2, 3
"""Which item from the end is the newest that is asked for."""
QUICK_USERS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """How a rival is trained; the values are the published ones."""

    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    batch: int = 128
    """Users of a step."""
    negatives: int = 128
    temperature: float = 0.05


class Batch(NamedTuple):
    """Some users' items, oldest first, and what follows each."""

    item_T: Tensor
    target_T: Tensor
    layout: Jagged


@dataclass(frozen=True, slots=True)
class Histories:
    """All users' items, 0 … items−1, packed oldest first."""

    item_E: Tensor
    offsets: Tensor
    """[users + 1]"""
    items: int

    @property
    def users(self) -> int:
        """How many."""
        return len(self.offsets) - 1

    def batch(self, users: Tensor, *, newest: int, longest: int) -> Batch:
        """Histories before the `newest`-th item from the end, their last `longest` items."""
        end = self.offsets[users + 1] - newest
        start = torch.maximum(self.offsets[users], end - longest)
        layout = jagged(F.pad((end - start).cumsum(0), (1, 0)))
        rows = start[layout.sequence] + layout.position
        return Batch(self.item_E[rows], self.item_E[rows + 1], layout)


def histories(source: Path, *, users: int | None = None) -> Histories:
    """Those of SASRec's public file, or of the first users in it."""
    table = pq.read_table(source / "ml1m_sasrec_order.parquet", columns=["sas_user", "pos", "sas_item"])
    user, place, item = (table[name].to_numpy().astype(np.int64) for name in table.column_names)
    order = np.lexsort((place, user))
    lengths = np.unique(user, return_counts=True)[1][:users]
    offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
    return Histories(torch.from_numpy(item[order][: int(offsets[-1])] - 1), offsets, int(item.max()))


def main() -> None:
    """Trains what is not there yet and prints it beside the published figures."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        runs = options.runs or Path(folder)
        data = histories(options.source, users=QUICK_USERS if options.quick else None)
        cells = [_cell(name, seed, data, runs, options) for name in options.models for seed in range(options.seeds)]
    keys = ("hr@10", "ndcg@10", "hr@50", "mrr", "hr@10_read", "ndcg@10_read")
    rows: list[list[object]] = [
        [c["model"], c["seed"], *(c["test"][key] for key in keys), c["best"], c["passes"], c["layer_parameters"]] for c in cells
    ]
    rows += [[f"{name} (published)", None, *values, *[None] * 7] for name, values in PUBLISHED.items()]
    result = {"benchmark": "next item on MovieLens-1M", "cells": cells, "published": PUBLISHED, "quick": options.quick}
    finish(result, out=options.json, columns=["model", "seed", *keys, "pass", "of", "in layers"], rows=rows)


def _options() -> argparse.Namespace:
    made = parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    made.add_argument("--source", type=Path, required=True, help="folder of the Parquet file")
    made.add_argument("--runs", type=Path, help="folder of runs, which a later command goes on with")
    made.add_argument("--models", type=names_of(LAYERS), default=list(LAYERS), help="rows of the table")
    made.add_argument("--seeds", type=int, default=1, help="runs of every model")
    made.add_argument("--passes", type=int, default=101, help="most passes over the training items")
    made.add_argument("--every", type=int, default=1, help="passes from one reading of the validation items to the next")
    made.add_argument("--patience", type=int, default=10, help="passes without a new best after which a run ends")
    options = made.parse_args()
    if options.quick:
        options.passes, options.seeds = 1, 1
    return options


def _cell(name: str, seed: int, data: Histories, runs: Path, options: argparse.Namespace) -> dict[str, Any]:
    run = Run(NextItemConfig(stack=name), Protocol(), data, seed, runs)
    run.train(passes=options.passes, every=options.every, patience=options.patience)
    return {"model": name, "seed": seed, "layer_parameters": run.parameters, **run.tested()}


@dataclass(slots=True)
class Progress:
    """What a run has done so far."""

    passes: int = 0
    best: int = 0
    """Pass with the highest NDCG@10 on the validation items."""
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    """Validation after passes, with the training loss of the pass."""

    @property
    def highest(self) -> float:
        """NDCG@10 of the best pass."""
        return max((point["ndcg@10"] for point in self.curve), default=-1.0)


class Run:
    """One model in training, kept in a folder after every pass."""

    def __init__(self, config: NextItemConfig, protocol: Protocol, data: Histories, seed: int, folder: Path) -> None:
        self.config, self.protocol, self.data, self.seed = config, protocol, data, seed
        torch.manual_seed(seed)
        self.model = NextItem(config, data.items)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=protocol.rate, betas=protocol.betas, weight_decay=0.0)
        self.progress, self._best = Progress(), self._state()
        digest = hashlib.sha256(repr((config, protocol, data.users)).encode()).hexdigest()[:8]
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{config.stack}-{digest}-{seed}.pt"
        if self._path.exists():
            self._go_on()

    @property
    def parameters(self) -> int:
        """Of the layers, without items and positions."""
        return sum(part.numel() for part in self.model.layers.parameters())

    def train(self, *, passes: int, every: int, patience: int) -> None:
        """Up to a number of passes, or until the best was `patience` passes ago."""
        done = self.progress
        while done.passes < passes and done.passes - done.best < max(patience, every):
            start = time.monotonic()
            loss = self._pass(done.passes)
            done.passes += 1
            if done.passes % every == 0 or done.passes == passes:
                self._read(loss)
            seconds = time.monotonic() - start
            done.seconds += seconds
            self._keep()
            self._say(loss, seconds, passes)

    def tested(self) -> dict[str, Any]:
        """Figures of the best pass on the test items: from their file, if that pass was tested before."""
        path, done = self._path.with_suffix(".json"), self.progress
        kept = json.loads(path.read_text()) if path.exists() else {}
        if kept.get("best") != done.best:
            self.model.load_state_dict(self._best)
            kept["test"] = self.scores(TEST)
        kept |= {**asdict(done), "config": asdict(self.config), "protocol": asdict(self.protocol)}
        path.write_text(json.dumps(kept, indent=1))
        return kept

    @torch.no_grad()
    def scores(self, newest: int) -> dict[str, float]:
        """Metrics of the `newest`-th item from the end of every user."""
        self.model.eval()
        table, found, read = self.model.table(), [], []
        for first in range(0, self.data.users, 512):
            users = torch.arange(first, min(first + 512, self.data.users))
            batch = self.data.batch(users, newest=newest, longest=self.config.longest)
            last = batch.layout.offsets[1:] - 1
            scores, target = self.model(batch.item_T, batch.layout)[last] @ table.t(), batch.target_T[last]
            whole = self.data.batch(users, newest=newest, longest=len(self.data.item_E))
            found.append(ranks(scores, target, (whole.layout.sequence, whole.item_T)))
            read.append(ranks(scores, target, (batch.layout.sequence, batch.item_T)))
        narrow = {f"{name}_read": value for name, value in rank_metrics(torch.cat(read)).items()}
        return rank_metrics(torch.cat(found)) | narrow

    def _pass(self, number: int) -> float:
        """Mean loss of one pass over all users in random order; the same however often the run was stopped before."""
        self.model.train()
        torch.manual_seed(1_000_003 * (self.seed + 1) + number)
        random, total, count = torch.Generator().manual_seed(torch.initial_seed()), 0.0, 0
        order, size = torch.randperm(self.data.users, generator=random), self.protocol.batch
        for first in range(0, len(order), size):
            batch = self.data.batch(order[first : first + size], newest=TRAIN, longest=self.config.longest)
            loss = sampled_softmax(
                self.model(batch.item_T, batch.layout), batch.target_T, self.model.table(), random=random,
                negatives=self.protocol.negatives, temperature=self.protocol.temperature,
            )  # fmt: skip
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)
            self.optimizer.step()
            total, count = total + loss.item() * len(batch.target_T), count + len(batch.target_T)
        return total / count

    def _read(self, loss: float) -> None:
        """Reads the validation items, and keeps the model if it is the best so far."""
        found, done = self.scores(VALID), self.progress
        if found["ndcg@10"] > done.highest:
            done.best, self._best = done.passes, self._state()
        done.curve.append({"pass": done.passes, "loss": loss, **found})

    def _state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def _keep(self) -> None:
        kept = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "best": self._best,
            "progress": asdict(self.progress),
        }  # fmt: skip
        part = self._path.with_suffix(".part")
        torch.save(kept, part)
        part.replace(self._path)  # a killed run leaves the pass before, or this one

    def _go_on(self) -> None:
        kept = torch.load(self._path, weights_only=True)
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.progress, self._best = Progress(**kept["progress"]), kept["best"]

    def _say(self, loss: float, seconds: float, passes: int) -> None:
        done = self.progress
        latest = done.curve[-1] if done.curve and done.curve[-1]["pass"] == done.passes else {}
        figures = "".join(f", {name} {latest[name]:.4f}" for name in ("hr@10", "ndcg@10") if latest)
        left = (passes - done.passes) * done.seconds / done.passes / 60
        print(  # a benchmark prints
            f"{self.config.stack}, seed {self.seed}, pass {done.passes}: loss {loss:.4f}{figures}, best {done.best}, "
            f"{seconds:.0f} s, {left:.0f} min left at most", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
