"""Runs every benchmark that needs no data of its own: python -m benchmarks [--quick]."""

from __future__ import annotations

import subprocess
import sys

ALONE = ("candidates", "efficiency", "kernels", "precision", "serving")


def main() -> int:
    """Runs them one after another; returns the first status that is not 0."""
    for name in ALONE:
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
