"""Where a training step and a scoring call spend their time, part by part, against what the machine can do.

Knows the parts of a teacher, its FLOPs and a watch. Does not know homes, tables of figures or plots.

Local MFU = FLOPs / seconds / ceiling of a part, and over all parts their mean weighted by FLOPs; end-to-end MFU is that of
steps that nothing watches; their ratio says what is lost between the parts. FLOPs are the model's (`model.gem.flops`), backward
counts twice forward; the compressor, which is no part of the model, is not in their sum. Bytes are what unfused operations
move (`model.training.watch.Traffic`), counted in one step or call that is not timed.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn
from torch.nn import Parameter

from feature_store.batch import FeatureBatch, Targets
from feature_store.errors import FailedPrecondition, InvalidInput
from feature_store.layout import Layout
from model.gem.encoder import KunlunLayer, StreamLayer
from model.gem.flops import PART, flops_by_part
from model.gem.foundation import FoundationModel
from model.loopfm.compressor import Compressor
from model.training.base_rates import base_logits
from model.training.learner import Learner
from model.training.loss import Sums
from model.training.optimizers import OptimizerConfig
from model.training.parallel import Processes
from model.training.quarantine import Quarantine
from model.training.rows import ReplayRows
from model.training.state import BatchOrder
from model.training.teacher import Teacher, TeacherConfig, TeacherCriterion
from model.training.throughput import TRAINING_FACTOR
from model.training.watch import At, Traffic, Watch, watched

BETWEEN, LOSSES, OPTIMIZER, GATHER, COMPRESSOR = "between modules", "losses", "optimizer", "gather rows", "compressor"
WARMUP = 2
_COPIES = 4
"""Of all weights: themselves, gradients and Adam's two moments."""
_SUMMED = ("flops", "bytes", "forward_seconds", "backward_seconds")
OnCall = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What one part costs, a step or a call."""

    name: str
    flops: float
    bytes: float
    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def speed(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def kind(self) -> str:
        """The name without its layer."""
        return self.name.rpartition(PART)[2]

    def __add__(self, other: Cost) -> Cost:
        """Both, under this one's name."""
        sums = {each: getattr(self, each) + getattr(other, each) for each in _SUMMED}
        return Cost(name=self.name, **sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What a step or a call costs, as a whole and by part."""

    what: str
    requests: float
    candidates: float
    events: float
    """Of the histories, before the model keeps the newest."""
    flops: float
    """Of the model."""
    seconds: float
    """Of an undisturbed one."""
    costs: tuple[Cost, ...]
    """Medians over watched ones."""

    @property
    def watched_seconds(self) -> float:
        """Of all parts; more than `seconds` by what watching costs, or by what is otherwise done ahead."""
        return sum(cost.seconds for cost in self.costs)

    def mfu(self, ceiling: float) -> float:
        """End to end."""
        return self.flops / self.seconds / ceiling

    def local_mfu(self, ceiling: float) -> float:
        """Mean over the model's parts, weighted by FLOPs."""
        counted = [cost for cost in self.costs if cost.flops and cost.name != COMPRESSOR]
        return sum(cost.flops * cost.speed for cost in counted) / sum(cost.flops for cost in counted) / ceiling

    def by_kind(self) -> tuple[Cost, ...]:
        """Costs with all layers taken together, largest first."""
        kinds: dict[str, Cost] = {}
        for cost in self.costs:
            kinds[cost.kind] = kinds[cost.kind] + cost if cost.kind in kinds else replace(cost, name=cost.kind)
        return tuple(sorted(kinds.values(), key=lambda cost: -cost.seconds))

    def share(self, cost: Cost) -> float:
        """Of all watched seconds."""
        return cost.seconds / self.watched_seconds


def parts_of(teacher: Teacher) -> dict[str, tuple[nn.Module, ...]]:
    """The modules of every part; names are those of `flops_by_part` where the model has products."""
    model = teacher.foundation
    parts: dict[str, tuple[nn.Module, ...]] = {
        BETWEEN: (model,), "embeddings": (model.embeddings,), "tokens": (model.tokens,),
        "candidate read": tuple(model.reads), "heads": (model.heads,),
        COMPRESSOR: (teacher.compressor, *teacher.compressor.children(), *teacher.compressor.decoders, *teacher.compressor.project),
    }  # fmt: skip
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, KunlunLayer)
        streams = [stream for stream in layer.streams if isinstance(stream, StreamLayer)]
        own: dict[str, tuple[nn.Module | None, ...]] = {
            "candidate summary": (layer.candidate_summary,),
            "interaction": (layer.interaction,),
            "pooling": tuple(layer.poolings),
            "context summary": (layer.context_summary,),
            "pffn": tuple(stream.pffn for stream in streams),
            "attention": tuple(stream.attention for stream in streams),
        }
        for name, modules in own.items():
            if present := tuple(module for module in modules if module is not None):
                parts[f"layer {index}{PART}{name}"] = present
    return parts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Watched(Processes):
    """One process, whose watch hears when backward ends."""

    watch: Watch = field(default_factory=Watch)

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        self.watch.switch(OPTIMIZER)
        Processes.sum_gradients(self, parameters)


