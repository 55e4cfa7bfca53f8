"""Imports KuaiRand-Pure, from its published CSV files or from Parquet files of the same columns.

Knows KuaiRand's files (Gao et al., CIKM 2022). Does not know what makes a row good.

Ad = video, ad group = author, campaign = first tag. A request is one user's impressions in one tab within 60 s of the
first. Users' features are one snapshot, valid from the beginning. The items watched before the log have no times of
their own: the last one is placed at `last_time_ms`, each earlier one a millisecond before, all of them before the log.
Columns that come after the outcome (play and stay times) are never read, and neither is `log_random_*`: its rows were
inserted at random, not ranked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from feature_store.errors import InvalidInput, NotFound
from feature_store.importing.files import as_text, batches, sortable, whole
from feature_store.importing.rows import MALFORMED, OUTCOME_PREFIX, Importer, ImportReport, Progress
from feature_store.importing.whole import import_whole
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
_RANDOM = "log_random"
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
        TooManyRejects: more than the allowed share of rows was refused; nothing is published.
    """

    def fill(importer: Importer) -> None:
        malformed: list[str] = []
        log = _log(source, malformed)
        importer.take("catalogue", "video_features", _catalogue(source))
        importer.take("users", "user_features", _users(source))
        importer.take("events", "prehistory", _prehistory(source))
        rows = chain(_impressions(log), ({MALFORMED: line} for line in malformed))
        importer.take("impressions", "log", rows, total=log.num_rows + len(malformed), progress=progress)

    return import_whole(
        source, tables, spec, fill, max_reject_share=max_reject_share, outcome_delay_ms=outcome_delay_ms
    )


def _paths(source: Path, pattern: str, *, required: bool = False) -> list[Path]:
    """Files of a pattern; of the CSV files only if there is no Parquet, which would hold the same rows."""
    for ending in ("parquet", "csv"):
        found = sorted(path for path in source.glob(f"{pattern}.{ending}") if not path.name.startswith(_RANDOM))
        if found:
            return found
    if required:
        raise NotFound(f"{source / pattern}.parquet or .csv does not exist; give the folder that holds KuaiRand's files")
    return []


def _log(source: Path, malformed: list[str]) -> pa.Table:
    """The log in time order, ties by user and video; rows whose time cannot be read come last."""
    parts = [
        batch
        for path in _paths(source, "log_*", required=True)
        for batch in batches(path, _LOG, malformed=malformed, as_text=True)
    ]
    log = pa.table({name: _integers(pa.chunked_array([as_text(part[name]) for part in parts], pa.string())) for name in _LOG})
    order = pa.table({name: sortable(log[name]) for name in ("time_ms", "user_id", "video_id")})
    return log.take(pc.sort_indices(order, [(name, "ascending") for name in order.column_names]))


def _integers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of whole numbers; one that holds anything else stays text, for the row check to refuse those cells."""
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        return column


def _read(path: Path) -> pa.Table:
    """A small file whole."""
    malformed: list[str] = []
    parts = list(batches(path, malformed=malformed))
    if malformed:
        raise InvalidInput(f"{path}: {len(malformed)} lines have too many or too few cells, as {malformed[0]!r}; correct them")
    return pa.Table.from_batches(parts) if parts else pq.read_schema(path).empty_table()


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=65_536):
        yield from batch.to_pylist()


def _impressions(log: pa.Table) -> Iterator[dict[str, Any]]:
    """Rows in time order, named by the request they belong to; repeats of (user, video, time) share a name."""
    requests: dict[tuple[object, str | None], tuple[int, str, int]] = {}
    for row in _rows(log):
        user, when, surface = row["user_id"], whole(row["time_ms"]), _surface(row["tab"])
        began, name, position = requests.get((user, surface), (-REQUEST_GAP_MS - 1, "", 0))
        if when is not None and when - began > REQUEST_GAP_MS:
            began, name, position = when, f"{user}:{surface}:{when}", 0
        requests[(user, surface)] = (began, name, position + 1)
        yield {
            "impression_id": f"{user}:{row['video_id']}:{when}",
            "user_id": user,
            "ad_id": row["video_id"],
            "surface": surface,
            "event_ms": row["time_ms"],
            "request_id": name,
            "position": position,
            **{OUTCOME_PREFIX + objective: row[column] for objective, column in OUTCOMES.items()},
            OUTCOME_PREFIX + "long_view_click": int(whole(row["long_view"]) == whole(row["is_click"]) == 1),
        }


def _surface(tab: object) -> str | None:
    """The tab's surface; nothing if the cell holds no tab, for the row check to refuse."""
    number = whole(tab)
    return None if number is None else SURFACES.get(number, "other")


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
            "music_type": _category(row.get("music_type")),
            "age": upload,
            "duration": row.get("video_duration"),
            "width": row.get("server_width"),
            "height": row.get("server_height"),
        }


def _first_tag(tags: object) -> object:
    first = str(tags).split(",")[0] if tags is not None else ""
    return _category(first) if first and first != "nan" else None


def _upload_ms(day: object) -> object:
    """Midnight UTC of a day; what is no day is left as it is, for the row check to refuse."""
    try:
        when = day if isinstance(day, date) else date.fromisoformat(str(day)[:10])
    except ValueError:
        return day
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
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}\.0+", value):
        return int(value.split(".")[0])
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
