"""Tables: rows come back as they went in, evolve by columns, and what is lacking is named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from gem.schema.v1 import dataset_spec_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from feature_store.errors import FailedPrecondition, NotFound
from feature_store.spec import Spec, parse_yaml
from feature_store.tables import FIXED, OUTCOMES, Tables, between, schema

FEATURES = """
name: shop
features:
  - { name: hour, owner: request, id: { rows: 30 } }
  - { name: price, owner: ad, dense: {} }
  - { name: born, owner: ad, dense: { age: true } }
  - { name: text, owner: ad, embedding: { dim: 2 } }
  - { name: city, owner: user, id: { rows: 30 } }
"""
SPEC = Spec(parse_yaml(FEATURES, pb.DatasetSpec))


def _outcomes(*times: int) -> pa.Table:
    count = len(times)
    columns = [[b"\0" * 15 + bytes([n]) for n in range(count)], ["click"] * count, list(times), list(times), [1.0] * count]
    return pa.table([pa.array(column, field.type) for column, field in zip(columns, OUTCOMES, strict=True)], schema=OUTCOMES)


def test_a_table_has_the_features_of_its_owner_behind_its_own_columns() -> None:
    assert schema("impressions", SPEC).names == [*FIXED["impressions"].names, "hour"]
    assert schema("users", SPEC).names == [*FIXED["users"].names, "city"]
    catalogue = schema("catalogue", SPEC)
    assert catalogue.names[-3:] == ["price", "born", "text"]
    assert catalogue.types[-3:] == [pa.float64(), pa.int64(), pa.list_(pa.float32(), 2)]
    assert schema("outcomes", SPEC) == OUTCOMES


def test_rows_come_back_as_they_went_in(tmp_path: Path) -> None:
    tables, rows = Tables(tmp_path), _outcomes(1, 2**53 + 1, -5)
    tables.append("outcomes", rows.slice(0, 2))
    tables.append("outcomes", rows.slice(2))
    assert tables.read("outcomes").select(OUTCOMES.names).sort_by("example_id").to_pylist() == rows.to_pylist()


def test_vectors_text_and_gaps_survive(tmp_path: Path) -> None:
    columns = schema("catalogue", SPEC)
    row = {"ad_id": "é\0😀 ", "ad_key": -(2**63) + 1, "valid_from_ms": 0, "available_ms": 0, "price": None, "text": [0.5, -1.0]}
    Tables(tmp_path).append("catalogue", pa.Table.from_pylist([row], schema=columns))
    assert Tables(tmp_path).read("catalogue").to_pylist() == [{**row, "born": None}]


def test_a_stream_of_batches_is_one_transaction(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    batches = (batch for n in range(50) for batch in _outcomes(n).to_batches())
    tables.append("outcomes", pa.RecordBatchReader.from_batches(OUTCOMES, batches))
    assert tables.read("outcomes").num_rows == 50
    assert tables.version("outcomes") == 0


def test_a_stream_that_breaks_leaves_nothing(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    tables.append("outcomes", _outcomes(1))

    def broken() -> object:
        yield from _outcomes(2).to_batches()
        raise OSError("the source went away")

    with pytest.raises(Exception, match="the source went away"):  # deltalake wraps it
        tables.append("outcomes", pa.RecordBatchReader.from_batches(OUTCOMES, broken()))
    assert tables.read("outcomes")["occurred_ms"].to_pylist() == [1]


def test_overwriting_replaces_all_rows_and_their_columns(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    tables.append("outcomes", _outcomes(1, 2))
    tables.overwrite("outcomes", pa.table({"other": [7]}))
    assert tables.read("outcomes").to_pydict() == {"other": [7]}


def test_new_columns_join_and_older_rows_lack_them(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    tables.append("outcomes", _outcomes(1))
    tables.append("outcomes", _outcomes(2).append_column("channel", pa.array(["mail"])))
    tables.append("outcomes", _outcomes(3))
    rows = tables.read("outcomes", ["occurred_ms", "channel"]).sort_by("occurred_ms")
    assert rows.to_pydict() == {"occurred_ms": [1, 2, 3], "channel": [None, "mail", None]}


def test_a_column_that_is_needed_and_not_there_is_named(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    tables.append("outcomes", _outcomes(1))
    with pytest.raises(FailedPrecondition, match=r"table outcomes .* lacks columns \['weight'\]"):
        tables.read("outcomes", ["occurred_ms", "weight"])


def test_a_table_that_was_never_written_is_named(tmp_path: Path) -> None:
    tables = Tables(tmp_path / "none")
    assert not tables.exists("outcomes")
    with pytest.raises(NotFound, match="table outcomes does not exist"):
        tables.read("outcomes")


@given(times=st.lists(st.integers(-5, 5), min_size=1, max_size=9), low=st.none() | st.integers(-6, 6), high=st.none() | st.integers(-6, 6))
def test_a_time_filter_takes_its_first_and_not_its_last_millisecond(times: list[int], low: int | None, high: int | None) -> None:
    where = between("occurred_ms", low, high)
    rows = _outcomes(*times) if where is None else _outcomes(*times).filter(where)
    assert rows["occurred_ms"].to_pylist() == [t for t in times if (low is None or t >= low) and (high is None or t < high)]


def test_the_filter_is_applied_when_reading(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    tables.append("outcomes", _outcomes(1, 5, 9))
    assert tables.read("outcomes", ["occurred_ms"], between("occurred_ms", 5, 9)).to_pydict() == {"occurred_ms": [5]}
    assert tables.read("outcomes", where=between("occurred_ms", 50, None)).num_rows == 0