class _Criterion:
    """A criterion whose watch hears when it begins, and follows its graph."""

    def __init__(self, criterion: TeacherCriterion, watch: Watch) -> None:
        self._criterion, self._watch = criterion, watch
        self.weights = criterion.weights

    def __call__(self, batch: FeatureBatch, targets: Targets) -> Mapping[str, Sums]:
        self._watch.switch(LOSSES)
        terms = self._criterion(batch, targets)
        self._watch.follow([sums.loss_K for sums in terms.values()], LOSSES)
        return terms


def compressor_flops(compressor: Compressor, candidates: int, *, training: bool) -> float:
    """Of its products: projections, which are fixed, forward only; the rest three times in training, when it also decodes."""
    fixed, learned, decoded = (
        2.0 * candidates * sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
        for module in (compressor.project, compressor.encoder, compressor.decoders)
    )
    return fixed + (TRAINING_FACTOR * (learned + decoded) if training else learned)


def untrained(config: TeacherConfig, rows: ReplayRows) -> Teacher:
    """A teacher with the statistics of some rows.

    Raises:
        FailedPrecondition: its weights in training do not fit into this machine's memory.
    """
    require_memory(config, rows.replay.layout)
    torch.manual_seed(0)
    teacher = Teacher(config, rows.replay.layout)
    samples = rows.samples(2048)
    teacher.foundation.fit_statistics(batch for batch, _ in samples)
    teacher.foundation.start_at(base_logits(samples, len(rows.replay.spec.surfaces)))
    return teacher


