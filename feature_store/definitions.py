"""A spec's user features as Feast objects: registered explicitly, joined as of an instant, read online with their states.

Knows Feast. Does not know candidates, histories or counters: those never pass through it.

What Feast leaves to its user is done here. Joined rows are put back by a row id of our own, and their number, order and
keys are compared with what went in; labels never enter. A value is used only if it had also been *created* by then. Staleness is judged by the event's
own time, online and offline by the same rule, for Feast does not enforce a view's TTL online. Nothing is scanned: a
folder named like one of our packages would make `feast apply` delete what it registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.errors import CorruptArtefact, InvalidInput, NotFound
from feature_store.online import open_store
from feature_store.spec import Spec
from feature_store.tables import Tables

if TYPE_CHECKING:
    from feast import FeatureStore

VIEW, PUSH, ENTITY, KEY = "users", "users_push", "user", "user_key"
_ROW, _AT, _VALID, _CREATED = "gem_row", "event_timestamp", "valid_from", "available"
_RESERVED = (_ROW, _AT, _VALID, _CREATED)
_UTC = pa.timestamp("us", tz="UTC")
_BATCH = 10_000
REGISTRY_SECONDS = 60
"""A process finds out within this time what another registered."""


class State(IntEnum):
    """What there is of one feature of one user."""

    PRESENT = 0
    NULL = 1
    """The user is known, the feature has no value."""
    STALE = 2
    """There is a value, older than allowed; it is given all the same."""
    ABSENT = 3
    """The user is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeastSettings:
    """Where Feast keeps its registry, its offline file and its online rows."""

    folder: Path
    """Registry and offline file."""
    store: str
    """Online store as `feature_store.online.open_store` takes it; Feast's rows in SQLite get a file of their own."""
    registry: str = ""
    """SQLAlchemy URL of the registry; empty for a SQLite file in the folder."""
    max_age_days: int = 30
    """Older values are stale, online and offline; whole days, as DuckDB's intervals want them."""

    def __post_init__(self) -> None:
        if self.max_age_days < 1:
            raise ValueError(f"max_age_days is {self.max_age_days}; it must be at least 1")

    @property
    def users_file(self) -> Path:
        """Versions of all users, as the offline store reads them."""
        return self.folder / "users.parquet"


class UserFeatures(NamedTuple):
    """Features of n users by name, in the order asked; a mask says where there is no value, so integers stay integers."""

    values: dict[str, pa.Array]
    states: dict[str, npt.NDArray[np.int8]]
    """`State` of each value."""

    def counts(self) -> dict[str, dict[str, int]]:
        """Feature → state → how many, for whoever watches coverage."""
        return {
            name: {state.name.lower(): int((states == state).sum()) for state in State}
            for name, states in self.states.items()
        }


def objects(spec: Spec, settings: FeastSettings) -> list[Any]:
    """The entity, the view and its push source: everything that is registered."""
    from feast import Entity, FeatureView, Field, FileSource, PushSource
    from feast.value_type import ValueType

    user = Entity(name=ENTITY, join_keys=[KEY], value_type=ValueType.INT64)
    versions = FileSource(
        name="users_file",
        path=str(settings.users_file.resolve()),
        timestamp_field=_VALID,
        created_timestamp_column=_CREATED,
    )
    view = FeatureView(
        name=VIEW,
        entities=[user],
        ttl=timedelta(days=settings.max_age_days),
        schema=[Field(name=f.name, dtype=_feast_type(f)) for f in _features(spec)],
        source=PushSource(name=PUSH, batch_source=versions),
        tags={"spec_hash": spec.hash.hex()},
    )
    return [user, view]


def open_feast(spec: Spec, settings: FeastSettings) -> FeatureStore:
    """Feast over the settings' stores; nothing is registered yet."""
    from feast import FeatureStore, RepoConfig

    settings.folder.mkdir(parents=True, exist_ok=True)
    registry = settings.registry or f"sqlite:///{settings.folder.resolve() / 'registry.sqlite'}"
    config = RepoConfig(
        project=spec.message.name,
        provider="local",
        registry={"registry_type": "sql", "path": registry, "cache_ttl_seconds": REGISTRY_SECONDS},
        online_store=_online(settings),
        offline_store={"type": "duckdb"},
        entity_key_serialization_version=3,
    )
    return FeatureStore(config=config)


