"""Starts the model server of one or several verticals."""

from __future__ import annotations

import os

from services.runtime.logs import log_to_stderr
from services.runtime.settings import load
from services.vertical.settings import VerticalSettings


def main() -> None:
    """Serves until SIGTERM; exit status 1 if no model could be loaded."""
    settings = load(VerticalSettings, os.environ)
    log_to_stderr(settings.log_level)
    # After the settings, for the import takes seconds, and after the log, which torch would set up in its own way.
    from services.vertical.process import run

    run(settings)


if __name__ == "__main__":
    main()
