"""Reads Parquet and CSV files a batch at a time, and keeps the lines that no reader can split into columns.

Knows file formats. Does not know what the columns mean.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from feature_store.errors import InvalidInput

_NULLS = ("", "null", "NULL", "nan", "NaN")
_PARQUET_ROWS = 65_536
_WHOLE = r"^-?[0-9]{1,18}$"


def batches(
    path: Path, columns: Sequence[str] | None = None, *, malformed: list[str], as_text: bool = False
) -> Iterator[pa.RecordBatch]:
    """Batches of a file's rows, of all columns or the given ones; empty cells of a CSV are null.

    CSV lines with too many or too few cells are appended to `malformed` as they stand. With `as_text` every CSV cell is
    text, and bytes that are not UTF-8 arrive as lone surrogates; otherwise types are inferred from the first block.

    Raises:
        InvalidInput: it is neither Parquet nor CSV, lacks a column, has one twice, or is damaged.
    """
    found = header(path)
    wanted = list(columns) if columns is not None else found
    try:
        _check(path, found, wanted)
        if path.suffix == ".parquet":
            yield from pq.ParquetFile(path).iter_batches(_PARQUET_ROWS, columns=wanted)
        else:
            yield from _csv(path, wanted, malformed, as_text=as_text)
    except pa.ArrowInvalid as error:
        raise InvalidInput(f"{path} cannot be read: {error}; write the file again") from error


def header(path: Path) -> list[str]:
    """Names of a file's columns.

    Raises:
        InvalidInput: it is neither Parquet nor CSV, or is damaged.
    """
    if path.suffix not in (".parquet", ".csv"):
        raise InvalidInput(f"{path} is neither .parquet nor .csv; convert it")
    if path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
            return next(csv.reader(lines), [])
    try:
        return list(pq.read_schema(path).names)
    except pa.ArrowInvalid as error:
        raise InvalidInput(f"{path} cannot be read: {error}; write the file again") from error


def _check(path: Path, found: Sequence[str], wanted: Sequence[str]) -> None:
    lacking = sorted(set(wanted) - set(found))
    if lacking:
        raise InvalidInput(f"{path} lacks columns {lacking}; it has {list(found)}; correct the columns' names")
    twice = sorted({name for name in wanted if found.count(name) > 1})
    if twice:
        raise InvalidInput(f"{path} has columns {twice} twice; rename one of each")


def _csv(path: Path, wanted: list[str], malformed: list[str], *, as_text: bool) -> Iterator[pa.RecordBatch]:
    def keep(row: pa_csv.InvalidRow) -> str:
        malformed.append(str(row.text))
        return "skip"

    convert = pa_csv.ConvertOptions(
        include_columns=wanted,
        strings_can_be_null=True,
        null_values=_NULLS,
        column_types=dict.fromkeys(wanted, pa.binary()) if as_text else None,
    )
    parse = pa_csv.ParseOptions(newlines_in_values=True, invalid_row_handler=keep)
    for batch in pa_csv.open_csv(path, parse_options=parse, convert_options=convert):
        yield pa.record_batch([_text(column) for column in batch.columns], wanted) if as_text else batch


def _text(column: pa.Array) -> pa.Array:
    """Bytes as text; a column with other bytes stays as it is, for `text_of`."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return column


def text_of(value: object) -> object:
    """A cell as text if it is bytes; what is not UTF-8 becomes lone surrogates, which no id may hold."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def as_text(column: pa.Array) -> pa.Array:
    """Cells as a CSV has them."""
    if pa.types.is_binary(column.type):
        return pa.array([None if cell is None else ascii(text_of(cell)) for cell in column.to_pylist()], pa.string())
    return column.cast(pa.string())


def sortable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of text as whole numbers; null where a cell holds none. Columns of other types stay as they are."""
    if not pa.types.is_string(column.type):
        return column
    return pc.if_else(pc.match_substring_regex(column, _WHOLE), column, pa.scalar(None, pa.string())).cast(pa.int64())


def whole(cell: object) -> int | None:
    """The whole number in a cell; nothing if it holds none."""
    return int(str(cell)) if re.fullmatch(_WHOLE, str(cell)) else None
