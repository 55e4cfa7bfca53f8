"""The longest history that the platform allows, over a real socket and a real store, and one event more."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest
from gem.common.v1.event_pb2 import Event
from gem.sequence.v1 import sequence_service_pb2 as messages
from gem.sequence.v1 import sequence_service_pb2_grpc
from prometheus_client import CollectorRegistry

from feature_store.errors import InvalidInput
from feature_store.online import OnlineStore, open_store
from feature_store.spec import Spec, load_spec
from feature_store.wire import unpack_tensor
from services.runtime.limits import Limits
from services.runtime.metrics import CallMetrics
from services.runtime.server import ServerSettings, Service, running
from services.sequence.appender import Appender
from services.sequence.metrics import SequenceMetrics
from services.sequence.reader import StateReader
from services.sequence.servicer import SequenceServicer

WORLD = Path(__file__).resolve().parents[2] / "feature_store/datasets/world.yaml"
LONGEST = Limits().max_history_events
START_MS = 1_767_225_600_000


def spec_of(searches: int) -> Spec:
    """The world's spec with so many searches kept, and no impression but the newest."""
    message = load_spec(WORLD).message
    message.event_sources[0].max_length, message.event_sources[1].max_length = 1, searches
    return Spec(message)


def servicer_of(store: OnlineStore, spec: Spec) -> SequenceServicer:
    metrics = SequenceMetrics(CollectorRegistry())
    return SequenceServicer(StateReader(store, spec), Appender(store, spec), spec, metrics=metrics)


def searches(first: int, count: int) -> list[Event]:
    return [
        Event(
            event_id=f"{at:032x}", source="search", user_id="7", ad_id="3", event_ms=START_MS + at, available_ms=START_MS + at
        )
        for at in range(first, first + count)
    ]


def test_a_history_of_16384_events_is_appended_and_read_and_keeps_the_newest(tmp_path: Path) -> None:
    spec, kept = spec_of(LONGEST - 1), LONGEST - 1
    with open_store(f"sqlite:///{tmp_path / 'online.sqlite'}", timeout_seconds=5.0) as store:
        service = Service(
            messages.DESCRIPTOR.services_by_name["SequenceService"],
            sequence_service_pb2_grpc.add_SequenceServiceServicer_to_server,
            servicer_of(store, spec),
        )
        settings = ServerSettings(listen="127.0.0.1:0", drain_seconds=0.0)
        with (
            running([service], settings, call_metrics=CallMetrics(CollectorRegistry())) as live,
            grpc.insecure_channel(f"127.0.0.1:{live.port}") as channel,
        ):
            stub = sequence_service_pb2_grpc.SequenceServiceStub(channel)
            for first in (0, 9_000):
                stub.AppendEvents(messages.AppendEventsRequest(events=searches(first, 9_000)), timeout=20)
            request = messages.GetUserStateRequest(
                user_id="7", surface=spec.surfaces[0], as_of_ms=START_MS + 10**6, ad_ids=["3"]
            )
            answer = stub.GetUserState(request, timeout=20)
    times = unpack_tensor(answer.tensors["event_ms"])
    np.testing.assert_array_equal(times, START_MS + np.arange(18_000 - kept, 18_000))


def test_a_spec_whose_histories_are_longer_is_refused_at_the_start(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'online.sqlite'}", timeout_seconds=5.0) as store:
        servicer_of(store, spec_of(LONGEST - 1))
        with pytest.raises(InvalidInput, match="keep 16385 events of a user, the limit is 16384; lower their max_length"):
            servicer_of(store, spec_of(LONGEST))
