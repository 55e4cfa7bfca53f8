"""Puts the parts of the read server together.

Knows which parts there are. Does not know what they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from gem.solaris.v1 import solaris_service_pb2, solaris_service_pb2_grpc
from prometheus_client import CollectorRegistry

from feature_store.layout import Layout
from feature_store.online import open_store
from feature_store.spec import load_spec
from feature_store.streams import open_stream
from services.runtime.metrics import CallMetrics
from services.runtime.server import Service, serve
from services.solaris.aftermath import Aftermath
from services.solaris.groups import AdGroups
from services.solaris.keys import keys_of
from services.solaris.ledger import Ledger
from services.solaris.lifetimes import SPECULATION, Lifetimes
from services.solaris.reader import PairReader
from services.solaris.servicer import ReadPolicy, SolarisServicer
from services.solaris.settings import SolarisSettings

SERVICE = solaris_service_pb2.DESCRIPTOR.services_by_name["SolarisService"]


def run(settings: SolarisSettings) -> None:
    """Serves until SIGTERM or SIGINT; call it from the main thread."""
    with ExitStack() as resources:

        def build(registry: CollectorRegistry, _: CallMetrics) -> Sequence[Service]:
            servicer = build_servicer(settings, registry, resources)
            register = solaris_service_pb2_grpc.add_SolarisServiceServicer_to_server
            return [Service(SERVICE, register, servicer)]

        serve(settings.server, build)


def build_servicer(
    settings: SolarisSettings, registry: CollectorRegistry, resources: ExitStack
) -> SolarisServicer:
    """The service; what it opens is closed, and what it owes delivered, when `resources` close.

    A store that is away at the start is no reason to be: reads say that they are degraded until it is there.
    """
    spec = load_spec(settings.spec)
    lifetimes = Lifetimes().stretched(settings.lifetime_factor)
    store = resources.enter_context(open_store(settings.store))
    tasks = resources.enter_context(open_stream(settings.store, SPECULATION))
    ledger = Ledger(registry)
    aftermath = Aftermath(
        store, tasks, ledger, lifetimes, surfaces=spec.surfaces, instance=settings.instance
    )
    aftermath.start()
    resources.callback(aftermath.close)
    pool = resources.enter_context(ThreadPoolExecutor(settings.readers, "read"))
    return SolarisServicer(
        PairReader(store, lifetimes),
        AdGroups(store, Layout(spec)),
        tasks,
        aftermath,
        ledger,
        keys=keys_of(spec),
        surfaces=spec.surfaces,
        pool=pool,
        policy=ReadPolicy(read_seconds=settings.read_ms / 1000.0),
        limits=settings.server.limits,
    )
