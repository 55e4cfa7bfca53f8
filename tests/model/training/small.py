"""A log and a model small enough to train in a test: real batches, a real embedding table, one linear layer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from feature_store.batch import FeatureBatch, Targets
from feature_store.layout import Layout
from feature_store.replay import no_memory, no_pairs
from feature_store.spec import Spec, load_spec
from model.nn.embedding import IdEmbeddings
from model.nn.shape import IdColumn
from model.training.fitting import FitConfig, FitLog, Place, fit, save
from model.training.learner import Learner
from model.training.loss import Sums, masked_bce
from model.training.optimizers import OptimizerConfig
from model.training.parallel import Processes, joined
from model.training.quarantine import Quarantine

SPEC = """
name: small
surfaces: [{name: feed}, {name: reels}]
objectives:
  - {name: click, attribution_window_seconds: 60}
  - {name: buy, attribution_window_seconds: 3600, parent: click}
entities: {user: {id_type: int64}, ad: {id_type: int64}}
features:
  - {name: user, owner: user, id: {rows: 64}}
  - {name: taste, owner: user, dense: {}}
  - {name: ad, owner: ad, id: {rows: 64}}
  - {name: price, owner: ad, dense: {}}
event_sources:
  - {name: impression, features: [ad], max_length: 8}
"""


def small_spec(folder: Path) -> Spec:
    path = folder / "spec.yaml"
    path.write_text(SPEC)
    return load_spec(path)


def small_layout(folder: Path) -> Layout:
    return Layout(small_spec(folder))


class SmallRows:
    """Requests of two candidates each; clicks follow the price and the ad."""

    def __init__(self, num_requests: int, *, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self._n = num_requests
        self.user = generator.integers(0, 20, num_requests)
        self.ad = generator.integers(0, 30, (num_requests, 2))
        self.price = generator.normal(size=(num_requests, 2)).astype(np.float32)
        logit = 1.5 * self.price + np.sin(self.ad.astype(np.float64))
        self.click = (generator.random((num_requests, 2)) < 1 / (1 + np.exp(-logit))).astype(np.float32)
        self.buy = self.click * (generator.random((num_requests, 2)) < 0.5)

    def __len__(self) -> int:
        return self._n

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """As if the number of a user were that of the user's events."""
        return np.stack([self.user[rows], np.full(len(rows), 2)], axis=1)

    def batch(self, rows: np.ndarray) -> tuple[FeatureBatch, Targets]:
        r, n = len(rows), 2 * len(rows)
        zeros = np.zeros(r + 1, dtype=np.int64)
        batch = FeatureBatch(
            user_key=self.user[rows], surface=(self.user[rows] % 2).astype(np.int32), request_ms=rows * 1000,
            user_ids=self.user[rows][:, None], user_dense=np.ones((r, 1), np.float32),
            event_offsets=zeros, event_ms=np.zeros(0, np.int64), event_source=np.zeros(0, np.int32),
            event_surface=np.zeros(0, np.int32), event_labels=np.zeros(0, np.int32),
            event_ids=np.zeros((0, 1), np.int64), event_dense=np.zeros((0, 0), np.float32),
            candidate_offsets=2 * np.arange(r + 1, dtype=np.int64),
            ad_ids=self.ad[rows].reshape(n, 1), ad_dense=self.price[rows].reshape(n, 1),
            **no_memory(r), **no_pairs(n),
        )  # fmt: skip
        click = self.click[rows].reshape(n)
        names = (2 * np.repeat(rows, 2) + np.tile([0, 1], r)).tolist()
        ids = np.frombuffer(b"".join(b"\1" * 8 + name.to_bytes(8, "big") for name in names), dtype="V16")
        targets = Targets(
            example_id=ids, user_key=np.repeat(self.user[rows], 2),
            labels=np.stack([click, self.buy[rows].reshape(n).astype(np.float32)], axis=1),
            label_mask=np.stack([np.ones(n, bool), click > 0], axis=1),
            teacher_logits=np.zeros((n, 2), np.float32), teacher_mask=np.zeros(n, bool),
        )  # fmt: skip
        return batch, targets


class SmallModel(nn.Module):
    """Logits [N, 2] from the ad's embedding, its price, and a hidden layer with dropout."""

    def __init__(self, *, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.column = IdColumn(name="ad", table="ad", rows=64)
        self.ids = IdEmbeddings([self.column], 4)
        self.hidden = nn.Linear(5, 8)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(8, 2)

    def forward(self, batch: FeatureBatch) -> Tensor:
        vectors = self.ids([self.column], [torch.from_numpy(batch.ad_ids[:, 0])])[0]
        x = torch.cat([vectors, torch.nan_to_num(torch.from_numpy(batch.ad_dense))], dim=1)
        logits: Tensor = self.out(self.dropout(torch.relu(self.hidden(x))))
        return logits

    def score(self, batch: FeatureBatch) -> np.ndarray:
        self.eval()
        with torch.no_grad():
            return self(batch).numpy()


class SmallCriterion:
    """Both objectives with the weight 1."""

    weights: Mapping[str, tuple[float, ...]] = {"task": (1.0, 1.0)}

    def __init__(self, model: SmallModel) -> None:
        self._model = model

    def __call__(self, batch: FeatureBatch, targets: Targets) -> Mapping[str, Sums]:
        labels, mask = torch.from_numpy(targets.labels), torch.from_numpy(targets.label_mask)
        return {"task": masked_bce(self._model(batch), labels, mask)}


def train_share(processes: Processes, folder: str, init_method: str | None) -> FitLog:
    """Trains this process's share of 65 requests in steps of seven, and checkpoints the end."""
    place = Place(folder=Path(folder) / f"world-{processes.world_size}", facts={})
    quarantine = Quarantine(small_layout(Path(folder)))
    with joined(processes, init_method or ""):
        model = SmallModel(dropout=0.0)
        learner = Learner(model, SmallCriterion(model), OptimizerConfig(warmup_steps=2), processes)
        log = fit(learner, SmallRows(64), FitConfig(batch_requests=7, window_requests=20), quarantine=quarantine)
        save(learner, place, 10)
    return log


def main(folder: str, port: str, world: str, rank: str) -> None:
    torch.set_num_threads(1)
    processes = Processes(rank=int(rank), world_size=int(world))
    print(*train_share(processes, folder, f"tcp://127.0.0.1:{port}").losses)


if __name__ == "__main__":
    main(*sys.argv[1:])
