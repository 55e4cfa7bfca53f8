"""Starts the model server of one or several verticals."""

from __future__ import annotations

import os

from services.runtime.settings import load
from services.vertical.settings import VerticalSettings


def main() -> None:
    """Serves until SIGTERM; exit status 1 if no model could be loaded."""
    settings = load(VerticalSettings, os.environ)
    from services.vertical.process import (
        run,  # torch and kserve take seconds: wrong settings are said first
    )

    run(settings)


if __name__ == "__main__":
    main()
