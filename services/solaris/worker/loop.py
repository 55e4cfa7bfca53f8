"""Takes offered pairs from the stream, has them computed, and writes what came out.

Knows the order of steps that loses nothing. Does not know how a state is read, a pair computed or a row laid out.

A turn is: claim → choose → read states → compute → append to the change log → write rows → acknowledge. A worker that is
killed anywhere before the last step leaves its tasks claimed, another takes them over, and doing them twice is harmless:
rows go by (pair, computed_ms), and the log's readers do too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from gem.solaris.v1 import task_pb2
from google.protobuf.message import DecodeError

from feature_store.batch import FeatureBatch
from feature_store.errors import GemError, InvalidInput, NotFound
from services.runtime.telemetry import link_to, span
from services.solaris import admission
from services.solaris.admission import Claimed
from services.solaris.keys import Keys
from services.solaris.ledger import DROPPED, WORKED, WRITTEN_IN, Ledger
from services.solaris.lifetimes import status_key
from services.solaris.rows import NO_SURFACE, Pair, quantize_finite
from services.solaris.worker.batching import concatenate
from services.solaris.worker.clock import Clock
from services.solaris.writer import NewPair, PairWriter, WideRowStore

log = logging.getLogger(__name__)

MAX_LINKS = 64
"""Requests that one turn's span points to."""
RETRY_SECONDS = 0.5
"""Pause after a turn that could not read any state."""


class Stream(Protocol):
    """The stream of offered pairs."""

    def claim(
        self, group: str, consumer: str, limit: int, block_ms: int, *, reclaim_idle_ms: int
    ) -> Sequence[tuple[str, bytes]]:
        """Takes items that nobody else has."""

    def ack(self, group: str, ids: Sequence[str]) -> None:
        """Says that items are done."""


class State(NamedTuple):
    """One user and N ads as of an instant."""

    batch: FeatureBatch
    group_keys: Sequence[int | None]


class States(Protocol):
    """Reads users' states."""

    def read(self, tasks: Sequence[tuple[task_pb2.SpeculationTask, int]]) -> list[State | GemError]:
        """The state of each task's user as of the instant beside it, or why there is none."""


class Embedder(Protocol):
    """Runs the foundation model."""

    @property
    def space_id(self) -> bytes:
        """Coordinate system it writes."""

    @property
    def version(self) -> str:
        """Version of the artefact."""

    def embed(self, batch: FeatureBatch) -> npt.NDArray[np.float32]:
        """Pair embeddings [N, D]; one forward for all requests of the batch."""


