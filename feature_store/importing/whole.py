"""Imports the files of a folder as a whole: all rows are published or none, whenever the process is killed.

Knows files and reports. Does not know what the files hold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feature_store.importing.rows import Importer, ImportReport
from feature_store.importing.staging import write_whole
from feature_store.spec import Spec
from feature_store.tables import Tables

_SUFFIXES = (".csv", ".parquet")


def import_whole(
    source: Path,
    tables: Tables,
    spec: Spec,
    fill: Callable[[Importer], None],
    *,
    max_reject_share: float,
    outcome_delay_ms: int = 0,
) -> ImportReport:
    """Publishes what `fill` takes into an importer; an import of equal files that was killed is begun anew or carried through.

    Raises:
        TooManyRejects: nothing is published; the rejects lie aside, where the message says, until the next import.
    """

    def write(aside: Tables) -> dict[str, Any]:
        importer = Importer(
            tables, spec, max_reject_share=max_reject_share, outcome_delay_ms=outcome_delay_ms, into=aside
        )
        fill(importer)
        return importer.report.as_dict()

    rules = hashlib.sha256(spec.message.SerializeToString(deterministic=True)).hexdigest()
    name = [_files(source, tables.root.resolve()), rules, max_reject_share, outcome_delay_ms]
    return ImportReport.of(write_whole(tables, json.dumps(name), write))


def _files(source: Path, without: Path) -> list[tuple[str, int, int]]:
    """Path, size and time of change of every file: equal lists mean equal rows."""
    found = (path for path in source.resolve().rglob("*") if path.suffix in _SUFFIXES and without not in path.parents)
    return sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in found)
