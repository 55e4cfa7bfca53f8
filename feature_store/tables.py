"""The log tables: Delta Lake on a local disk or an object store.

Knows schemas, appends and time filters. Does not know what is read from them, nor by whom.

Tables evolve by adding columns: a reader ignores what it does not know and refuses what it needs and lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import TableNotFoundError
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.errors import FailedPrecondition, NotFound
from feature_store.spec import Spec

_STRING, _INT64, _DIGEST = pa.string(), pa.int64(), pa.binary()

IMPRESSIONS = pa.schema(
    [
        ("example_id", _DIGEST),
        ("request_id", _STRING),
        ("user_id", _STRING),
        ("user_key", _INT64),
        ("ad_id", _STRING),
        ("ad_key", _INT64),
        ("surface", _STRING),
        ("event_ms", _INT64),
        ("available_ms", _INT64),
        ("position", pa.int32()),
    ]
)
OUTCOMES = pa.schema(
    [
        ("example_id", _DIGEST),
        ("objective", _STRING),
        ("occurred_ms", _INT64),
        ("available_ms", _INT64),
        ("value", pa.float64()),
    ]
)
EVENTS = pa.schema(
    [
        ("event_id", _DIGEST),
        ("source", _STRING),
        ("user_id", _STRING),
        ("user_key", _INT64),
        ("ad_key", _INT64),
        ("surface", _STRING),
        ("event_ms", _INT64),
        ("available_ms", _INT64),
    ]
)
CATALOGUE = pa.schema(
    [("ad_id", _STRING), ("ad_key", _INT64), ("valid_from_ms", _INT64), ("available_ms", _INT64)]
)
USERS = pa.schema(
    [("user_id", _STRING), ("user_key", _INT64), ("valid_from_ms", _INT64), ("available_ms", _INT64)]
)
SERVED = pa.schema(
    [
        ("request_id", _STRING),
        ("arm", _STRING),
        ("surface", _STRING),
        ("event_ms", _INT64),
        ("served", _DIGEST),
    ]
)
ANNOTATIONS = pa.schema(
    [
        ("example_id", _DIGEST),
        ("request_id", _STRING),
        ("user_key", _INT64),
        ("ad_key", _INT64),
        ("ad_group_key", _INT64),
        ("surface", _STRING),
        ("event_ms", _INT64),
        ("model_version", _STRING),
        ("train_watermark_ms", _INT64),
        ("self_label_seen", pa.bool_()),
        ("space_id", _DIGEST),
        ("logits", pa.list_(pa.float32())),
        ("z_q", _DIGEST),
        ("forward_id", _DIGEST),
        ("row_in_forward", pa.int32()),
        ("produced_ms", _INT64),
        ("available_ms", _INT64),
    ]
)
PAIRS = pa.schema(
    [
        ("user_key", _INT64),
        ("ad_key", _INT64),
        ("ad_group_key", _INT64),
        ("space_id", _DIGEST),
        ("computed_ms", _INT64),
        ("available_ms", _INT64),
        ("q", _DIGEST),
        ("scale", pa.float32()),
        ("model_version", _STRING),
    ]
)
REJECTS = pa.schema(
    [("source", _STRING), ("row", _INT64), ("reason", _STRING), ("json", _STRING)]
)
FIXED = {
    "impressions": IMPRESSIONS,
    "outcomes": OUTCOMES,
    "events": EVENTS,
    "catalogue": CATALOGUE,
    "users": USERS,
    "served": SERVED,
    "annotations": ANNOTATIONS,
    "pairs": PAIRS,
    "rejects": REJECTS,
}
"""Columns that every spec's tables have."""
_OWNERS = {"catalogue": pb.OWNER_AD, "users": pb.OWNER_USER, "impressions": pb.OWNER_REQUEST}


def schema(name: str, spec: Spec) -> pa.Schema:
    """Columns of a table for a spec: the fixed ones, then one a feature of its owner (ids as keys)."""
    fields = list(FIXED[name])
    for feature in spec.features(_OWNERS[name]) if name in _OWNERS else []:
        fields.append(pa.field(feature.name, _feature_type(feature)))
    return pa.schema(fields)


