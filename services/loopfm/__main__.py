"""Annotates: `python -m services.loopfm --from MS --to MS`, or `--follow` for what is being served."""

from __future__ import annotations

import argparse
import os

from services.loopfm.settings import LoopFmSettings
from services.runtime.logs import log_to_stderr
from services.runtime.settings import load


def main() -> None:
    """Reads what is asked; settings come from the environment."""
    parser = argparse.ArgumentParser(prog="services.loopfm", description=__doc__)
    parser.add_argument("--follow", action="store_true", help="annotate served requests until SIGTERM")
    parser.add_argument("--from", dest="from_ms", type=int, help="first millisecond of a backfill")
    parser.add_argument("--to", dest="to_ms", type=int, help="end of a backfill, exclusive")
    given = parser.parse_args()
    if given.follow == (given.from_ms is not None and given.to_ms is not None):
        parser.error("give either --follow, or both --from and --to")
    settings = load(LoopFmSettings, os.environ)
    log_to_stderr(settings.log_level)  # before torch is imported, which would take the root logger
    from services.loopfm import process

    process.follow(settings) if given.follow else process.backfill(settings, given.from_ms, given.to_ms)


if __name__ == "__main__":
    main()
