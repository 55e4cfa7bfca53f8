"""Imports trivago's sessions of the RecSys Challenge 2019, from the published CSV files or Parquet of the same columns.

Knows the challenge's files (Knees et al., RecSys 2019). Does not know what makes a row good.

A clickout shows a list of items with prices and says which one was clicked: each item becomes an impression. Position,
price and the price's rank differ inside a list, and features of a request are those of all its candidates; so each shown
item is a request of its own, read at its list's time. Every other step is an event. Steps of one user in one second get a
millisecond each, in the order of steps: what the user did before a list is before it, and the list itself is not. Among
users the order inside a second is unknown; milliseconds pretend one.

Ad group = the city that was searched when an item was first seen. Filters, sort orders and places that were searched are
no items: their ids say what they are (`filter:Hotel`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from feature_store.errors import InvalidInput, NotFound
from feature_store.importing.files import as_text, batches, header, sortable, whole
from feature_store.importing.rows import MALFORMED, OUTCOME_PREFIX, Importer, ImportReport, Progress
from feature_store.importing.whole import import_whole
from feature_store.spec import Spec
from feature_store.tables import Tables

CLICKOUT = "clickout item"
ITEM_SOURCES = {
    "interaction item image": "item_image",
    "interaction item info": "item_info",
    "interaction item rating": "item_rating",
    "interaction item deals": "item_deals",
    "search for item": "search_item",
}
"""Steps whose reference is an item."""
OTHER_SOURCES = {
    "search for destination": "search_destination",
    "search for poi": "search_poi",
    "filter selection": "filter",
    "change of sort order": "sort",
}
"""Steps whose reference is text."""
PLATFORMS = ("BR", "US", "DE", "AU", "AR", "MX", "UK", "IT", "JP", "IN")
"""Country sites with the most steps on 7 November 2018; the rest are `other`."""
_COLUMNS = (
    "user_id", "session_id", "timestamp", "step", "action_type", "reference",
    "platform", "city", "device", "current_filters", "impressions", "prices",
)  # fmt: skip
_SEPARATOR = "|"
_LAST_OF_SECOND = 999
Step = dict[str, Any]


def import_trivago(
    source: Path,
    tables: Tables,
    spec: Spec,
    *,
    max_reject_share: float = 0.01,
    outcome_delay_ms: int = 0,
    progress: Progress | None = None,
) -> ImportReport:
    """Imports every file of sessions in `source`; a click becomes known `outcome_delay_ms` after its list was shown.

    Raises:
        NotFound: there is no file of sessions.
        TooManyRejects: more than the allowed share of rows was refused; nothing is published.
    """

    def fill(importer: Importer) -> None:
        malformed: list[str] = []
        log = _log(source, malformed)
        importer.take("catalogue", "sessions", _catalogue(_steps(log)))
        importer.take("events", "steps", _events(_steps(log)))
        importer.take("events", "lines", ({MALFORMED: line} for line in malformed))
        importer.take("impressions", "clickouts", _shown(_steps(log)), total=_num_shown(log), progress=progress)

    return import_whole(
        source, tables, spec, fill, max_reject_share=max_reject_share, outcome_delay_ms=outcome_delay_ms
    )


def is_trivago(source: Path) -> bool:
    """Whether a folder holds trivago's sessions."""
    return bool(_paths(source))


def _paths(source: Path) -> list[Path]:
    """Files with the sessions' columns; of the CSV files only if there is no Parquet, which would hold the same rows."""
    for ending in ("parquet", "csv"):
        found = [path for path in sorted(source.glob(f"*.{ending}")) if _has_sessions(path)]
        if found:
            return found
    return []


def _has_sessions(path: Path) -> bool:
    try:
        return set(_COLUMNS) <= set(header(path))
    except InvalidInput:
        return False


def _log(source: Path, malformed: list[str]) -> pa.Table:
    """Steps in the order of time, user, session and step; rows whose time cannot be read come last."""
    paths = _paths(source)
    if not paths:
        raise NotFound(f"{source} has no .parquet or .csv with the columns {list(_COLUMNS)}; give the folder of the sessions")
    parts = [part for path in paths for part in batches(path, _COLUMNS, malformed=malformed, as_text=True)]
    log = pa.table({name: pa.chunked_array([as_text(part[name]) for part in parts], pa.string()) for name in _COLUMNS})
    order = pa.table(
        [sortable(log["timestamp"]), log["user_id"], log["session_id"], sortable(log["step"])],
        names=["timestamp", "user_id", "session_id", "step"],
    )
    return log.take(pc.sort_indices(order, [(name, "ascending") for name in order.column_names]))


