"""Starts the read server of pair embeddings."""

from __future__ import annotations

import os

from services.runtime.settings import load
from services.solaris.process import run
from services.solaris.settings import SolarisSettings


def main() -> None:
    """Serves until SIGTERM."""
    run(load(SolarisSettings, os.environ))


if __name__ == "__main__":
    main()
