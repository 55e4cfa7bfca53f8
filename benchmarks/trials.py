"""Trains models on one generated world and keeps every run in a file, so that a long benchmark can be stopped and resumed.

Knows the world, the training loop and where runs lie. Does not know what is compared.

Every impression is a request of its own, as of its own time; the last day is scored, all days before are trained on once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from feature_store.batch import FeatureBatch, Targets
from feature_store.layout import Layout
from feature_store.replay import Replay
from feature_store.spec import load_spec
from feature_store.tables import Tables
from feature_store.world import DAY_MS, START_MS, WorldConfig, generate
from model.baselines import frame
from model.baselines.frame import Baseline
from model.gem import flops
from model.gem.batch import Batch
from model.gem.foundation import FoundationModel
from model.training import metrics
from model.training.base_rates import base_logits
from model.training.evaluate import Predictions, predict
from model.training.fitting import FitConfig, fit
from model.training.learner import Learner
from model.training.loss import Sums, masked_bce
from model.training.metrics import Undefined
from model.training.optimizers import OptimizerConfig
from model.training.parallel import Processes
from model.training.quarantine import Quarantine
from model.training.rows import ReplayRows

WORLD = Path(__file__).resolve().parents[1] / "feature_store/datasets/world.yaml"
OBJECTIVE = "click"
Scored = FoundationModel | Baseline
Make = Callable[[Layout], Scored]


@dataclass(frozen=True, slots=True)
class Trial:
    """One model, trained once."""

    name: str
    seed: int
    ne: float
    """Of clicks on the last day, all surfaces."""
    auc: float
    flops: float
    """Forward FLOPs an example, over actual lengths."""
    seconds: float
    """Of training."""
    rows: int
    """Trained on."""


class Trials:
    """Runs on one world, in a folder."""

    def __init__(self, folder: Path, world: WorldConfig, *, batch: int = 128) -> None:
        self.world, self.batch = world, batch
        digest = hashlib.sha256(repr((world, batch)).encode()).hexdigest()[:8]
        self._folder = folder / digest
        self._folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def replay(self) -> Replay:
        """The world's log, generated unless it lies there."""
        tables = Tables(self._folder / "tables")
        if not tables.exists("impressions"):
            generate(self.world, tables)
        return Replay(load_spec(WORLD), tables)

    @cached_property
    def _train(self) -> ReplayRows:
        return ReplayRows(self.replay, START_MS, self.world.end_ms - DAY_MS, requests="impression")

    @cached_property
    def _test(self) -> ReplayRows:
        return ReplayRows(self.replay, self.world.end_ms - DAY_MS, self.world.end_ms, requests="impression")

    @cached_property
    def bayes(self) -> float:
        """NE of the world's own probabilities on the test rows: what no model can beat."""
        log = self.replay.tables.read("impressions", columns=["example_id", f"truth_{OBJECTIVE}"])
        place = {name: at for at, name in enumerate(log["example_id"].to_pylist())}
        test = self.replay.impressions
        shown = self._test.examples.impression
        truth = log[f"truth_{OBJECTIVE}"].to_numpy()[[place[bytes(name)] for name in test.example_id[shown]]]
        return _number(metrics.ne(truth, self._labels))

    @cached_property
    def _labels(self) -> npt.NDArray[np.float32]:
        _, targets = self._test.batch(np.arange(len(self._test)))
        return targets.labels[:, self.replay.spec.objectives.index(OBJECTIVE)]

    def run(self, name: str, seed: int, make: Make) -> Trial:
        """The trial of that name and seed: from its file if it is there, else trained now."""
        path = self._folder / f"{name}-{seed}.json"
        if path.exists():
            return Trial(**json.loads(path.read_text()))
        trial, predictions = self._trained(name, seed, make)
        np.save(path.with_suffix(".npy"), predictions.probabilities_NK.astype(np.float32))
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(trial)))
        part.replace(path)  # a killed run leaves none, or a whole one
        print(f"{name}, seed {seed}: NE {trial.ne:.4f}, {trial.seconds:.0f} s", flush=True)  # a benchmark prints
        return trial

    def predictions(self, trial: Trial) -> Predictions:
        """What a trial's model said of the test rows."""
        blank = predict(lambda batch: np.zeros((batch.num_candidates, len(self.replay.spec.objectives)), np.float32), self._test)
        return blank._replace(probabilities_NK=np.load(self._folder / f"{trial.name}-{trial.seed}.npy"))

    def _trained(self, name: str, seed: int, make: Make) -> tuple[Trial, Predictions]:
        torch.manual_seed(seed)
        model = make(self.replay.layout)
        samples = self._train.samples(10_000)
        model.fit_statistics(batch for batch, _ in samples)
        model.start_at(base_logits(samples, len(self.replay.spec.surfaces)))
        start = perf_counter()
        self._fit(model, seed)
        seconds = perf_counter() - start
        predictions = predict(_score(model), self._test)
        k = self.replay.spec.objectives.index(OBJECTIVE)
        p, labels = predictions.probabilities_NK[:, k], predictions.labels_NK[:, k]
        sample, _ = self._test.batch(np.arange(min(2048, len(self._test))))
        trial = Trial(
            name, seed, _number(metrics.ne(p, labels)), _number(metrics.auc(p, labels)),
            forward_flops(model, sample) / sample.num_candidates, seconds, len(self._train),
        )  # fmt: skip
        return trial, predictions

    def _fit(self, model: Scored, seed: int) -> None:
        criterion = _Criterion(model, len(self.replay.spec.objectives))
        learner = Learner(model, criterion, OptimizerConfig(), Processes(), seed=seed)
        config = FitConfig(batch_requests=self.batch, window_requests=200_000, seed=seed)
        fit(learner, self._train, config, quarantine=Quarantine(self.replay.layout))
        model.eval()


class _Criterion:
    """Masked cross entropy of all objectives alike."""

    def __init__(self, model: Scored, objectives: int) -> None:
        self._model = model
        self.weights: Mapping[str, tuple[float, ...]] = {"task": (1.0,) * objectives}

    def __call__(self, batch: FeatureBatch, targets: Targets) -> Mapping[str, Sums]:
        mask = torch.from_numpy(targets.label_mask)
        return {"task": masked_bce(logits(self._model, batch), torch.from_numpy(targets.labels), mask)}


def logits(model: nn.Module, batch: FeatureBatch) -> torch.Tensor:
    """[N, K] of either kind of model."""
    out = model(Batch.from_numpy(batch))
    made: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits_NK
    return made


def forward_flops(model: Scored, batch: FeatureBatch) -> float:
    """Of a batch, over actual lengths."""
    return frame.forward_flops(model, batch) if isinstance(model, Baseline) else flops.forward_flops(model, batch)


def _score(model: Scored) -> Callable[[FeatureBatch], npt.NDArray[np.float32]]:
    def score(batch: FeatureBatch) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            made: npt.NDArray[np.float32] = logits(model, batch).numpy()
            return made

    return score


def _number(value: float | Undefined) -> float:
    if isinstance(value, Undefined):
        raise ValueError(f"the last day of this world has no metric: {value}; take a larger world")
    return float(value)
