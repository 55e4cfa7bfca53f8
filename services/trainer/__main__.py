"""Trains a foundation model: `python -m services.trainer PRESET --from MS --to MS`, or the same under torchrun."""

from __future__ import annotations

import argparse
import os

from services.runtime.logs import log_to_stderr
from services.runtime.settings import load
from services.trainer.settings import TrainerSettings


def main() -> None:
    """Reads what is asked; settings come from the environment."""
    parser = argparse.ArgumentParser(prog="services.trainer", description=__doc__)
    parser.add_argument("preset", help="a function that returns a configuration, such as model.gem.presets:tiny")
    parser.add_argument("--from", dest="from_ms", type=int, required=True, help="first millisecond trained on")
    parser.add_argument("--to", dest="to_ms", type=int, required=True, help="end of the stretch, exclusive")
    parser.add_argument("--valid-to", dest="valid_to_ms", type=int, default=0, help="end of what is then scored")
    parser.add_argument("--name", default="gem", help="name of the model")
    parser.add_argument("--version", required=True, help="version to publish; it never changes")
    given, settings = parser.parse_args(), load(TrainerSettings, os.environ)
    log_to_stderr(settings.log_level)
    from services.trainer import process

    raise SystemExit(process.main(settings, process.Asked(**vars(given))))


if __name__ == "__main__":
    main()
