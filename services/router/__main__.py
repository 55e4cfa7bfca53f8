"""Runs the router: `python -m services.router`."""

from __future__ import annotations

import os
from contextlib import ExitStack

from services.router.assembly import build
from services.router.settings import RouterSettings
from services.runtime.server import serve
from services.runtime.settings import load


def main() -> None:
    """Serve until SIGTERM."""
    settings = load(RouterSettings, os.environ)
    with ExitStack() as resources:
        serve(
            settings.server,
            lambda registry, call_metrics: build(settings, registry, call_metrics, resources),
            close=resources.close,
        )


if __name__ == "__main__":
    main()
