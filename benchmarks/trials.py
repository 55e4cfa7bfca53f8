"""Trains models on one generated world and keeps every run in a file, so that a long benchmark can be stopped and resumed.

Knows the world, the training loop and where runs lie. Does not know what is compared.

Unless told otherwise, every impression is a request of its own, as of its own time; the last day is scored, all days before
are trained on once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt

from benchmarks.learning import Make, Scored, begun, learner_of, scorer
from feature_store.batch import FeatureBatch
from feature_store.replay import Replay
from feature_store.spec import Spec, load_spec
from feature_store.tables import Tables
from feature_store.world import DAY_MS, START_MS, WorldConfig, generate
from model.baselines import frame
from model.baselines.frame import Baseline
from model.gem import flops
from model.training import metrics
from model.training.evaluate import Predictions, predict
from model.training.fitting import FitConfig, fit
from model.training.metrics import Undefined
from model.training.quarantine import Quarantine
from model.training.rows import ReplayRows

WORLD = Path(__file__).resolve().parents[1] / "feature_store/datasets/world.yaml"
OBJECTIVE = "click"


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
    """Candidates trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What is read of a world: a spec, and which requests."""

    name: str = ""
    """Tells folders apart; no name: that of readings which had none."""
    spec: Callable[[], Spec] = lambda: load_spec(WORLD)
    train: Callable[[Replay, WorldConfig], ReplayRows] = lambda replay, world: ReplayRows(
        replay, START_MS, world.end_ms - DAY_MS, requests="impression"
    )
    test: Callable[[Replay, WorldConfig], ReplayRows] = lambda replay, world: ReplayRows(
        replay, world.end_ms - DAY_MS, world.end_ms, requests="impression"
    )
    samples: int = 10_000
    """Requests that statistics are taken from."""
    scored: int = 512
    """Requests that are scored at once."""


class Trials:
    """Runs on one world, in a folder."""

    def __init__(self, folder: Path, world: WorldConfig, *, batch: int = 128, reading: Reading | None = None) -> None:
        self.world, self.batch, self._reading = world, batch, reading or Reading()
        named = (self._reading.name, self._reading.spec().hash.hex()) if self._reading.name else ()
        digest = hashlib.sha256(repr((world, batch, *named)).encode()).hexdigest()[:8]
        self.folder = folder / digest
        self.folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def replay(self) -> Replay:
        """The world's log, generated unless it lies there."""
        tables = Tables(self.folder / "tables")
        if not tables.exists("impressions"):
            generate(self.world, tables)
        return Replay(self._reading.spec(), tables)

    @cached_property
    def train(self) -> ReplayRows:
        """Rows that are trained on."""
        return self._reading.train(self.replay, self.world)

    @cached_property
    def test(self) -> ReplayRows:
        """Rows that are scored."""
        return self._reading.test(self.replay, self.world)

    @cached_property
    def bayes(self) -> float:
        """NE of the world's own probabilities on the test rows: what no model can beat."""
        log = self.replay.tables.read("impressions", columns=["example_id", f"truth_{OBJECTIVE}"])
        place = {name: at for at, name in enumerate(log["example_id"].to_pylist())}
        test = self.replay.impressions
        shown = self.test.examples.impression
        truth = log[f"truth_{OBJECTIVE}"].to_numpy()[[place[bytes(name)] for name in test.example_id[shown]]]
        return _number(metrics.ne(truth, self._labels))

    @cached_property
    def _labels(self) -> npt.NDArray[np.float32]:
        _, targets = self.test.batch(np.arange(len(self.test)))
        return targets.labels[:, self.replay.spec.objectives.index(OBJECTIVE)]

    def run(self, name: str, seed: int, make: Make) -> Trial:
        """The trial of that name and seed: from its file if it is there, else trained now."""
        path = self.folder / f"{name}-{seed}.json"
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
        blank = predict(lambda batch: np.zeros((batch.num_candidates, len(self.replay.spec.objectives)), np.float32), self.test)
        return blank._replace(probabilities_NK=np.load(self.folder / f"{trial.name}-{trial.seed}.npy"))

    def _trained(self, name: str, seed: int, make: Make) -> tuple[Trial, Predictions]:
        model = begun(make, self.replay.layout, self.train.samples(self._reading.samples), seed)
        start = perf_counter()
        self._fit(model, seed)
        seconds = perf_counter() - start
        predictions = predict(scorer(model), self.test, batch_requests=self._reading.scored)
        k = self.replay.spec.objectives.index(OBJECTIVE)
        p, labels = predictions.probabilities_NK[:, k], predictions.labels_NK[:, k]
        sample, _ = self.test.batch(np.arange(min(2048, len(self.test))))
        trial = Trial(
            name, seed, _number(metrics.ne(p, labels)), _number(metrics.auc(p, labels)),
            forward_flops(model, sample) / sample.num_candidates, seconds, self.train.examples.num_candidates,
        )  # fmt: skip
        return trial, predictions

    def _fit(self, model: Scored, seed: int) -> None:
        config = FitConfig(batch_requests=self.batch, window_requests=200_000, seed=seed)
        fit(learner_of(model, seed), self.train, config, quarantine=Quarantine(self.replay.layout))


def forward_flops(model: Scored, batch: FeatureBatch) -> float:
    """Of a batch, over actual lengths."""
    return frame.forward_flops(model, batch) if isinstance(model, Baseline) else flops.forward_flops(model, batch)


def _number(value: float | Undefined) -> float:
    if isinstance(value, Undefined):
        raise ValueError(f"the last day of this world has no metric: {value}; take a larger world")
    return float(value)
