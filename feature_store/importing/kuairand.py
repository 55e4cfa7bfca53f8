"""Imports KuaiRand-Pure, from its published CSV files or from Parquet files of the same columns.

Knows KuaiRand's files (Gao et al., CIKM 2022). Does not know what makes a row good.

Ad = video, ad group = author, campaign = first tag. A request is one user's impressions in one tab within 60 s of the
first. Users' features are one snapshot, valid from the beginning. The items watched before the log have no times of
their own: the last one is placed at `last_time_ms`, each earlier one a millisecond before, all of them before the log.
Columns that come after the outcome (play and stay times) are never read.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from feature_store.errors import NotFound
from feature_store.importing.rows import OUTCOME_PREFIX, Importer, ImportReport, Progress
from feature_store.spec import Spec
from feature_store.tables import Tables

REQUEST_GAP_MS = 60_000
SURFACES = {1: "tab_1", 0: "tab_0", 4: "tab_4", 2: "tab_2", 6: "tab_6"}
"""Tabs with surfaces of their own; the rest are `other`. Their meaning is undisclosed."""
OUTCOMES = {
    "click": "is_click",
    "long_view": "long_view",
    "like": "is_like",
    "profile_enter": "is_profile_enter",
    "follow": "is_follow",
    "comment": "is_comment",
    "forward": "is_forward",
}
_LOG = ("user_id", "video_id", "time_ms", "tab", *OUTCOMES.values())
_SEQUENCES = {"watch": "watch_seq", "long_watch": "long_watch_seq", "like": "like_seq"}


def import_kuairand(
    source: Path,
    tables: Tables,
    spec: Spec,
    *,
    max_reject_share: float = 0.01,
    outcome_delay_ms: int = 0,
    progress: Progress | None = None,
) -> ImportReport:
    """Imports every KuaiRand file below `source`; outcomes become known `outcome_delay_ms` after the impression.

    Raises:
        NotFound: the log or the video features are not there.
        TooManyRejects: more than the allowed share of rows was refused.
    """
    importer = Importer(tables, spec, max_reject_share=max_reject_share, outcome_delay_ms=outcome_delay_ms)
    log = pa.concat_tables([_read(path, _LOG) for path in _paths(source, "log_*", required=True)])
    log = log.sort_by([("time_ms", "ascending"), ("user_id", "ascending"), ("video_id", "ascending")])
    importer.take("catalogue", "video_features", _catalogue(source))
    importer.take("users", "user_features", _users(source))
    importer.take("events", "prehistory", _prehistory(source))
    importer.take("impressions", "log", _impressions(log), total=log.num_rows, progress=progress)
    return importer.report


def _paths(source: Path, pattern: str, *, required: bool = False) -> list[Path]:
    names = [name for ending in ("parquet", "csv") for name in glob.glob(str(source / f"{pattern}.{ending}"))]
    if required and not names:
        raise NotFound(f"{source / pattern}.parquet or .csv does not exist; give the folder that holds KuaiRand's files")
    return [Path(name) for name in sorted(names)]


def _read(path: Path, columns: tuple[str, ...] | None = None) -> pa.Table:
    if path.suffix == ".parquet":
        return pq.read_table(path, columns=list(columns) if columns else None).cast(_plain(pq.read_schema(path), columns))
    return pa_csv.read_csv(path, convert_options=pa_csv.ConvertOptions(include_columns=list(columns or ())))


def _plain(found: pa.Schema, columns: tuple[str, ...] | None) -> pa.Schema:
    """The same columns with integers of one width, so that files can be joined."""
    kept = [found.field(name) for name in columns] if columns else list(found)
    return pa.schema([pa.field(f.name, pa.int64() if pa.types.is_integer(f.type) else f.type) for f in kept])


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=65_536):
        yield from batch.to_pylist()


def _impressions(log: pa.Table) -> Iterator[dict[str, Any]]:
    """Rows in time order, named by the request they belong to, and a second's rows of one video only once."""
    requests: dict[tuple[int, str], tuple[int, str, int]] = {}
    for row in _rows(log):
        user, when = row["user_id"], row["time_ms"]
        surface = SURFACES.get(row["tab"], "other")
        began, name, position = requests.get((user, surface), (-REQUEST_GAP_MS - 1, "", 0))
        if when is not None and when - began > REQUEST_GAP_MS:
            began, name, position = when, f"{user}:{surface}:{when}", 0
        requests[(user, surface)] = (began, name, position + 1)
        yield {
            "user_id": user,
            "ad_id": row["video_id"],
            "surface": surface,
            "event_ms": when,
            "request_id": name,
            "position": position,
            **{OUTCOME_PREFIX + objective: row[column] for objective, column in OUTCOMES.items()},
            OUTCOME_PREFIX + "long_view_click": row["long_view"] and row["is_click"],
        }