def _steps(log: pa.Table) -> Iterator[Step]:
    """Rows with their `event_ms`; a cell that holds no time stays as it is, for the row check to refuse."""
    before: Step = {}
    place = 0
    for batch in log.to_batches(max_chunksize=65_536):
        for step in batch.to_pylist():
            same = all(step[name] == before.get(name) for name in ("timestamp", "user_id"))
            again = same and all(step[name] == before[name] for name in _COLUMNS)  # a repeat is the same step
            place = place + (not again) if same else 0
            seconds, before = whole(step["timestamp"]), dict(step)
            step["event_ms"] = step["timestamp"] if seconds is None else 1000 * seconds + min(place, _LAST_OF_SECOND)
            yield step


def _catalogue(steps: Iterator[Step]) -> Iterator[dict[str, Any]]:
    """Items when they are first seen, in a list or by a step of their own."""
    seen: set[str] = set()
    for step in steps:
        own = step["action_type"] in (CLICKOUT, *ITEM_SOURCES) and whole(step["timestamp"]) is not None
        for item in [_item(step["reference"]), *_cells(step["impressions"])] if own else ():
            if item and item not in seen:
                seen.add(item)
                yield {"ad_id": item, "valid_from_ms": step["event_ms"], "ad_group": step["city"]}


def _events(steps: Iterator[Step]) -> Iterator[dict[str, Any]]:
    """Every step but clickouts; one of an unknown kind keeps its name, for the row check to refuse."""
    for step in steps:
        action, reference = step["action_type"], step["reference"]
        if action == CLICKOUT:
            continue
        source = ITEM_SOURCES.get(action) or OTHER_SOURCES.get(action) or action
        item = _item(reference) if action in ITEM_SOURCES else f"{source}:{reference}" if reference else None
        yield {
            "source": source,
            "event_id": _name(step),
            "user_id": step["user_id"],
            "ad_id": item,
            "surface": step["device"],
            "event_ms": step["event_ms"],
            "reference": reference,
        }


def _shown(steps: Iterator[Step]) -> Iterator[dict[str, Any]]:
    """An impression an item of each clickout's list; a list without a price each is no list."""
    for step in steps:
        if step["action_type"] != CLICKOUT:
            continue
        items, prices = _cells(step["impressions"]), _cells(step["prices"])
        if not items or len(items) != len(prices):
            yield {MALFORMED: _SEPARATOR.join(f"{step[name]}" for name in _COLUMNS)}
            continue
        yield from _impressions(step, items, prices)


def _impressions(step: Step, items: list[str], prices: list[str]) -> Iterator[dict[str, Any]]:
    cheapest = sorted((price for price in prices if whole(price) is not None), key=int)
    ranks = {price: rank for rank, price in reversed(list(enumerate(cheapest)))}
    shared = {
        "user_id": step["user_id"],
        "surface": step["device"],
        "event_ms": step["event_ms"],
        "platform": _platform(step["platform"]),
        "city": step["city"],
        "list_length": len(items),
        "active_filters": len(_cells(step["current_filters"])),
    }
    for position, (item, price) in enumerate(zip(items, prices, strict=True)):
        name = f"{_name(step)}:{position}"
        yield {
            **shared,
            "impression_id": name,
            "request_id": name,
            "ad_id": item,
            "position": position,
            "list_position": position,
            "price": price,
            "price_rank": ranks.get(price),
            OUTCOME_PREFIX + "click": int(item == step["reference"]),
        }


def _num_shown(log: pa.Table) -> int:
    """Rows that `_shown` makes of well formed lists."""
    lists = log.filter(pc.equal(log["action_type"], CLICKOUT))["impressions"].drop_null()
    return len(lists) + int(pc.sum(pc.count_substring(lists, _SEPARATOR)).as_py() or 0)


def _name(step: Step) -> str:
    """A step's name: numbers of steps occur twice in some sessions."""
    return ":".join(str(step[name]) for name in ("user_id", "session_id", "step", "event_ms"))


def _cells(joined: str | None) -> list[str]:
    return joined.split(_SEPARATOR) if joined else []


def _item(reference: str | None) -> str | None:
    """An item's id; nothing if the reference holds none, as `unknown`."""
    return reference if whole(reference) is not None else None


def _platform(site: str | None) -> str | None:
    return site if site in PLATFORMS or not site else "other"
