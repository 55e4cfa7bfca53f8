"""Starts a worker that computes offered pairs: `python -m services.solaris.worker [--clock request]`."""

from __future__ import annotations

import argparse
import os

from services.runtime.logs import log_to_stderr
from services.runtime.settings import load
from services.solaris.settings import REQUEST, WALL, WorkerProcessSettings


def main() -> None:
    """Works until SIGTERM; what is on a command line stands above its variable."""
    parser = argparse.ArgumentParser(prog="services.solaris.worker", description=__doc__)
    parser.add_argument("--clock", choices=(WALL, REQUEST), help="whose time drives the worker")
    given = parser.parse_args()
    environ = {**os.environ, **({"GEM_CLOCK": given.clock} if given.clock else {})}
    settings = load(WorkerProcessSettings, environ)
    log_to_stderr(settings.log_level)
    # After the settings, for the import takes seconds, and after the log, which torch would set up in its own way.
    from services.solaris.worker.process import run

    run(settings)


if __name__ == "__main__":
    main()
