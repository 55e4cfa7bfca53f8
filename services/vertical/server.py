"""A KServe model server whose readiness means something and whose stop drops nothing.

Knows the life of the process. Does not know what its models compute.

Where it differs from `kserve.ModelServer`, and why:
- models are registered before they are loaded, so that an early request hears UNAVAILABLE and not "does not exist";
- ready means every model has reproduced its golden request; KServe's server is always ready, and a request to a model that
  is not loads it on the event loop;
- a stop first says NOT_SERVING, then finishes what is in flight; KServe unregisters the models at once, under the requests
  that it has taken;
- models cannot be loaded or unloaded by whoever reaches the port: an artefact is immutable and the process serves it for life.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import fastapi
import uvicorn
from fastapi.responses import JSONResponse
from kserve import Model, ModelRepository, ModelServer
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.model_repository_extension import ModelRepositoryExtension
from kserve.protocol.rest.server import RESTServer
from opentelemetry.trace import TracerProvider

from feature_store.errors import FailedPrecondition, GemError, NotFound
from services.runtime.metrics import CallMetrics, split_address
from services.vertical.grpc_server import GrpcSettings, InferenceServer
from services.vertical.predictor import Vertical

log = logging.getLogger(__name__)

HTTP_STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "FAILED_PRECONDITION": HTTPStatus.PRECONDITION_FAILED,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "UNIMPLEMENTED": HTTPStatus.NOT_IMPLEMENTED,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class VerticalServerSettings:
    """Where the process listens and how it stops."""

    grpc: GrpcSettings
    http_listen: str = ""
    """host:port of the protocol over REST; empty for none."""
    drain_seconds: float = 1.0
    """Seconds between NOT_SERVING and the last accepted call."""
    max_threads: int = 4
    call_metrics: CallMetrics = field(kw_only=True)
    tracer_provider: TracerProvider | None = None


class VerticalServer(ModelServer):  # type: ignore[misc]  # kserve is untyped
    """Serves verticals until told to stop."""

    def __init__(self, settings: VerticalServerSettings) -> None:
        _quieten()
        super().__init__(
            registered_models=ModelRepository(),
            workers=1,
            max_threads=settings.max_threads,
            enable_latency_logging=False,
            grace_period=int(settings.grpc.grace_seconds),
        )
        self._settings = settings
        self.dataplane = ReadyDataPlane(model_registry=self.registered_models)
        self.model_repository_extension = FixedRepository(model_registry=self.registered_models)
        self._stopping = asyncio.Event()
        self._listening = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def port(self) -> int:
        """Port of gRPC, once listening."""
        return int(self._grpc_server.port) if self._grpc_server else 0

    def start(self, models: Sequence[Vertical]) -> None:
        """Serves until SIGTERM or SIGINT, from the main thread.

        Raises:
            GemError: no model could be loaded.
            OSError: an address is taken.
        """
        asyncio.run(self.serve(models, signals=True))

    def stop(self, sig: int = 0) -> None:
        """Begin to stop; safe from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    def wait_listening(self, seconds: float) -> bool:
        """Wait, from another thread, until requests can be sent; ready or not."""
        return self._listening.wait(seconds)

    async def serve(self, models: Sequence[Vertical], *, signals: bool = False) -> None:
        """The whole life of the server on the running loop.

        Raises:
            GemError: no model could be loaded.
            OSError: an address is taken.
        """
        self._loop = asyncio.get_running_loop()
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._stopping.set)
        for model in models:
            self.register_model(model)
        tasks = self._listen()
        try:
            await self._live(models, tasks)
        finally:
            await self._close(tasks)

    def _listen(self) -> list[asyncio.Task[None]]:
        settings = self._settings
        self._grpc_server = InferenceServer(
            self.dataplane,
            self.model_repository_extension,
            settings.grpc,
            call_metrics=settings.call_metrics,
            tracer_provider=settings.tracer_provider,
        )
        tasks = [asyncio.create_task(self._grpc_server.start(self.max_threads))]
        if settings.http_listen:
            host, port = split_address(settings.http_listen)
            self._rest_server = RestServer(
                self.dataplane, self.model_repository_extension, host=host, port=port
            )
            tasks.append(asyncio.create_task(self._rest_server.start()))
        return tasks

    async def _live(self, models: Sequence[Vertical], tasks: list[asyncio.Task[None]]) -> None:
        listening = asyncio.create_task(self._grpc_server.listening.wait())
        await asyncio.wait([listening, tasks[0]], return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            listening.cancel()
            tasks[0].result()
        self._listening.set()
        await self._load(models)
        await self._grpc_server.set_ready(await self.dataplane.ready())
        log.info("listening on port %d", self.port)
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    async def _load(self, models: Sequence[Vertical]) -> None:
        """Loads each model in a thread; one that is refused leaves the others serving, and the server not ready."""
        loads = [asyncio.to_thread(model.load) for model in models]
        outcomes = await asyncio.gather(*loads, return_exceptions=True)
        refusals = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for model, outcome in zip(models, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                log.error("model %s is not served: %s", model.name, outcome)
        if refusals and len(refusals) == len(models):
            raise refusals[0]

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        if self._grpc_server.listening.is_set():
            await self._grpc_server.set_ready(False)
            if self._stopping.is_set():
                await asyncio.sleep(self._settings.drain_seconds)
            await self._grpc_server.stop()
        if self._rest_server is not None:
            self._rest_server.stop()
        await asyncio.gather(*tasks, return_exceptions=True)


def _quieten() -> None:
    """Leaves the log to the process: KServe would write its own format, and a line for every request and probe."""
    kserve = logging.getLogger("kserve")
    if not kserve.handlers:
        kserve.addHandler(logging.NullHandler())
    for name in ("kserve", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)


class ReadyDataPlane(DataPlane):  # type: ignore[misc]  # kserve is untyped
    """Requests reach ready models only, and the server is ready when they all are."""

    async def ready(self) -> bool:
        """Whether there is a model and every one has proven itself."""
        models = list(self.model_registry.get_models().values())
        return bool(models) and all([await model.healthy() for model in models])

    async def get_model(self, name: str) -> Model:
        """The model.

        Raises:
            NotFound: there is none of this name.
            NotReady: it has not proven itself.
        """
        model = self.model_registry.get_model(name)
        if model is None:
            names = sorted(self.model_registry.get_models())
            raise NotFound(f"model {name!r} does not exist; this server has {names}")
        model.require()
        return model


class FixedRepository(ModelRepositoryExtension):  # type: ignore[misc]  # kserve is untyped
    """The repository as far as clients may change it: not at all."""

    async def load(self, model_name: str) -> None:
        """Refuse.

        Raises:
            FailedPrecondition: always.
        """
        raise FailedPrecondition(_FIXED)

    async def unload(self, model_name: str) -> None:
        """Refuse.

        Raises:
            FailedPrecondition: always.
        """
        raise FailedPrecondition(_FIXED)


_FIXED = "a server serves its artefacts for life; publish a version and start a server for it"


class RestServer(RESTServer):  # type: ignore[misc]  # kserve is untyped
    """The protocol over REST, on the address it was given, leaving signals to the process."""

    def __init__(
        self, data_plane: DataPlane, repository: ModelRepositoryExtension, *, host: str, port: int
    ) -> None:
        super().__init__("kserve.model_server:app", data_plane, repository, port)
        self.config.host = host
        self._server = _Uvicorn(self.config)

    def stop(self) -> None:
        """Finish what is in flight and return from `start`."""
        self._server.should_exit = True

    def _add_exception_handlers(self, app: fastapi.FastAPI) -> None:
        super()._add_exception_handlers(app)
        app.add_exception_handler(GemError, _refuse)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process stops both servers in order; uvicorn would stop its own first."""
        yield


async def _refuse(_: fastapi.Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GemError)
    status = HTTP_STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
    headers: dict[str, Any] = {"Retry-After": "1"} if status >= HTTPStatus.TOO_MANY_REQUESTS else {}
    body = {"error": str(error), "reason": error.reason}
    return JSONResponse(status_code=status, content=body, headers=headers)
