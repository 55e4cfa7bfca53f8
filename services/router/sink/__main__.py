"""Runs the sink of served requests: `python -m services.router.sink`."""

from __future__ import annotations

import os
from contextlib import ExitStack

from services.router.sink.assembly import start
from services.router.sink.settings import SinkSettings
from services.runtime.server import serve
from services.runtime.settings import load


def main() -> None:
    """Drain until SIGTERM, then what is left."""
    settings = load(SinkSettings, os.environ)
    with ExitStack() as resources:
        serve(
            settings.server,
            lambda registry, _: start(settings, registry, resources),
            close=resources.close,
        )


if __name__ == "__main__":
    main()
