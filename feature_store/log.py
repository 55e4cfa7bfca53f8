"""Loads the log tables of a spec as sorted columns, ready for gathers.

Knows tables and their features. Does not know requests, counters or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from gem.schema.v1.dataset_spec_pb2 import OWNER_REQUEST

from feature_store.asof import NEVER, Segments
from feature_store.ids import ABSENT
from feature_store.layout import Column, Layout, total_width
from feature_store.spec import IMPRESSION, Spec
from feature_store.tables import Tables
from feature_store.versions import VersionIndex

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Entities:
    """Versioned rows of users or ads: id columns, dense columns, and the times that ages are counted from."""

    versions: VersionIndex
    ids: Ints
    dense: Floats
    births_ms: Ints
    """[n, dense] the stored time of an age column; ABSENT elsewhere."""
    entity_column: int | None
    """The id column that is the entity's own key."""

    def gather_ids(self, rows: Ints, keys: Ints) -> Ints:
        """[q, ids] of version rows; an unknown entity (-1) keeps its own key and has no other value."""
        out = self.ids[rows] if len(self.ids) else np.full((len(rows), self.ids.shape[1]), ABSENT)
        out[rows < 0] = ABSENT
        if self.entity_column is not None:
            out[:, self.entity_column] = keys
        return out

    def gather_dense(self, rows: Ints, at_ms: Ints) -> Floats:
        """[q, dense] of version rows, ages as days at each instant; NaN where unknown."""
        if not len(self.dense):
            return np.full((len(rows), self.dense.shape[1]), np.nan, dtype=np.float32)
        out = self.dense[rows]
        for column in np.flatnonzero((self.births_ms != ABSENT).any(axis=0)):
            births = self.births_ms[rows, column]
            days = (at_ms - births) / DAY_MS
            out[:, column] = np.where(births != ABSENT, days, np.nan)
        out[rows < 0] = np.nan
        return out


@dataclass(frozen=True, slots=True)
class Impressions:
    """Shown ads, sorted by (event_ms, example id)."""

    example_id: npt.NDArray[np.void]
    """[n] 16 bytes each (V16)."""
    request: Ints
    """[n] number of the request."""
    request_ids: npt.NDArray[np.object_]
    """[requests] their names."""
    user_key: Ints
    ad_key: Ints
    surface: npt.NDArray[np.int32]
    event_ms: Ints
    available_ms: Ints
    request_row: Ints
    """[n] row of `request_ids_features` and `request_dense`: n itself."""
    id_features: Ints
    """[n, request id features]"""
    dense_features: Floats
    """[n, request dense features]"""
    ad_ids: Ints
    """[n, A] of the ad's version at event time."""
    label_ms: Ints
    """[n, K] when the outcome became known; NEVER if it did not."""
    label_value: Floats
    """[n, K]"""

    def __len__(self) -> int:
        return len(self.event_ms)


@dataclass(frozen=True, slots=True)
class History:
    """Events of one source, sorted by (user, event_ms, event id)."""

    users: Ints
    """[S] sorted keys; segment s is of users[s]."""
    segments: Segments
    surface: npt.NDArray[np.int32]
    ids: Ints
    """[n, E]"""
    dense: Floats
    """[n, ED]"""
    impression: Ints
    """[n] row of the impression; -1 for other sources."""
    names: npt.NDArray[np.void]
    """[n] 16 bytes that name the event or impression."""
    place: Ints
    """[n] where the row stands among the rows of all sources by (event_ms, source priority, event id)."""


@dataclass(frozen=True, slots=True)
class Events:
    """Events of all other sources, sorted by (event_ms, event id)."""

    event_id: npt.NDArray[np.void]
    source: Ints
    user_key: Ints
    ad_key: Ints
    surface: npt.NDArray[np.int32]
    event_ms: Ints
    available_ms: Ints
    ad_ids: Ints


def load_entities(
    tables: Tables, name: str, entity: str, ids: tuple[Column, ...], dense: tuple[Column, ...]
) -> Entities:
    """Users or ads with their versions; an empty table if nothing was imported."""
    key = f"{entity}_key"
    own = [column.name for column in (*ids, *dense)]
    table = tables.read(name, columns=[key, "valid_from_ms", "available_ms", *own]) if tables.exists(name) else None
    if table is None:
        names = [key, "valid_from_ms", "available_ms", *own]
        table = pa.table({column: pa.array([], pa.int64()) for column in names})
    values, births = _dense(table, dense)
    columns = [column.name for column in ids]
    return Entities(
        versions=VersionIndex(ints(table, key), ints(table, "valid_from_ms"), ints(table, "available_ms")),
        ids=id_matrix(table, ids),
        dense=values,
        births_ms=births,
        entity_column=columns.index(entity) if entity in columns else None,
    )


