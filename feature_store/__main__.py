"""Registers a spec's user features with Feast and fills its stores: python -m feature_store.

Reads GEM_SPEC, GEM_TABLES, GEM_STORE, GEM_FEAST (folder of registry and offline file) and, optionally, GEM_FEAST_REGISTRY
(SQLAlchemy URL). Registers explicit objects; no folder is scanned.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from feature_store import definitions
from feature_store.definitions import FeastSettings
from feature_store.spec import load_spec
from feature_store.tables import Tables

NEEDED = ("GEM_SPEC", "GEM_TABLES", "GEM_STORE", "GEM_FEAST")


def main() -> int:
    """Registers and fills; the exit status."""
    lacking = [name for name in NEEDED if not os.environ.get(name)]
    if lacking:
        sys.stderr.write(f"{', '.join(lacking)} must be set\n")
        return 2
    spec = load_spec(Path(os.environ["GEM_SPEC"]))
    settings = FeastSettings(
        folder=Path(os.environ["GEM_FEAST"]),
        store=os.environ["GEM_STORE"],
        registry=os.environ.get("GEM_FEAST_REGISTRY", ""),
    )
    store = definitions.open_feast(spec, settings)
    users = definitions.apply(store, spec, Tables(Path(os.environ["GEM_TABLES"])), settings)
    sys.stdout.write(f"registered {definitions.VIEW}: {users} users online\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
