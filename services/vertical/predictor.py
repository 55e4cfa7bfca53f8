"""One vertical model on the Open Inference Protocol: tensors in, probabilities out.

Knows the protocol's messages and when a model is ready. Does not know sockets, nor how a score is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from kserve import InferOutput, InferRequest, InferResponse, Model
from kserve.utils.numpy_codec import from_np_dtype
from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter, Histogram

from feature_store.batch import Array, FeatureBatch
from feature_store.errors import GemError, InvalidInput, NotFound, NotReady, ResourceExhausted
from services.runtime.metrics import SECONDS_BUCKETS
from services.runtime.telemetry import in_context, span
from services.vertical.contract import FALLBACK, PROBABILITY_PREFIX, Contract
from services.vertical.scoring import Scores


class Scorer(Protocol):
    """A loaded, proven model."""

    @property
    def contract(self) -> Contract:
        """Tensors it reads and writes."""

    @property
    def version(self) -> str:
        """Version of its artefact."""

    def score(self, batch: FeatureBatch) -> Scores:
        """Probabilities of one request's candidates."""


class ScoringMetrics:
    """What the models of a process did; labels are model and objective names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "gem_vertical_score_seconds", "Seconds of the model alone", ("model",),
            buckets=SECONDS_BUCKETS, registry=registry,
        )  # fmt: skip
        self.candidates = Counter(
            "gem_vertical_candidates", "Candidates scored", ("model",), registry=registry
        )
        self.fallbacks = Counter(
            "gem_vertical_fallbacks",
            "Candidates whose score was not finite and was replaced by the base rate",
            ("model",),
            registry=registry,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Workplace:
    """What the models of one process share."""

    pool: Executor
    """Threads that compute, so that the event loop keeps answering."""
    metrics: ScoringMetrics
    max_in_flight: int = 64
    """Requests taken on by one model at a time; more are shed."""


class Vertical(Model):  # type: ignore[misc]  # kserve is untyped
    """A model that is ready once it has been loaded and has reproduced its golden request."""

    def __init__(self, name: str, load: Callable[[], Scorer], workplace: Workplace) -> None:
        super().__init__(name)
        self.ready = False
        self._load = load
        self._workplace = workplace
        self._scorer: Scorer | None = None
        self._failure = "it is still loading"
        self._in_flight = 0

    @property
    def failure(self) -> str:
        """Why it is not ready; empty if it is."""
        return "" if self.ready else self._failure

    @property
    def version(self) -> str:
        """Version of the loaded artefact; empty before."""
        return self._scorer.version if self._scorer else ""

    def load(self) -> bool:
        """Loads and proves the artefact; blocks. A refusal is kept as `failure` and raised.

        Raises:
            GemError: the artefact is corrupt, belongs to another spec or space, or scores its golden request differently.
        """
        try:
            self._scorer = self._load()
        except GemError as error:
            self._failure = str(error)
            raise
        self.ready = True
        return True

    def start(self) -> None:
        """Called on registration; being registered does not make a model ready."""

    def stop(self) -> None:
        """Called when the server begins to stop; requests that were taken are still answered."""

    def require(self) -> Scorer:
        """The model.

        Raises:
            NotReady: with the reason.
        """
        if self._scorer is None or not self.ready:
            raise NotReady(f"model {self.name!r} is not ready: {self._failure}; try again later")
        return self._scorer

    def get_input_types(self) -> list[dict[str, object]]:
        """Inputs as the protocol's model metadata lists them."""
        return self.require().contract.input_metadata()

    def get_output_types(self) -> list[dict[str, object]]:
        """Outputs as the protocol's model metadata lists them."""
        return self.require().contract.output_metadata()

    async def predict(
        self,
        payload: InferRequest,
        headers: Mapping[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> InferResponse:
        """Scores one request.

        Raises:
            NotReady: the model is not loaded.
            NotFound: another version of the model was asked for.
            InvalidInput: a tensor or a requested output breaks the contract.
            FailedPrecondition: the tensors were made for another spec or in another space.
            ResourceExhausted: too many candidates, or too many requests in flight.
        """
        scorer = self.require()
        if not isinstance(payload, InferRequest):
            raise InvalidInput(
                "send an Open Inference Protocol v2 request; v1 bodies are not served"
            )
        if payload.model_version and payload.model_version != scorer.version:
            raise NotFound(
                f"model {self.name!r} has version {scorer.version!r}, not {payload.model_version!r}; leave it empty"
            )
        scorer.contract.check_stamps(_stated(payload))
        batch = scorer.contract.decode(payload.inputs)
        # The span is the call's: gRPC's interceptor has opened it, or FastAPI.
        trace.get_current_span().set_attributes(
            {
                "gem.model": self.name,
                "gem.model_version": scorer.version,
                "gem.candidates": batch.num_candidates,
            }
        )
        scores = await self._score(scorer, batch)
        return _response(payload, self.name, scorer.version, scores)

    async def _score(self, scorer: Scorer, batch: FeatureBatch) -> Scores:
        if self._in_flight >= self._workplace.max_in_flight:
            raise ResourceExhausted(
                f"model {self.name!r} has {self._in_flight} requests in flight, the limit; back off and try again"
            )
        self._in_flight += 1
        try:
            loop = asyncio.get_running_loop()
            work = in_context(self._timed)
            return await loop.run_in_executor(self._workplace.pool, work, scorer, batch)
        finally:
            self._in_flight -= 1

    def _timed(self, scorer: Scorer, batch: FeatureBatch) -> Scores:
        metrics = self._workplace.metrics
        with span("vertical.score"), metrics.seconds.labels(self.name).time():
            scores = scorer.score(batch)
        metrics.candidates.labels(self.name).inc(batch.num_candidates)
        metrics.fallbacks.labels(self.name).inc(int(scores.fallback_N.sum()))
        return scores


def _stated(request: InferRequest) -> dict[str, str]:
    """Text parameters of a request, over either transport."""
    parameters = request.parameters or {}
    return {
        name: value if isinstance(value, str) else getattr(value, "string_param", "")
        for name, value in parameters.items()
    }


def _response(request: InferRequest, name: str, version: str, scores: Scores) -> InferResponse:
    tensors: dict[str, Array] = {
        f"{PROBABILITY_PREFIX}{objective}": np.ascontiguousarray(scores.probabilities_NK[:, k])
        for k, objective in enumerate(scores.objectives)
    }
    tensors[FALLBACK] = scores.fallback_N
    return InferResponse(
        response_id=request.id or "",
        model_name=name,
        model_version=version,
        infer_outputs=[
            _output(output, tensors[output], binary=request.use_binary_outputs)
            for output in _wanted(request, tensors)
        ],
        use_binary_outputs=request.use_binary_outputs,
        requested_outputs=request.request_outputs,
    )


def _wanted(request: InferRequest, tensors: Mapping[str, Array]) -> list[str]:
    names = [output.name for output in request.request_outputs or ()] or list(tensors)
    unknown = sorted(set(names) - set(tensors))
    if unknown:
        raise InvalidInput(
            f"output {unknown[0]!r} is not known; ask for {sorted(tensors)} or for none"
        )
    return names


def _output(name: str, array: Array, *, binary: bool) -> InferOutput:
    output = InferOutput(name=name, shape=list(array.shape), datatype=from_np_dtype(array.dtype))
    output.set_data_from_numpy(array, binary_data=binary)
    return output
