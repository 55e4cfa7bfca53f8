"""Checks rows on their way into the tables; what is wrong goes to the reject table with its reason, and never stops it.

Knows what a good row is. Does not know where rows come from.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.errors import InvalidInput, TooManyRejects
from feature_store.ids import example_id, key_of
from feature_store.spec import Spec
from feature_store.tables import Tables, schema

Row = Mapping[str, Any]
Progress = Callable[[int, int], None]
OUTCOME_PREFIX = "outcome."
"""A column `outcome.click` of an impression holds that outcome's value; no outcome row is written for 0 or null."""
MAX_TIME_MS = 32_503_680_000_000
"""Year 3000: later times are a wrong unit."""
MALFORMED = "malformed"
"""The only column of a row that could not be split into columns; it holds the line."""
_BATCH_ROWS = 65_536
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}(\.0*)?")


class Reject(Exception):  # a verdict on a row, not an error of the program
    """A row that cannot be taken; `reason` is stable and counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class ImportReport:
    """What an import did."""

    rows: Counter[str] = field(default_factory=Counter)
    """Rows written a table."""
    rejects: Counter[str] = field(default_factory=Counter)
    """Rows refused a reason."""
    seen: int = 0

    @property
    def reject_share(self) -> float:
        """Refused rows of all rows seen."""
        return sum(self.rejects.values()) / self.seen if self.seen else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {"rows": dict(self.rows), "rejects": dict(self.rejects), "seen": self.seen, "reject_share": self.reject_share}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ImportReport:
        """The report whose `as_dict` this is."""
        return cls(Counter(values["rows"]), Counter(values["rejects"]), values["seen"])


class Importer:
    """Writes checked rows to the tables of one spec.

    Ids of rows seen, those of earlier imports included, are kept (about 100 bytes a row): a repeated row is refused, and
    an outcome finds the impression it belongs to in whichever import that came. Rows go into the tables `into`, if those
    are others.
    """

    def __init__(
        self,
        tables: Tables,
        spec: Spec,
        *,
        max_reject_share: float = 0.01,
        outcome_delay_ms: int = 0,
        into: Tables | None = None,
    ) -> None:
        if not 0 <= max_reject_share <= 1:
            raise InvalidInput(f"max_reject_share is {max_reject_share}; it must lie between 0 and 1")
        self._tables, self._spec = into or tables, spec
        self._max_reject_share, self._outcome_delay_ms = max_reject_share, outcome_delay_ms
        self._owned = {owner: spec.features(owner) for owner in (pb.OWNER_USER, pb.OWNER_AD, pb.OWNER_REQUEST)}
        self._seen = _stored(tables)
        self.report = ImportReport()

    def take(self, table: str, source: str, rows: Iterable[Row], *, total: int = 0, progress: Progress | None = None) -> None:
        """Checks and writes rows of one source, in batches.

        Raises:
            TooManyRejects: more than the allowed share was refused; what was good and the rejects are in the tables.
        """
        check = {
            "impressions": self._impression,
            "outcomes": self._outcome,
            "events": self._event,
            "catalogue": self._entity,
            "users": self._entity,
        }[table]
        seen, refused = self.report.seen, sum(self.report.rejects.values())
        for number, batch in _batches(rows):
            self._write(source, number, batch, lambda row: check(table, row))
            if progress:
                progress(min(number + len(batch), total or number + len(batch)), total or number + len(batch))
        self._judge(source, self.report.seen - seen, sum(self.report.rejects.values()) - refused)

    def _write(
        self, source: str, first: int, batch: list[Row], check: Callable[[Row], dict[str, list[dict[str, Any]]]]
    ) -> None:
        good: dict[str, list[dict[str, Any]]] = {}
        bad: list[dict[str, Any]] = []
        for offset, row in enumerate(batch):
            try:
                if MALFORMED in row:
                    raise Reject("malformed_row")
                for name, made in check(row).items():
                    good.setdefault(name, []).extend(made)
            except Reject as reject:
                bad.append({"source": source, "row": first + offset, "reason": reject.reason, "json": _json(row)})
                self.report.rejects[reject.reason] += 1
        self.report.seen += len(batch)
        for name, made in (*good.items(), ("rejects", bad)):
            if made:
                self._tables.append(name, _table(made, schema(name, self._spec)))
                if name != "rejects":
                    self.report.rows[name] += len(made)

    def _judge(self, source: str, seen: int, refused: int) -> None:
        if refused > self._max_reject_share * seen:
            top = ", ".join(f"{reason} {count}" for reason, count in self.report.rejects.most_common(3))
            raise TooManyRejects(
                f"{source}: {refused / seen:.1%} of {seen} rows were refused, more than the allowed "
                f"{self._max_reject_share:.1%} (most: {top}); see {self._tables.path('rejects')}, fix the source or raise the share"
            )

    def _impression(self, table: str, row: Row) -> dict[str, list[dict[str, Any]]]:
        user_key, ad_key = self._key(row, "user"), self._key(row, "ad")
        event_ms = _time(row.get("event_ms"))
        surface = _text(row, "surface")
        if surface not in self._spec.surfaces:
            raise Reject("unknown_surface")
        request_id = _id_text(row, "request_id") or f"{row['user_id']}:{surface}:{event_ms}"
        name = example_id(request_id, ad_key, surface, event_ms)
        if given := _id_text(row, "impression_id"):
            self._once(b"impression:" + given.encode(), "duplicate_impression")
        position = row.get("position")
        impression = {
            "example_id": name,
            "request_id": request_id,
            "user_id": str(row["user_id"]),
            "user_key": user_key,
            "ad_id": str(row["ad_id"]),
            "ad_key": ad_key,
            "surface": surface,
            "event_ms": event_ms,
            "available_ms": _available(row, event_ms),
            "position": None if position is None else _position(position),
            **self._features(row, pb.OWNER_REQUEST),
        }
        outcomes = list(self._wide_outcomes(row, name, event_ms))
        self._once(name, "duplicate_impression")
        return {"outcomes": outcomes, "impressions": [impression]}

    def _wide_outcomes(self, row: Row, name: bytes, event_ms: int) -> Iterator[dict[str, Any]]:
        for objective in self._spec.objectives:
            value = row.get(OUTCOME_PREFIX + objective)
            if value is None:
                continue
            number = _number(value, "bad_outcome")
            if number and name + objective.encode() not in self._seen:  # there if its impression's transaction was cut off
                when = event_ms
                yield _outcome_row(name, objective, when, when + self._outcome_delay_ms, number)

    def _outcome(self, table: str, row: Row) -> dict[str, list[dict[str, Any]]]:
        objective = _text(row, "objective")
        if objective not in self._spec.objectives:
            raise Reject("unknown_objective")
        event_ms = _time(row.get("event_ms"))
        request_id = _id_text(row, "request_id") or f"{row.get('user_id')}:{row.get('surface')}:{event_ms}"
        name = example_id(request_id, self._key(row, "ad"), _text(row, "surface"), event_ms)
        if name not in self._seen:
            raise Reject("outcome_without_impression")
        occurred = _time(row.get("occurred_ms"))
        if occurred < event_ms:
            raise Reject("outcome_before_impression")
        value, available = _number(row.get("value", 1.0), "bad_outcome"), _available(row, occurred)
        self._once(name + objective.encode(), "duplicate_outcome")
        return {"outcomes": [_outcome_row(name, objective, occurred, available, value)]}

    def _event(self, table: str, row: Row) -> dict[str, list[dict[str, Any]]]:
        source = _text(row, "source")
        if source not in self._spec.event_sources:
            raise Reject("unknown_source")
        user_key, event_ms = self._key(row, "user"), _time(row.get("event_ms"))
        ad_key = self._key(row, "ad")
        surface = row.get("surface") or None
        if surface is not None and surface not in self._spec.surfaces:
            raise Reject("unknown_surface")
        given = _id_text(row, "event_id") or f"{source}:{row['user_id']}:{row['ad_id']}:{event_ms}"
        name = example_id(given, user_key, source, event_ms)
        event = {
            "event_id": name,
            "source": source,
            "user_id": str(row["user_id"]),
            "user_key": user_key,
            "ad_key": ad_key,
            "surface": surface,
            "event_ms": event_ms,
            "available_ms": _available(row, event_ms),
        }
        self._once(name, "duplicate_event")
        return {"events": [event]}

    def _entity(self, table: str, row: Row) -> dict[str, list[dict[str, Any]]]:
        entity, owner = ("user", pb.OWNER_USER) if table == "users" else ("ad", pb.OWNER_AD)
        key = self._key(row, entity)
        valid_from = _time(row.get("valid_from_ms", 0))
        fixed = {
            f"{entity}_id": str(row[f"{entity}_id"]),
            f"{entity}_key": key,
            "valid_from_ms": valid_from,
            "available_ms": _available(row, valid_from),
        }
        own = {entity: row[f"{entity}_id"]}
        made = {**fixed, **self._features({**own, **row}, owner)}
        self._once(_version_name(table, key, valid_from), f"duplicate_{entity}")
        return {table: [made]}

    def _features(self, row: Row, owner: pb.Owner) -> dict[str, Any]:
        return {feature.name: self._value(feature, row.get(feature.name)) for feature in self._owned[owner]}

    def _value(self, feature: pb.Feature, value: Any) -> Any:
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return None
        reason = f"bad_feature_{feature.name}"
        if feature.HasField("id"):
            try:
                return key_of(_as_id(value, self._spec.id_type(feature.name)), self._spec.id_type(feature.name))
            except InvalidInput as error:
                raise Reject(reason) from error
        if feature.HasField("embedding"):
            return _vector(value, feature.embedding.dim, reason)
        number = _number(value, reason)
        if feature.dense.age and abs(number) > MAX_TIME_MS:
            raise Reject(reason)
        return int(number) if feature.dense.age else number

    def _key(self, row: Row, entity: str) -> int:
        value = row.get(f"{entity}_id")
        if value is None or value == "":
            raise Reject(f"missing_{entity}_id")
        try:
            return key_of(_as_id(value, self._spec.id_type(entity)), self._spec.id_type(entity))
        except InvalidInput as error:
            raise Reject(f"bad_{entity}_id") from error

    def _once(self, name: bytes, reason: str) -> None:
        if name in self._seen:
            raise Reject(reason)
        self._seen.add(name)


def _stored(tables: Tables) -> set[bytes]:
    """Names of the rows that earlier imports wrote."""
    names: set[bytes] = set()
    for table, column in (("impressions", "example_id"), ("events", "event_id")):
        if tables.exists(table):
            names.update(tables.read(table, [column])[column].to_pylist())
    if tables.exists("outcomes"):
        rows = tables.read("outcomes", ["example_id", "objective"]).to_pydict()
        names.update(name + of.encode() for name, of in zip(rows["example_id"], rows["objective"], strict=True))
    for table, key in (("users", "user_key"), ("catalogue", "ad_key")):
        if tables.exists(table):
            rows = tables.read(table, [key, "valid_from_ms"]).to_pydict()
            names.update(_version_name(table, *row) for row in zip(rows[key], rows["valid_from_ms"], strict=True))
    return names


def _version_name(table: str, key: int, valid_from_ms: int) -> bytes:
    return f"{table}:{key}:{valid_from_ms}".encode()


def _json(row: Row) -> str:
    """The row as JSON that every reader accepts: what JSON lacks is written as text."""
    finite = {name: str(value) if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
    return json.dumps(finite, default=str, ensure_ascii=True)


def _table(rows: list[dict[str, Any]], columns: pa.Schema) -> pa.Table:
    """Rows as a table; a column at a time is three times as fast as Arrow's own from_pylist."""
    return pa.table([pa.array([row.get(f.name) for row in rows], f.type) for f in columns], schema=columns)