def load_impressions(tables: Tables, spec: Spec, layout: Layout, ads: Entities) -> Impressions:
    """All impressions with their outcomes."""
    request_ids = tuple(c for c in layout.user_ids if c.feature is not None and c.feature in _request(spec))
    request_dense = tuple(c for c in layout.user_dense if c.feature is not None and c.feature in _request(spec))
    table = tables.read("impressions")
    event_ms, names = ints(table, "event_ms"), _digests(table, "example_id")
    order = np.lexsort((*_words(names)[::-1], event_ms))
    table, event_ms, names = table.take(pa.array(order)), event_ms[order], names[order]
    requests, number = np.unique(_strings(table, "request_id"), return_inverse=True)
    ad_key = ints(table, "ad_key")
    known, value = _labels(tables, spec, names, event_ms)
    return Impressions(
        example_id=names,
        request=number.astype(np.int64),
        request_ids=requests,
        user_key=ints(table, "user_key"),
        ad_key=ad_key,
        surface=_surfaces(table, spec),
        event_ms=event_ms,
        available_ms=ints(table, "available_ms"),
        request_row=np.arange(len(order)),
        id_features=id_matrix(table, request_ids),
        dense_features=_dense(table, request_dense)[0],
        ad_ids=ads.gather_ids(ads.versions.at(ad_key, event_ms), ad_key),
        label_ms=known,
        label_value=value,
    )


def load_events(tables: Tables, spec: Spec, ads: Entities) -> Events:
    """Events of all sources but impressions."""
    names = ["event_id", "source", "user_key", "ad_key", "surface", "event_ms", "available_ms"]
    if tables.exists("events"):
        table = tables.read("events", columns=names)
    else:
        table = pa.table({name: pa.array([], pa.null()) for name in names})
    event_ms, ids = ints(table, "event_ms"), _digests(table, "event_id")
    order = np.lexsort((*_words(ids)[::-1], event_ms))
    table = table.take(pa.array(order))
    ad_key = ints(table, "ad_key")
    return Events(
        event_id=ids[order],
        source=_indices(table, "source", spec.event_sources).astype(np.int64),
        user_key=ints(table, "user_key"),
        ad_key=ad_key,
        surface=_surfaces(table, spec),
        event_ms=event_ms[order],
        available_ms=ints(table, "available_ms"),
        ad_ids=ads.gather_ids(ads.versions.at(ad_key, event_ms[order]), ad_key),
    )


def histories_of(
    spec: Spec, layout: Layout, ads: Entities, impressions: Impressions, events: Events
) -> tuple[History, ...]:
    """Every source's events as users' histories, in spec order."""
    places = _places(spec, impressions, events)
    return tuple(
        _history(source, spec, layout, ads, impressions, events, places) for source in spec.event_sources
    )


def _places(spec: Spec, impressions: Impressions, events: Events) -> tuple[Ints, Ints]:
    """Where impressions and events stand in one order of both."""
    priority = np.array([source.priority for source in spec.message.event_sources] or [0], dtype=np.int64)
    shown = priority[spec.event_sources.index(IMPRESSION)] if IMPRESSION in spec.event_sources else 0
    ranks = np.concatenate([np.full(len(impressions), shown), priority[events.source]])
    high, low = _words(np.concatenate([impressions.example_id, events.event_id]))
    order = np.lexsort((low, high, ranks, np.concatenate([impressions.event_ms, events.event_ms])))
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    return places[: len(impressions)], places[len(impressions) :]


def _history(
    source: str,
    spec: Spec,
    layout: Layout,
    ads: Entities,
    impressions: Impressions,
    events: Events,
    places: tuple[Ints, Ints],
) -> History:
    """One source's events; columns that the source does not copy are absent."""
    if source == IMPRESSION:
        rows = np.arange(len(impressions))
        user, ad, when = impressions.user_key, impressions.ad_key, impressions.event_ms
        available, surface, request = impressions.available_ms, impressions.surface, impressions.request
        ids, impression, place = impressions.ad_ids, rows, places[0]
        names = impressions.example_id
    else:
        rows = np.flatnonzero(events.source == spec.event_sources.index(source))
        user, ad, when = events.user_key[rows], events.ad_key[rows], events.event_ms[rows]
        available, surface = events.available_ms[rows], events.surface[rows]
        request = impression = np.full(len(rows), -1, dtype=np.int64)
        ids, place, names = events.ad_ids[rows], places[1][rows], events.event_id[rows]
    order = np.lexsort((np.arange(len(rows)), when, user))
    users, start = np.unique(user[order], return_index=True)
    stop = np.append(start[1:], len(rows)).astype(np.int64)
    copied = set(next(s for s in spec.message.event_sources if s.name == source).features)
    dense = ads.gather_dense(ads.versions.at(ad[order], when[order]), when[order])
    return History(
        users=users,
        segments=Segments(start.astype(np.int64), stop, when[order], available[order], request[order]),
        surface=surface[order],
        ids=copied_ids(layout, ids[order], copied),
        dense=copied_dense(layout, dense, copied),
        impression=impression[order],
        names=names[order],
        place=place[order],
    )