def _catalogue(source: Path) -> Iterator[dict[str, Any]]:
    (path,) = _paths(source, "video_features_basic*", required=True)[:1]
    for row in _rows(_read(path)):
        upload = _upload_ms(row.get("upload_dt"))
        yield {
            "ad_id": row["video_id"],
            "valid_from_ms": 0,
            "ad_group": row.get("author_id"),
            "campaign": _first_tag(row.get("tag")),
            "video_type": row.get("video_type"),
            "upload_type": row.get("upload_type"),
            "music": row.get("music_id"),
            "music_type": None if row.get("music_type") is None else int(row["music_type"]),
            "age": upload,
            "duration": row.get("video_duration"),
            "width": row.get("server_width"),
            "height": row.get("server_height"),
        }


def _first_tag(tags: Any) -> int | None:
    first = str(tags).split(",")[0] if tags is not None else ""
    return int(float(first)) if first and first != "nan" else None


def _upload_ms(day: Any) -> int | None:
    if day is None:
        return None
    when = day if isinstance(day, date) else date.fromisoformat(str(day)[:10])
    return int(datetime(when.year, when.month, when.day, tzinfo=UTC).timestamp() * 1000)


def _users(source: Path) -> Iterator[dict[str, Any]]:
    histories = {row["user_id"]: row for path in _paths(source, "user_prehistory*") for row in _rows(_read(path))}
    for path in _paths(source, "user_features*"):
        for row in _rows(_read(path)):
            user = row.pop("user_id")
            made = {name: _category(value) for name, value in row.items()}
            yield {"user_id": user, "valid_from_ms": 0, **made, **_shares(histories.pop(user, None))}
    for user, history in histories.items():
        yield {"user_id": user, "valid_from_ms": 0, **_shares(history)}


def _category(value: Any) -> Any:
    """Codes that a table stored as floats because some were missing are integers again."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shares(history: dict[str, Any] | None) -> dict[str, Any]:
    if history is None:
        return {}
    length = max(1, len(history["watch_seq"] or ()))
    return {
        "history_len": history["history_len"],
        "history_like_share": len(history["like_seq"] or ()) / length,
        "history_long_share": len(history["long_watch_seq"] or ()) / length,
    }


def _prehistory(source: Path) -> Iterator[dict[str, Any]]:
    for path in _paths(source, "user_prehistory*"):
        for row in _rows(_read(path)):
            for name, column in _SEQUENCES.items():
                videos = row[column] or ()
                for back, video in enumerate(reversed(videos)):
                    yield {
                        "source": name,
                        "user_id": row["user_id"],
                        "ad_id": video,
                        "event_ms": row["last_time_ms"] - back,
                    }


def is_kuairand(source: Path) -> bool:
    """Whether a folder holds KuaiRand's files."""
    return bool(_paths(source, "log_*")) and bool(_paths(source, "video_features_basic*"))


def log_bounds(source: Path) -> tuple[int, int]:
    """First and last time of the log, milliseconds since the epoch."""
    times = [_read(path, ("time_ms",))["time_ms"] for path in _paths(source, "log_*", required=True)]
    bounds = [pc.min_max(column).as_py() for column in times]
    return min(bound["min"] for bound in bounds), max(bound["max"] for bound in bounds)
