"""Asks an arm's vertical model for probabilities, and another arm's when it cannot answer.

Knows models by name and where they are. Does not know tensors, values or surfaces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
from gem.router.v1.route_table_pb2 import Arm

from feature_store.errors import FailedPrecondition, GemError, NotReady
from services.router import inference
from services.router.inference import Answer
from services.router.reading import Inputs
from services.runtime import client
from services.runtime.client import Method

log = logging.getLogger(__name__)


RETRY_AFTER_MS = 200
"""When a caller may try again: a model that was scaled to zero needs longer, a restarting one less."""


class VerticalUnavailable(NotReady):
    """No vertical model could answer for the surface."""

    reason = "VERTICAL_UNAVAILABLE"


class Scored(NamedTuple):
    """Which arm's model answered, from what, and what it said."""

    arm: Arm
    inputs: Inputs
    answer: Answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """Vertical models behind the Open Inference Protocol."""

    methods: Mapping[str, Method[Any, Any]]
    """Model → ModelInfer; "" for models that are not named."""

    def score(
        self, arm: Arm, inputs: Inputs, *, request_id: str, needed: Iterable[str], timeout: float
    ) -> Answer:
        """Probabilities from one arm's model.

        Raises:
            GemError: it cannot be reached, refused, was late, or lacks an objective that is needed.
        """
        method = self.methods.get(arm.model, self.methods.get(""))
        if method is None:
            raise NotReady(f"no address is known for model {arm.model!r}; add it to the verticals")
        request = inference.infer_request(arm.model, request_id=request_id, tensors=inputs.tensors)
        response = client.call(method, request, timeout=timeout)
        answer = inference.answer(response, num_candidates=len(inputs.levels))
        lacking = sorted(set(needed) - set(answer.probabilities))
        if lacking:
            raise FailedPrecondition(f"model {arm.model!r} has no output for {', '.join(lacking)}")
        return answer

    def score_first(
        self,
        choices: Iterable[tuple[Arm, Inputs]],
        *,
        request_id: str,
        needed: Iterable[str],
        timeout: Callable[[Arm], float],
    ) -> Scored:
        """The answer of the first arm that can give one.

        Raises:
            VerticalUnavailable: none can; naming the last one's reason.
        """
        failures: list[str] = []
        for arm, inputs in choices:
            try:
                answer = self.score(
                    arm, inputs, request_id=request_id, needed=needed, timeout=timeout(arm)
                )
                return Scored(arm, inputs, answer)
            except GemError as error:
                log.warning("model %s did not answer: %s", arm.model, error)
                failures.append(f"{arm.model}: {error.reason}")
        raise VerticalUnavailable(
            f"no vertical model answered ({'; '.join(failures)}); try again",
            tried="; ".join(failures),
        )


def connect_scorer(channels: Mapping[str, grpc.Channel]) -> Scorer:
    """A scorer over one channel a model; see `Scorer.methods`."""
    return Scorer(
        methods={model: inference.model_infer(channel) for model, channel in channels.items()}
    )