def _batches(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    batch: list[Row] = []
    first = 0
    for row in rows:
        batch.append(row)
        if len(batch) == _BATCH_ROWS:
            yield first, batch
            first, batch = first + len(batch), []
    if batch:
        yield first, batch


def _as_id(value: Any, id_type: pb.IdType) -> object:
    """Sources write string ids as numbers at times; text of an integer is exact, a float is refused."""
    if id_type == pb.ID_TYPE_STRING and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


def _time(value: Any) -> int:
    if value is None or isinstance(value, bool):
        raise Reject("missing_time")
    try:
        when = int(_whole_text(value) if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError) as error:
        raise Reject("unparseable_time") from error
    if when < 0:
        raise Reject("negative_time")
    if when > MAX_TIME_MS:
        raise Reject("time_out_of_range")
    return when


def _whole_text(value: str) -> str:
    """Digits of a whole number; pandas writes those of a column with gaps as 7.0."""
    if not _WHOLE.fullmatch(value):
        raise ValueError(value)
    return value.split(".")[0]


def _available(row: Row, event_ms: int) -> int:
    available = _time(row["available_ms"]) if row.get("available_ms") is not None else event_ms
    if available < event_ms:
        raise Reject("available_before_event")
    return available


def _id_text(row: Row, name: str) -> str:
    """An id that is never a key, as text; empty if there is none."""
    value = row.get(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Reject(f"bad_{name}") from error
    return text


def _position(value: Any) -> int:
    number = _number(value, "bad_position")
    if not number.is_integer() or not 0 <= number < 2**31:
        raise Reject("bad_position")
    return int(number)


def _vector(value: Any, dim: int, reason: str) -> list[float]:
    if not isinstance(value, (list, tuple)) or len(value) != dim:
        raise Reject(reason)
    return [_number(part, reason) for part in value]


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise Reject(f"missing_{name}")
    return value


def _number(value: Any, reason: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise Reject(reason) from error
    if not math.isfinite(number):
        raise Reject(reason)
    return number


def _outcome_row(name: bytes, objective: str, occurred: int, available: int, value: float) -> dict[str, Any]:
    return {
        "example_id": name,
        "objective": objective,
        "occurred_ms": occurred,
        "available_ms": available,
        "value": value,
    }