def require_memory(config: TeacherConfig, layout: Layout) -> None:
    """Refuses what would not fit, before memory is taken.

    Raises:
        FailedPrecondition: weights, gradients and moments are larger than this machine's memory.
    """
    with torch.device("meta"):
        weights = sum(parameter.nbytes for parameter in FoundationModel(config.foundation, layout).parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _COPIES * weights > memory:
        raise FailedPrecondition(
            f"training needs {_COPIES * weights / 2**30:.0f} GiB for weights, gradients and moments, this machine has "
            f"{memory / 2**30:.0f} GiB; take a smaller preset, such as model.gem.presets:public_s"
        )


class Profiler:
    """Measures a teacher on rows of a log."""

    def __init__(self, teacher: Teacher, rows: ReplayRows, *, batch_requests: int = 128) -> None:
        self.teacher, self.rows = teacher, rows
        self._batch_requests = batch_requests
        self._watch, self._parts = Watch(), parts_of(teacher)
        weights = (1.0,) * len(rows.replay.spec.objectives)
        criterion = _Criterion(TeacherCriterion(teacher, objective_weights=weights), self._watch)
        self._learner = Learner(
            teacher, criterion, OptimizerConfig(), _Watched(watch=self._watch), clip_apart=("compressor",)
        )
        self._quarantine = Quarantine(rows.replay.layout)

    def training(self, steps: int, on_call: OnCall = lambda done, total: None) -> Profile:
        """Steps as a run takes them, but for their rows, which a run gathers ahead in a thread.

        Raises:
            InvalidInput: there is no step, or no row.
        """
        _require_some(steps, len(self.rows))
        order = BatchOrder(
            num_rows=len(self.rows), batch_rows=self._batch_requests, window_rows=64 * self._batch_requests,
            epochs=math.ceil((WARMUP + steps) * self._batch_requests / len(self.rows)),
        )  # fmt: skip

        def step(index: int) -> FeatureBatch:
            self._watch.switch(GATHER)
            batch, targets = self._quarantine.clean(*self.rows.batch(order.rows(index)))
            self._watch.switch(OPTIMIZER)
            self._learner.step(index, order.num_steps, batch, targets)
            return batch

        return self._profile("training step", step, steps, GATHER, on_call)

    def scoring(self, batch: FeatureBatch, calls: int, on_call: OnCall = lambda done, total: None) -> Profile:
        """Calls of `Teacher.annotate`, all on the same candidates.

        Raises:
            InvalidInput: there is no call, or no candidate.
        """
        _require_some(calls, batch.num_candidates)

        def call(index: int) -> FeatureBatch:
            self.teacher.annotate(batch)
            return batch

        return self._profile("scoring call", call, calls, BETWEEN, on_call)

    def _profile(
        self, what: str, call: Callable[[int], FeatureBatch], calls: int, first: str, on_call: OnCall
    ) -> Profile:
        """Medians of `calls` undisturbed calls and of as many watched ones, in turn, so that both meet the same neighbours."""
        undisturbed, seen, batches = [], [], []
        with watched(self._watch, self._parts):
            for index in range(-WARMUP, calls):
                start = time.perf_counter()
                batch = call(max(0, index))
                seconds = time.perf_counter() - start
                if index >= 0:
                    undisturbed.append(seconds)
                    batches.append(batch)
                    seen.append(self._seconds(call, index, first))
                on_call(index + WARMUP + 1, calls + WARMUP)
            moved = self._bytes(call, calls - 1, first)
        training = what == "training step"
        flops = self._flops(batches, training=training)
        seconds_at = {at: statistics.median(each.get(at, 0.0) for each in seen) for at in set().union(*seen)}
        names = [name for name in (GATHER, *self._parts, LOSSES, OPTIMIZER) if any(at.part == name for at in seconds_at)]
        return Profile(
            what=what,
            requests=float(np.mean([batch.num_requests for batch in batches])),
            candidates=float(np.mean([batch.num_candidates for batch in batches])),
            events=float(np.mean([len(batch.event_ms) for batch in batches])),
            flops=sum(count for name, count in flops.items() if name != COMPRESSOR),
            seconds=statistics.median(undisturbed),
            costs=tuple(_cost(name, flops.get(name, 0.0), moved, seconds_at) for name in names),
        )

    def _seconds(self, call: Callable[[int], FeatureBatch], index: int, first: str) -> dict[At, float]:
        self._watch.seconds.clear()
        with self._watch.started(first):
            call(index)
        return dict(self._watch.seconds)

    def _bytes(self, call: Callable[[int], FeatureBatch], index: int, first: str) -> Mapping[At, int]:
        with self._watch.started(first), Traffic(self._watch) as traffic:
            call(index)
        return traffic.bytes

    def _flops(self, batches: list[FeatureBatch], *, training: bool) -> dict[str, float]:
        """Mean of the batches, by part."""
        flops: defaultdict[str, float] = defaultdict(float)
        factor = (TRAINING_FACTOR if training else 1.0) / len(batches)
        for batch in batches:
            for name, count in flops_by_part(self.teacher.foundation, batch).items():
                flops[name] += count * factor
            own = compressor_flops(self.teacher.compressor, batch.num_candidates, training=training)
            flops[COMPRESSOR] += own / len(batches)
        return flops


def _cost(name: str, flops: float, moved: Mapping[At, int], seconds: Mapping[At, float]) -> Cost:
    forward, backward = At(name, "forward"), At(name, "backward")
    return Cost(
        name=name,
        flops=flops,
        bytes=moved.get(forward, 0) + moved.get(backward, 0),
        forward_seconds=seconds.get(forward, 0.0),
        backward_seconds=seconds.get(backward, 0.0),
    )


def _require_some(calls: int, rows: int) -> None:
    if calls < 1:
        raise InvalidInput(f"{calls} steps measure nothing; take at least 1")
    if not rows:
        raise InvalidInput("there is no row to measure on; give a log, or at least 1 candidate")


def scoring_batch(batch: FeatureBatch, *, candidates: int, history: int) -> FeatureBatch:
    """One request of a batch, that with most events: its newest `history` ones, and the batch's candidates in turn.

    What there is too little of is repeated, events in the order of time; without any event the history is empty.
    """
    lengths = np.diff(batch.event_offsets)
    request = int(lengths.argmax())
    own = np.arange(batch.event_offsets[request], batch.event_offsets[request + 1])
    events = np.sort(np.resize(own[::-1], history if len(own) else 0))
    shown = np.resize(np.arange(batch.num_candidates), candidates)
    kept = {}
    for name, value in batch._asdict().items():
        if name.startswith("event_"):
            kept[name] = value[events] if name != "event_offsets" else np.array([0, len(events)])
        elif name.startswith(("ad_", "pair_")):
            kept[name] = value[shown]
        elif name == "candidate_offsets":
            kept[name] = np.array([0, candidates])
        elif name == "memory_offsets":
            kept[name] = value[request : request + 2] - value[request]
        elif name.startswith("memory_"):
            kept[name] = value[batch.memory_offsets[request] : batch.memory_offsets[request + 1]]
        else:
            kept[name] = value[request : request + 1]
    return FeatureBatch(**kept)
