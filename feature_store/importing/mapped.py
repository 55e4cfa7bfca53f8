"""Imports Parquet and CSV files as the spec's table maps describe them, in bounded memory.

Knows files and column maps. Does not know what makes a row good.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.errors import InvalidInput, NotFound
from feature_store.importing.files import batches, text_of
from feature_store.importing.rows import MALFORMED, Importer, ImportReport, Progress
from feature_store.importing.whole import import_whole
from feature_store.spec import Spec
from feature_store.tables import Tables

ORDER = ("users", "catalogue", "impressions", "outcomes", "events")
"""Impressions before outcomes: an outcome must have its impression."""
_TIMES = ("event_ms", "available_ms", "occurred_ms", "valid_from_ms")
_TO_MS = {"": 1.0, "ms": 1.0, "s": 1000.0, "us": 0.001}


def import_mapped(
    source: Path, tables: Tables, spec: Spec, *, max_reject_share: float = 0.01, progress: Progress | None = None
) -> ImportReport:
    """Imports every table that the spec maps from files below `source`.

    Raises:
        NotFound: a mapped file is not there.
        InvalidInput: the spec maps no table, or a mapped column is not in its file.
        TooManyRejects: more than the allowed share of rows was refused; nothing is published.
    """
    maps = spec.message.tables
    unknown = sorted(set(maps) - set(ORDER))
    if not maps or unknown:
        raise InvalidInput(f"tables: the spec maps {sorted(maps) or 'none'}; map at least one of {list(ORDER)}, no others")

    def fill(importer: Importer) -> None:
        for name in ORDER:
            if name in maps:
                for path in _files(source, maps[name].path):
                    importer.take(name, path.name, _rows(path, maps[name]), progress=progress)

    return import_whole(source, tables, spec, fill, max_reject_share=max_reject_share)


def _files(source: Path, pattern: str) -> list[Path]:
    found = sorted(glob.glob(str(source / pattern)))
    if not found:
        raise NotFound(f"{source / pattern} matches no file; correct the table's path or the source folder")
    return [Path(name) for name in found]


def _rows(path: Path, table: pb.TableMap) -> Iterator[dict[str, Any]]:
    columns, constants = dict(table.columns), dict(table.constants)
    scale = _TO_MS.get(table.time_unit)
    if scale is None and table.time_unit != "iso":
        raise InvalidInput(f"time_unit {table.time_unit!r} must be ms, s, us or iso")
    malformed: list[str] = []
    for batch in batches(path, sorted(set(columns.values())), malformed=malformed, as_text=True):
        for row in batch.to_pylist():
            made = {**constants, **{ours: text_of(row[theirs]) for ours, theirs in columns.items()}}
            for name in _TIMES:
                if name in made:
                    made[name] = _milliseconds(made[name], scale)
            yield made
    yield from ({MALFORMED: line} for line in malformed)


def _milliseconds(value: Any, scale: float | None) -> Any:
    """Milliseconds of a time in its unit; what cannot be read is left as it is, for the row check to refuse."""
    if isinstance(value, datetime):
        zoned = value if value.tzinfo else value.replace(tzinfo=UTC)
        return round(zoned.timestamp() * 1000)
    try:
        if scale is None:
            return _milliseconds(datetime.fromisoformat(str(value)), None)
        return value if scale == 1.0 else round(float(value) * scale)
    except (TypeError, ValueError, OverflowError):
        return value
