"""Trains models on the rows of one log and keeps every run in a file, so that a long benchmark can be stopped and resumed.

Knows logs, generated and real, the training loop and where runs lie. Does not know what is compared.

Of a generated world, unless told otherwise, every impression is a request of its own, as of its own time; the last day is
scored, all days before are trained on once.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt

from benchmarks.learning import Make, Scored, begun, learner_of, scorer
from benchmarks.logs import LOGS
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
    """Of clicks in the rows that are scored, all surfaces."""
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


class Trials(ABC):
    """Runs on one log, in a folder."""

    def __init__(self, folder: Path, fit: FitConfig, *, samples: int, scored: int) -> None:
        self.folder, self._samples, self._scored = folder, samples, scored
        self._config = fit
        folder.mkdir(parents=True, exist_ok=True)

    @property
    @abstractmethod
    def replay(self) -> Replay:
        """The log."""

    @property
    @abstractmethod
    def train(self) -> ReplayRows:
        """Rows that are trained on."""

    @property
    @abstractmethod
    def test(self) -> ReplayRows:
        """Rows that are scored."""

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
        model = begun(make, self.replay.layout, self.train.samples(self._samples), seed)
        start = perf_counter()
        self._fit(model, seed)
        seconds = perf_counter() - start
        predictions = predict(scorer(model), self.test, batch_requests=self._scored)
        k = self.replay.spec.objectives.index(OBJECTIVE)
        p, labels = predictions.probabilities_NK[:, k], predictions.labels_NK[:, k]
        sample, _ = self.test.batch(np.arange(min(2048, len(self.test))))
        trial = Trial(
            name, seed, _number(metrics.ne(p, labels)), _number(metrics.auc(p, labels)),
            forward_flops(model, sample) / sample.num_candidates, seconds, self.train.examples.num_candidates,
        )  # fmt: skip
        return trial, predictions

    def _fit(self, model: Scored, seed: int) -> None:
        fit(learner_of(model, seed), self.train, replace(self._config, seed=seed), quarantine=Quarantine(self.replay.layout))


class WorldTrials(Trials):
    """On a generated world."""

    def __init__(self, folder: Path, world: WorldConfig, *, batch: int = 128, reading: Reading | None = None) -> None:
        self.world, self._reading = world, reading or Reading()
        named = (self._reading.name, self._reading.spec().hash.hex()) if self._reading.name else ()
        digest = hashlib.sha256(repr((world, batch, *named)).encode()).hexdigest()[:8]
        config = FitConfig(batch_requests=batch, window_requests=200_000)
        super().__init__(folder / digest, config, samples=self._reading.samples, scored=self._reading.scored)

    @cached_property
    def replay(self) -> Replay:
        """The world's log, generated unless it lies there."""
        tables = Tables(self.folder / "tables")
        if not tables.exists("impressions"):
            generate(self.world, tables)
        return Replay(self._reading.spec(), tables)

    @cached_property
    def train(self) -> ReplayRows:
        """As the reading says."""
        return self._reading.train(self.replay, self.world)

    @cached_property
    def test(self) -> ReplayRows:
        """As the reading says."""
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


class LogTrials(Trials):
    """On a real log's own split: what was shown before its validation rows is trained on, its test rows are scored."""

    def __init__(self, folder: Path, name: str, source: Path, fit: FitConfig, *, most: int | None = None) -> None:
        """`most` rows at most of either part, the newest to train on and the oldest to score."""
        self.log, self._source, self._most = LOGS[name], source, most
        facts = (name, self.log.ends, fit, most, self.log.spec().hash)
        super().__init__(folder / hashlib.sha256(repr(facts).encode()).hexdigest()[:8], fit, samples=20_000, scored=512)

    @cached_property
    def replay(self) -> Replay:
        """The log, imported unless it lies there."""
        tables, spec = Tables(self.folder / "tables"), self.log.spec()
        if not tables.exists("impressions"):
            self.log.fill(self._source, tables, spec)
        return Replay(spec, tables)

    @cached_property
    def train(self) -> ReplayRows:
        """All until training ends."""
        return self._rows(int(self.replay.impressions.event_ms.min()), self._ends[0], newest=True)

    @cached_property
    def test(self) -> ReplayRows:
        """All from where validation ends."""
        return self._rows(*self._ends[1:], newest=False)

    @property
    def _ends(self) -> list[int]:
        return [self.log.end_ms(end) for end in self.log.ends]

    def _rows(self, from_ms: int, to_ms: int, *, newest: bool) -> ReplayRows:
        times = self.replay.impressions.event_ms
        own = np.sort(times[(times >= from_ms) & (times < to_ms)])
        if self._most is not None and len(own) > self._most:
            from_ms, to_ms = (int(own[-self._most]), to_ms) if newest else (from_ms, int(own[self._most]))
        return ReplayRows(self.replay, from_ms, to_ms, requests="impression")


def forward_flops(model: Scored, batch: FeatureBatch) -> float:
    """Of a batch, over actual lengths."""
    return frame.forward_flops(model, batch) if isinstance(model, Baseline) else flops.forward_flops(model, batch)


def _number(value: float | Undefined) -> float:
    if isinstance(value, Undefined):
        raise ValueError(f"the rows that are scored have no metric: {value}; take more of them")
    return float(value)