class ChangeLog(Protocol):
    """The table of everything written."""

    def append(self, pairs: Sequence[NewPair]) -> None:
        """Adds rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """How much a worker takes on."""

    group: str = "solaris"
    """Consumer group: every task is done by one of its consumers."""
    consumer: str
    """Name of this process in the group."""
    batch_tasks: int = 16
    """Tasks of one turn: one forward."""
    max_backlog_tasks: int = 512
    """Tasks held; of a larger burst the oldest are dropped."""
    block_ms: int = 500
    """Longest wait for a task."""
    pause_ms: int = 250
    """Pause after a turn that leaves no full batch: forwards, transactions and files cost much the same for one task."""
    reclaim_idle_ms: int = 30_000
    """A task held this long by a worker that has not acknowledged it is taken over."""

    def __post_init__(self) -> None:
        if not 0 < self.batch_tasks <= self.max_backlog_tasks:
            raise ValueError(
                f"batch_tasks {self.batch_tasks} must be positive and at most max_backlog_tasks {self.max_backlog_tasks}"
            )
        if self.pause_ms < 0:
            raise ValueError(f"pause_ms is {self.pause_ms}; it must not be negative")


class Job(NamedTuple):
    """A task whose pairs are about to be computed."""

    claimed: Claimed
    computed_ms: int
    user_key: int
    ad_keys: list[int]


class Worker:
    """Works until told to stop."""

    def __init__(
        self,
        stream: Stream,
        states: States,
        embedder: Embedder,
        writer: PairWriter,
        changes: ChangeLog,
        ledger: Ledger,
        *,
        settings: WorkerSettings,
        clock: Clock,
        keys: Keys,
        surfaces: Sequence[str],
    ) -> None:
        self._stream, self._states, self._embedder = stream, states, embedder
        self._writer, self._changes, self._ledger = writer, changes, ledger
        self._settings, self._clock, self._keys = settings, clock, keys
        self._surfaces = {name: index for index, name in enumerate(surfaces)}
        self._backlog: list[Claimed] = []

    def run(self, stopping: threading.Event, *, store: WideRowStore) -> None:
        """Turns until `stopping`; what is claimed and not done is left for another worker."""
        field, reported = f"worker:{self._settings.consumer}", None
        while not stopping.is_set():
            try:
                done = self.turn()
            except (GemError, OSError) as error:
                self._ledger.add(WORKED, "failed_turns")
                log.warning("a turn failed, its tasks stay claimed: %s", error)
                stopping.wait(RETRY_SECONDS)
                done = 0
            totals = self._ledger.totals()
            if totals != reported:
                reported = totals
                _report(store, self._embedder.space_id, field, self._ledger)
            if done and len(self._backlog) < self._settings.batch_tasks:
                stopping.wait(self._settings.pause_ms / 1000.0)

    def turn(self) -> int:
        """One turn.

        Returns:
            Tasks that were acknowledged.

        Raises:
            GemError: the stream, the store or every state was unavailable; the tasks stay claimed.
        """
        self._claim()
        now_ms = self._clock.now_ms([claimed.task for claimed in self._backlog])
        chosen = admission.plan(
            self._backlog,
            now_ms=now_ms,
            batch_tasks=self._settings.batch_tasks,
            max_backlog_tasks=self._settings.max_backlog_tasks,
        )
        self._backlog = chosen.work + chosen.rest
        self._ledger.add_all(DROPPED, chosen.dropped)
        self._acknowledge(chosen.done)
        if chosen.work:
            done = self._compute(chosen.work)
            finished = set(done)
            self._backlog = [c for c in self._backlog if c.entry_id not in finished]
            return len(chosen.done) + len(done)
        return len(chosen.done)

    def _claim(self) -> None:
        """Takes as much as a backlog holds, even with a full one: the newest tasks are at the stream's end."""
        block_ms = 0 if self._backlog else self._settings.block_ms
        held = {claimed.entry_id for claimed in self._backlog}
        for entry_id, payload in self._stream.claim(
            self._settings.group,
            self._settings.consumer,
            self._settings.max_backlog_tasks,
            block_ms,
            reclaim_idle_ms=self._settings.reclaim_idle_ms,
        ):
            if entry_id in held:
                continue
            try:
                task = task_pb2.SpeculationTask.FromString(payload)
            except DecodeError:
                self._ledger.add(DROPPED, admission.MALFORMED)
                self._acknowledge([entry_id])
                continue
            self._backlog.append(Claimed(entry_id, task))

    def _compute(self, work: list[Claimed]) -> list[str]:
        """Acknowledged entries."""
        links = [link for c in work[:MAX_LINKS] for link in link_to(c.task.traceparent)]
        with span("solaris.turn", root=True, links=links) as current:
            jobs, idle = self._jobs(work)
            states = self._states.read([(job.claimed.task, job.computed_ms) for job in jobs])
            ready, refused = self._sorted_out(jobs, states)
            pairs = self._pairs(ready)
            current.set_attributes({"gem.tasks": len(work), "gem.pairs": len(pairs)})
            self._write(pairs)
            done = idle + refused + [job.claimed.entry_id for job, _ in ready]
            self._acknowledge(done)
        return done

    def _jobs(self, work: list[Claimed]) -> tuple[list[Job], list[str]]:
        """What to compute once fresh pairs are left out, and the entries of which nothing is left."""
        jobs: list[Job] = []
        idle: list[str] = []
        for claimed in work:
            computed_ms = self._clock.computed_ms(claimed.task)
            try:
                job = self._job(claimed, computed_ms)
            except InvalidInput as error:
                self._ledger.add(DROPPED, admission.MALFORMED, len(claimed.task.ad_ids))
                log.info("a task of request %s is dropped: %s", claimed.task.request_id, error)
                job = None
            if job is None:
                idle.append(claimed.entry_id)
            else:
                jobs.append(job)
        return jobs, idle

    def _job(self, claimed: Claimed, computed_ms: int) -> Job | None:
        user_key = self._keys.user(claimed.task.user_id)
        ad_keys = self._keys.ads(list(claimed.task.ad_ids))
        fresh = self._writer.fresh(
            user_key, ad_keys, now_ms=computed_ms, model_version=self._embedder.version
        )
        self._ledger.add(DROPPED, admission.FRESH, sum(fresh))
        wanted = [position for position, is_fresh in enumerate(fresh) if not is_fresh]
        if not wanted:
            return None
        task = admission.with_ads(claimed.task, wanted)
        return Job(
            Claimed(claimed.entry_id, task), computed_ms, user_key, [ad_keys[p] for p in wanted]
        )

    def _sorted_out(
        self, jobs: list[Job], states: list[State | GemError]
    ) -> tuple[list[tuple[Job, State]], list[str]]:
        """Jobs with their states, and entries that can never have one; a state that may come later stays claimed.

        Raises:
            GemError: no state could be read at all, for now.
        """
        ready: list[tuple[Job, State]] = []
        refused: list[str] = []
        waiting: list[GemError] = []
        for job, state in zip(jobs, states, strict=True):
            if isinstance(state, State):
                ready.append((job, state))
            elif isinstance(state, InvalidInput | NotFound):
                self._ledger.add(DROPPED, admission.MALFORMED, len(job.ad_keys))
                refused.append(job.claimed.entry_id)
            else:
                waiting.append(state)
        if waiting and not ready:
            self._acknowledge(refused)
            raise waiting[0]
        return ready, refused

    def _pairs(self, ready: list[tuple[Job, State]]) -> list[NewPair]:
        if not ready:
            return []
        with span("solaris.forward"):
            vectors_ND = self._embedder.embed(concatenate([state.batch for _, state in ready]))
        self._ledger.add_all(WORKED, {"forwards": 1, "tasks": len(ready), "pairs": len(vectors_ND)})
        steps_ND, scales_N, finite_N = quantize_finite(vectors_ND)
        self._ledger.add(DROPPED, "not_finite", int((~finite_N).sum()))
        owners = [
            (job, ad_key, group_key)
            for job, state in ready
            for ad_key, group_key in zip(job.ad_keys, state.group_keys, strict=True)
        ]
        return [
            NewPair(
                job.user_key, ad_key, group_key, self._pair(job, steps_ND[i], float(scales_N[i]))
            )
            for i, (job, ad_key, group_key) in enumerate(owners)
            if finite_N[i]
        ]

    def _pair(self, job: Job, steps_D: npt.NDArray[np.int8], scale: float) -> Pair:
        return Pair(
            space_id=self._embedder.space_id,
            model_version=self._embedder.version,
            surface=self._surfaces.get(job.claimed.task.surface, NO_SURFACE),
            computed_ms=job.computed_ms,
            available_ms=self._clock.available_ms(job.computed_ms),
            scale=scale,
            vector=steps_D,
        )

    def _write(self, pairs: list[NewPair]) -> None:
        if not pairs:
            return
        with span("solaris.write"):
            self._changes.append(pairs)
            written = self._writer.write(pairs)
        self._ledger.add(WORKED, "written", len(written))
        self._ledger.add_in_hour(WRITTEN_IN, [new.pair.computed_ms for new in written])

    def _acknowledge(self, entry_ids: Sequence[str]) -> None:
        if entry_ids:
            self._stream.ack(self._settings.group, entry_ids)


def _report(store: WideRowStore, space_id: bytes, field: str, ledger: Ledger) -> None:
    values: Mapping[str, bytes] = {field: ledger.encoded()}
    try:
        store.hset_many(status_key(space_id), values)
    except (GemError, OSError) as error:
        log.warning("totals were not written: %s", error)