def apply(store: FeatureStore, spec: Spec, tables: Tables, settings: FeastSettings) -> int:
    """Registers the objects, writes the offline file and the newest version of every user online; how many users.

    Raises:
        NotFound: there is no table of users.
    """
    versions = _versions(spec, tables)
    settings.users_file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(versions, settings.users_file)
    store.apply(objects(spec, settings))
    newest = _newest(versions)
    for first in range(0, newest.num_rows, _BATCH):
        store.push(PUSH, newest.slice(first, _BATCH).to_pandas(types_mapper=_nullable))
    return int(newest.num_rows)


def historical_user_features(store: FeatureStore, spec: Spec, rows: pa.Table) -> pa.Table:
    """The rows asked, in their order, with every user feature as it was known at each row's instant.

    Args:
        store: Feast, with the spec applied.
        spec: whose features are joined.
        rows: columns `user_key` int64 and `at_ms` int64, and any others (labels), which come back as they were: they never
            pass through the join. A value that became valid longer ago than the view's age is null, as online it is stale.

    Raises:
        InvalidInput: a key or an instant is null, or a column's name is taken.
        CorruptArtefact: the join lost, doubled or changed rows.
    """
    names = [feature.name for feature in _features(spec)]
    _check_rows(rows, names)
    if not rows.num_rows:
        empty = {f.name: pa.array([], _arrow_type(f)) for f in _features(spec)}
        return pa.table({**{name: rows[name] for name in rows.column_names}, **empty})
    asked = pa.table(
        {_ROW: pa.array(range(rows.num_rows), pa.int64()), KEY: rows[KEY], _AT: rows["at_ms"].cast(pa.timestamp("ms", tz="UTC"))}
    )
    job = store.get_historical_features(
        entity_df=asked.to_pandas(),
        features=[f"{VIEW}:{name}" for name in names],
        filter_by_created_timestamp=True,
    )
    joined = job.to_arrow().sort_by(_ROW)
    same = joined[_ROW].to_pylist() == list(range(rows.num_rows)) and joined[KEY].combine_chunks().equals(
        rows[KEY].combine_chunks()
    )
    if not same:
        raise CorruptArtefact(
            f"{rows.num_rows} rows went into the join and {joined.num_rows} came out, or others; do not train on them"
        )
    features = {f.name: joined[f.name].cast(_arrow_type(f)) for f in _features(spec)}
    return pa.table({**{name: rows[name] for name in rows.column_names}, **features})


def online_user_features(
    store: FeatureStore, spec: Spec, user_keys: Sequence[int], *, at_ms: int
) -> UserFeatures:
    """The newest features of users, each with its state at an instant.

    Raises:
        InvalidInput: a key is not an integer of 64 bits.
    """
    features = _features(spec)
    for key in user_keys:
        if isinstance(key, bool) or not isinstance(key, int) or not -(2**63) < key < 2**63:
            raise InvalidInput(f"user_key is {key!r}; it must be an integer of 64 bits")
    if not user_keys:
        none = np.zeros(0, dtype=np.int8)
        return UserFeatures({f.name: pa.array([], _arrow_type(f)) for f in features}, {f.name: none for f in features})
    answer = store.get_online_features(
        features=[f"{VIEW}:{feature.name}" for feature in features],
        entity_rows=[{KEY: key} for key in user_keys],
    ).proto
    columns = dict(zip(answer.metadata.feature_names.val, answer.results, strict=True))
    oldest = datetime.fromtimestamp(at_ms / 1000, UTC) - _max_age(store)
    values, states = {}, {}
    for feature in features:
        column = columns[feature.name]
        read = [_value(each) for each in column.values]
        values[feature.name] = pa.array(read, _arrow_type(feature))
        states[feature.name] = np.array(
            [_state(value, stamp, oldest) for value, stamp in zip(read, column.event_timestamps, strict=True)], np.int8
        )
    return UserFeatures(values, states)


