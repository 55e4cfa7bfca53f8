"""Starts the model server of one or several verticals."""

from __future__ import annotations

import os

from services.runtime.settings import load
from services.vertical.process import run
from services.vertical.settings import VerticalSettings


def main() -> None:
    """Serves until SIGTERM; exit status 1 if no model could be loaded."""
    run(load(VerticalSettings, os.environ))


if __name__ == "__main__":
    main()