def copied_ids(layout: Layout, ad_ids: Ints, copied: set[str]) -> Ints:
    """[n, E] event id columns from ads' ids [n, A]: those that the source copies, the others absent."""
    names = [column.name for column in layout.ad_ids]
    out = np.full((len(ad_ids), len(layout.event_ids)), ABSENT, dtype=np.int64)
    for at, column in enumerate(layout.event_ids):
        if column.name in copied:
            out[:, at] = ad_ids[:, names.index(column.name)]
    return out


def copied_dense(layout: Layout, ad_dense: Floats, copied: set[str]) -> Floats:
    """[n, ED] event dense columns from ads' dense values: those that the source copies, the others NaN."""
    out = np.full((len(ad_dense), total_width(layout.event_dense)), np.nan, dtype=np.float32)
    to = 0
    for column in layout.event_dense:
        start = 0
        for stored in layout.stored_ad_dense:
            if stored.name == column.name and column.name in copied:
                out[:, to : to + column.width] = ad_dense[:, start : start + column.width]
            start += stored.width
        to += column.width
    return out


def _request(spec: Spec) -> list[object]:
    return list(spec.features(OWNER_REQUEST))


def _labels(tables: Tables, spec: Spec, names: npt.NDArray[np.void], event_ms: Ints) -> tuple[Ints, Floats]:
    """When each outcome became known, and its value: the first that was positive and inside its attribution window."""
    known = np.full((len(names), len(spec.objectives)), NEVER, dtype=np.int64)
    value = np.zeros(known.shape, dtype=np.float32)
    if not tables.exists("outcomes") or not len(names):
        return known, value
    table = tables.read("outcomes", columns=["example_id", "objective", "occurred_ms", "available_ms", "value"])
    objective = _indices(table, "objective", spec.objectives)
    order = np.argsort(names)
    at = np.minimum(np.searchsorted(names[order], _digests(table, "example_id")), len(names) - 1)
    row = order[at]
    windows = np.array([o.attribution_window_seconds for o in spec.message.objectives]) * 1000
    inside = ints(table, "occurred_ms") - event_ms[row] <= windows[objective]
    available, amount = ints(table, "available_ms"), table["value"].to_numpy()
    own = names[row] == _digests(table, "example_id")
    good = np.flatnonzero(own & (objective >= 0) & inside & (amount > 0))
    good = good[np.argsort(-available[good], kind="stable")]  # of repeats the last one written stays: the first known
    known[row[good], objective[good]] = available[good]
    value[row[good], objective[good]] = amount[good]
    return known, value


def ints(table: pa.Table, name: str) -> Ints:
    """A column as int64; ABSENT where null."""
    column = table[name].cast(pa.int64()).fill_null(ABSENT)
    return np.asarray(column.to_numpy(), dtype=np.int64)


def id_matrix(table: pa.Table, columns: tuple[Column, ...]) -> Ints:
    """[n, columns] keys of id features; ABSENT where null."""
    out = np.empty((table.num_rows, len(columns)), dtype=np.int64)
    for at, column in enumerate(columns):
        out[:, at] = ints(table, column.name)
    return out


def _dense(table: pa.Table, columns: tuple[Column, ...]) -> tuple[Floats, Ints]:
    values = np.full((table.num_rows, total_width(columns)), np.nan, dtype=np.float32)
    births = np.full(values.shape, ABSENT, dtype=np.int64)
    at = 0
    for column in columns:
        if column.is_age:
            births[:, at] = ints(table, column.name)
        elif column.is_embedding:
            values[:, at : at + column.width] = _vectors(table[column.name], column.width)
        else:
            values[:, at] = table[column.name].cast(pa.float64()).to_numpy()
        at += column.width
    return values, births


def _vectors(column: pa.ChunkedArray, width: int) -> Floats:
    """[n, width]; NaN where null."""
    out = np.full((len(column), width), np.nan, dtype=np.float32)
    present = column.is_valid().to_numpy()
    if present.any():
        out[present] = pc.list_flatten(column.drop_null()).to_numpy().reshape(-1, width)
    return out


def _strings(table: pa.Table, name: str) -> npt.NDArray[np.object_]:
    return np.asarray(table[name].to_numpy(zero_copy_only=False), dtype=object)


def _digests(table: pa.Table, name: str) -> npt.NDArray[np.void]:
    joined = b"".join(value.as_py() for value in table[name]) if table.num_rows else b""
    return np.frombuffer(joined, dtype="V16")


def _words(digests: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """High and low half of 16-byte names, ordered as the bytes are."""
    halves = digests.view(">u8").reshape(-1, 2).astype(np.uint64)
    return halves[:, 0], halves[:, 1]


def _surfaces(table: pa.Table, spec: Spec) -> npt.NDArray[np.int32]:
    return _indices(table, "surface", spec.surfaces)


def _indices(table: pa.Table, name: str, known: tuple[str, ...]) -> npt.NDArray[np.int32]:
    numbers = {text: number for number, text in enumerate(known)}
    encoded = table[name].cast(pa.string()).combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    words = [numbers.get(word, -1) for word in encoded.dictionary.to_pylist()]
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return np.asarray(np.array([*words, -1], dtype=np.int32)[codes], dtype=np.int32)