def _state(value: object, stamp: Any, oldest: datetime) -> State:
    """Feast's own status says present of nulls and of values of any age; the row's time tells what is true."""
    if not stamp.seconds and not stamp.nanos:
        return State.ABSENT
    if value is None:
        return State.NULL
    return State.STALE if stamp.ToDatetime(tzinfo=UTC) < oldest else State.PRESENT


def _value(value: Any) -> object:
    kind = value.WhichOneof("val")
    if kind is None or kind == "null_val":
        return None
    found = getattr(value, kind)
    if kind.endswith("list_val"):
        return list(found.val)
    return None if isinstance(found, float) and np.isnan(found) else found


def _max_age(store: FeatureStore) -> timedelta:
    """The view's own, so that both sides follow one rule."""
    age = store.get_feature_view(VIEW).ttl
    assert age is not None, "the view was registered with one"
    return age


def _check_rows(rows: pa.Table, names: Sequence[str]) -> None:
    taken = {*rows.column_names} & {*names, *_RESERVED}
    if taken:
        raise InvalidInput(f"columns {sorted(taken)} are names of features or of the join; rename them")
    for name in (KEY, "at_ms"):
        if name not in rows.column_names or rows[name].type != pa.int64() or rows[name].null_count:
            raise InvalidInput(f"column {name!r} must be there as int64 without nulls")


def _versions(spec: Spec, tables: Tables) -> pa.Table:
    """All versions of all users; of two with the same times the last one written."""
    if not tables.exists("users"):
        raise NotFound(f"there is no table of users below {tables.root}; import data first")
    features = _features(spec)
    table = tables.read("users", columns=[KEY, "valid_from_ms", "available_ms", *(f.name for f in features)])
    return pa.table(
        {
            KEY: table[KEY],
            _VALID: table["valid_from_ms"].cast(pa.timestamp("ms", tz="UTC")).cast(_UTC),
            _CREATED: table["available_ms"].cast(pa.timestamp("ms", tz="UTC")).cast(_UTC),
            **{f.name: _without_nan(table[f.name]).cast(_arrow_type(f)) for f in features},
        }
    )


def _newest(versions: pa.Table) -> pa.Table:
    """The version of every user that is valid from the latest instant."""
    order = versions.sort_by([(KEY, "ascending"), (_VALID, "ascending"), (_CREATED, "ascending")])
    keys = order[KEY].to_numpy()
    last = np.flatnonzero(np.append(keys[1:] != keys[:-1], True)) if len(keys) else np.zeros(0, np.int64)
    return order.take(pa.array(last))


def _features(spec: Spec) -> list[pb.Feature]:
    """User features but the user's own key."""
    return [feature for feature in spec.features(pb.OWNER_USER) if feature.name != ENTITY]


def _arrow_type(feature: pb.Feature) -> pa.DataType:
    if feature.HasField("id") or feature.dense.age:
        return pa.int64()
    return pa.list_(pa.float32()) if feature.HasField("embedding") else pa.float64()


def _feast_type(feature: pb.Feature) -> Any:
    from feast.types import Array, Float32, Float64, Int64

    if feature.HasField("id") or feature.dense.age:
        return Int64
    return Array(Float32) if feature.HasField("embedding") else Float64


def _without_nan(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not pa.types.is_floating(column.type):
        return column
    return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)


def _nullable(kind: pa.DataType) -> Any:
    """Pandas' integers that can be missing: NumPy's would turn into floats and lose the low bits of keys."""
    import pandas as pd  # type: ignore[import-untyped]  # pandas ships no types

    return pd.Int64Dtype() if kind == pa.int64() else None


def _online(settings: FeastSettings) -> dict[str, object]:
    open_store(settings.store).close()
    scheme, _, rest = settings.store.partition("://")
    if scheme == "sqlite":
        return {"type": "sqlite", "path": str(settings.folder.resolve() / "feast_online.sqlite")}
    address, _, database = rest.partition("/")
    return {"type": "redis", "connection_string": f"{address},db={database or 0}" + (",ssl=true" if scheme == "rediss" else "")}
