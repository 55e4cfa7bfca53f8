"""Starts the sequence service: python -m services.sequence."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gem.sequence.v1 import sequence_service_pb2, sequence_service_pb2_grpc
from prometheus_client import CollectorRegistry

from feature_store.online import open_store
from feature_store.spec import load_spec
from services.runtime.metrics import CallMetrics
from services.runtime.server import Service, serve
from services.runtime.settings import load
from services.sequence.appender import Appender
from services.sequence.metrics import SequenceMetrics
from services.sequence.reader import StateReader
from services.sequence.servicer import SequenceServicer
from services.sequence.settings import SequenceSettings


def main() -> None:
    """Serves until SIGTERM."""
    settings = load(SequenceSettings, os.environ)
    spec, store = load_spec(settings.spec), open_store(settings.store)
    reader = StateReader(store, spec, memory_bytes=settings.memory_bytes)

    def build(registry: CollectorRegistry, _: CallMetrics) -> Sequence[Service]:
        metrics = SequenceMetrics(registry)
        servicer = SequenceServicer(reader, Appender(store, spec), spec, metrics=metrics, limits=settings.server.limits)
        descriptor = sequence_service_pb2.DESCRIPTOR.services_by_name["SequenceService"]
        return [Service(descriptor, sequence_service_pb2_grpc.add_SequenceServiceServicer_to_server, servicer)]

    serve(settings.server, build, warm=store.ping, close=store.close)


if __name__ == "__main__":
    main()
