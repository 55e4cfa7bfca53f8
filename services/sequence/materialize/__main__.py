"""Fills the online store from the log tables: python -m services.sequence.materialize UNTIL_MS."""

from __future__ import annotations

import os
import sys

from feature_store.online import open_store
from feature_store.replay import Replay
from feature_store.spec import load_spec
from feature_store.tables import Tables
from services.runtime.settings import load
from services.sequence.materialize import materialize
from services.sequence.settings import MaterializeSettings


def main() -> None:
    """Writes every row and says how many there are."""
    settings = load(MaterializeSettings, os.environ)
    replay = Replay(load_spec(settings.spec), Tables(settings.tables))
    with open_store(settings.store, timeout_seconds=30.0) as store:
        counts = materialize(replay, store, until_ms=int(sys.argv[1]))
    sys.stdout.write(f"{counts}\n")


if __name__ == "__main__":
    main()
