"""Starts gemctl, the command line of the platform."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs one command and exits with its status: 0 done, 1 the platform refused, 2 wrong usage, 130 interrupted."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin on busy cores slow each other tenfold
    try:  # around the imports too, so that Ctrl-C ends them as it ends a command
        from services.cli.app import run

        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
