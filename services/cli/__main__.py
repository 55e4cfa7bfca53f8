"""Starts gemctl, the command line of the platform."""

from __future__ import annotations

import os
import sys

from services.cli.app import run


def main() -> None:
    """Runs one command and exits with its status: 0 done, 1 the platform refused, 2 wrong usage."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin on busy cores slow each other tenfold
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
