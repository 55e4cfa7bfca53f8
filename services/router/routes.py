"""Holds the route table in use, and takes up a changed file without dropping a request.

Knows a file and the last good table in it. Does not know who is routed.

The file is looked at, not subscribed to: a ConfigMap changes by the swap of a symbolic link, which file events miss.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from gem.router.v1.route_table_pb2 import RouteTable, SurfaceRoutes

from feature_store.errors import InvalidInput, UnknownSurface
from feature_store.spec import Spec, parse_yaml
from services.router import policy
from services.router.metrics import RouterMetrics

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]


def load(path: Path, spec: Spec) -> RouteTable:
    """A checked route table.

    Raises:
        InvalidInput: the file cannot be read, has an unknown key, or could not be served.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"route table {path} cannot be read: {error}") from error
    return parse_yaml(
        text,
        RouteTable,
        name=path.name,
        check=lambda table: policy.problems_of(
            table, surfaces=spec.surfaces, objectives=spec.objectives
        ),
    )


class Routes:
    """The last good route table of a file."""

    def __init__(
        self, path: Path, spec: Spec, *, metrics: RouterMetrics, poll_seconds: float = 0.5
    ) -> None:
        """Load the table and begin to watch.

        Raises:
            InvalidInput: there is no good table to begin with.
        """
        self._path = path
        self._spec = spec
        self._metrics = metrics
        self._poll_seconds = poll_seconds
        self._stamp = _stamp(path)
        self._table = load(path, spec)
        metrics.route_version.set(self._table.version)
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="routes", daemon=True)
        self._watcher.start()

    @property
    def table(self) -> RouteTable:
        """The table in use; whoever holds it keeps it while another takes its place."""
        return self._table

    def of(self, table: RouteTable, surface: str) -> SurfaceRoutes:
        """Routes of a surface.

        Raises:
            UnknownSurface: naming those there are.
        """
        if surface not in table.surfaces:
            known = ", ".join(sorted(table.surfaces))
            raise UnknownSurface(
                f"surface {surface!r} is not routed; use one of: {known}",
                surface=surface,
                known=known,
            )
        return table.surfaces[surface]

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._closing.wait(self._poll_seconds):
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._reload()

    def _reload(self) -> None:
        try:
            table = load(self._path, self._spec)
        except InvalidInput as error:
            self._metrics.bad_routes.inc()
            log.error("keeping route table version %d: %s", self._table.version, error)
            return
        self._table = table
        self._metrics.route_version.set(table.version)
        log.info("route table version %d is in use", table.version)


def _stamp(path: Path) -> Stamp:
    """What changes whenever the file does; zeros while it is gone."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)