def _feature_type(feature: pb.Feature) -> pa.DataType:
    if feature.HasField("id"):
        return _INT64
    if feature.HasField("embedding"):
        return pa.list_(pa.float32(), feature.embedding.dim)
    return _INT64 if feature.dense.age else pa.float64()


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables below one folder."""

    root: Path

    def path(self, name: str) -> Path:
        """Folder of a table."""
        return self.root / name

    def exists(self, name: str) -> bool:
        """Whether anything was ever written to a table."""
        return DeltaTable.is_deltatable(str(self.path(name)))

    def append(self, name: str, rows: pa.Table | pa.RecordBatchReader, *, key: str = "") -> None:
        """Adds rows in one transaction, which `holds` finds by its key; new columns are added, missing ones are null."""
        self._write(name, rows, "append", key)

    def holds(self, name: str, key: str) -> bool:
        """Whether a transaction of that key was written to a table."""
        return self.exists(name) and self._open(name).transaction_version(key) is not None

    def overwrite(self, name: str, rows: pa.Table | pa.RecordBatchReader) -> None:
        """Replaces all rows in one transaction."""
        self._write(name, rows, "overwrite")

    def read(
        self, name: str, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.Table:
        """Rows for which `where` holds (pushed down to the files), in no particular order.

        Raises:
            NotFound: nothing was written yet.
            FailedPrecondition: a needed column is missing.
        """
        dataset = self._dataset(name)
        lacking = [column for column in columns or () if column not in dataset.schema.names]
        if lacking:
            raise FailedPrecondition(
                f"table {name} at {self.path(name)} lacks columns {lacking}; it has {dataset.schema.names}; import it again"
            )
        return dataset.to_table(columns=list(columns) if columns else None, filter=where)

    def reader(self, name: str) -> pa.RecordBatchReader:
        """All rows, a few batches at a time."""
        return self._dataset(name).scanner(batch_readahead=1, fragment_readahead=1, use_threads=False).to_reader()

    def columns(self, name: str) -> list[str]:
        """Names of a table's columns."""
        return [field.name for field in self._open(name).schema().fields]

    def version(self, name: str) -> int:
        """Number of the newest transaction."""
        return int(self._open(name).version())

    def _open(self, name: str) -> DeltaTable:
        try:
            return DeltaTable(str(self.path(name)))
        except TableNotFoundError as error:
            raise NotFound(f"table {name} does not exist at {self.path(name)}; import data first") from error

    def _dataset(self, name: str) -> ds.Dataset:
        """The newest version's files as a dataset of Arrow's own readers.

        deltalake's dataset reads through Python callbacks on Arrow's threads, which abort a process that ends while one
        is winding down.
        """
        table = self._open(name)
        columns = pa.schema(table.schema().to_arrow())
        files = [str(uri).removeprefix("file://") for uri in table.file_uris()]
        return ds.dataset(files, schema=columns, format="parquet") if files else ds.dataset(columns.empty_table())

    def _write(
        self, name: str, rows: pa.Table | pa.RecordBatchReader, mode: Literal["append", "overwrite"], key: str = ""
    ) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        path = str(self.path(name))
        if mode == "append":
            named = CommitProperties(app_transactions=[Transaction(key, 1)]) if key else None
            write_deltalake(path, rows, mode="append", schema_mode="merge", commit_properties=named)
        else:
            write_deltalake(path, rows, mode="overwrite", schema_mode="overwrite")


def between(column: str, from_ms: int | None, to_ms: int | None) -> pc.Expression | None:
    """A filter for from_ms ≤ column < to_ms, for `Tables.read`."""
    low = ds.field(column) >= from_ms if from_ms is not None else None
    high = ds.field(column) < to_ms if to_ms is not None else None
    if low is not None and high is not None:
        return low & high
    return low if low is not None else high
