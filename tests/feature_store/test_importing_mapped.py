"""Imports of mapped files: every bad row is counted, kept and stops nothing, unless there are too many."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gem.schema.v1 import dataset_spec_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from feature_store.errors import InvalidInput, NotFound, TooManyRejects
from feature_store.ids import example_id, key_of
from feature_store.importing.mapped import import_mapped
from feature_store.importing.rows import Importer, ImportReport
from feature_store.spec import Spec, parse_yaml, problems_of
from feature_store.tables import Tables

SPEC = """
name: shop
surfaces: [{ name: feed }, { name: reels }]
objectives: [{ name: click, attribution_window_seconds: 60 }, { name: buy, attribution_window_seconds: 60, parent: click }]
entities: { user: { id_type: int64 }, ad: { id_type: string }, ad_group: { id_type: int64 } }
features:
  - { name: user, owner: user, id: { rows: 30 } }
  - { name: income, owner: user, dense: {} }
  - { name: ad, owner: ad, id: { rows: 30 } }
  - { name: ad_group, owner: ad, id: { rows: 30 } }
  - { name: born, owner: ad, dense: { age: true } }
  - { name: text, owner: ad, embedding: { dim: 2 } }
  - { name: hour, owner: request, id: { rows: 30, id_type: int64 } }
event_sources: [{ name: search, features: [ad], max_length: 5 }]
"""
IMPRESSIONS = """
tables:
  impressions:
    path: log*
    time_unit: ms
    columns: { user_id: who, ad_id: what, surface: where, event_ms: when, position: slot, hour: hour, outcome.click: clicked }
"""
GOOD: dict[str, Any] = {"user_id": 7, "ad_id": "a", "surface": "feed", "event_ms": 1_000}
CSV = "who,what,where,when,slot,hour,clicked\n"


def _spec(more: str = "") -> Spec:
    return Spec(parse_yaml(SPEC + more, pb.DatasetSpec, check=problems_of))


def _take(tmp_path: Path, table: str, *rows: Mapping[str, Any]) -> ImportReport:
    importer = Importer(Tables(tmp_path), _spec(), max_reject_share=1.0)
    importer.take(table, "source", rows)
    return importer.report


def _import(tmp_path: Path, text: str, more: str = IMPRESSIONS, *, share: float = 1.0) -> tuple[ImportReport, Tables]:
    (tmp_path / "log.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    tables = Tables(tmp_path / "tables")
    return import_mapped(tmp_path, tables, _spec(more), max_reject_share=share), tables


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"event_ms": None}, "missing_time"),
        ({"event_ms": "yesterday"}, "unparseable_time"),
        ({"event_ms": "1_000"}, "unparseable_time"),
        ({"event_ms": float("nan")}, "unparseable_time"),
        ({"event_ms": float("inf")}, "unparseable_time"),
        ({"event_ms": -1}, "negative_time"),
        ({"event_ms": 1_650_000_000_000_000}, "time_out_of_range"),
        ({"available_ms": 999}, "available_before_event"),
        ({"available_ms": "soon"}, "unparseable_time"),
        ({"user_id": None}, "missing_user_id"),
        ({"user_id": ""}, "missing_user_id"),
        ({"user_id": 7.0}, "bad_user_id"),
        ({"user_id": float("nan")}, "bad_user_id"),
        ({"user_id": "seven"}, "bad_user_id"),
        ({"user_id": 2**63}, "bad_user_id"),
        ({"user_id": "9" * 5_000}, "bad_user_id"),
        ({"user_id": -(2**63)}, "bad_user_id"),
        ({"ad_id": "a\ud800"}, "bad_ad_id"),
        ({"ad_id": 7.5}, "bad_ad_id"),
        ({"surface": "stories"}, "unknown_surface"),
        ({"surface": None}, "missing_surface"),
        ({"surface": float("nan")}, "missing_surface"),
        ({"request_id": "r\ud800"}, "bad_request_id"),
        ({"position": "first"}, "bad_position"),
        ({"position": -1}, "bad_position"),
        ({"position": 2**31}, "bad_position"),
        ({"position": 1.5}, "bad_position"),
        ({"hour": "noon"}, "bad_feature_hour"),
        ({"outcome.click": float("nan")}, "bad_outcome"),
        ({"outcome.click": "yes"}, "bad_outcome"),
        ({"outcome.click": 10**400}, "bad_outcome"),
        ({"malformed": "a,b"}, "malformed_row"),
    ],
)
def test_a_bad_impression_is_kept_with_its_reason_and_the_good_one_is_taken(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    bad = {**GOOD, **change}
    report = _take(tmp_path, "impressions", bad, GOOD)
    assert report.rejects == {reason: 1}
    assert report.rows == {"impressions": 1}
    (reject,) = Tables(tmp_path).read("rejects").to_pylist()
    assert (reject["source"], reject["row"], reject["reason"]) == ("source", 0, reason)
    kept = json.loads(reject["json"], parse_constant=pytest.fail)
    assert set(kept) == set(bad)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"born": "soon"}, "bad_feature_born"),
        ({"born": 1e300}, "bad_feature_born"),
        ({"born": float("inf")}, "bad_feature_born"),
        ({"text": [1.0]}, "bad_feature_text"),
        ({"text": [1.0, float("nan")]}, "bad_feature_text"),
        ({"text": "[1.0, 2.0]"}, "bad_feature_text"),
        ({"ad_group": 1.5}, "bad_feature_ad_group"),
        ({"ad_group": 2**64}, "bad_feature_ad_group"),
        ({"valid_from_ms": -1}, "negative_time"),
    ],
)
def test_a_bad_ad_is_kept_with_its_reason(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert _take(tmp_path, "catalogue", {"ad_id": "a", **change}, {"ad_id": "b", "text": [1, 2]}).rejects == {reason: 1}


def test_features_that_are_not_known_are_null(tmp_path: Path) -> None:
    report = _take(tmp_path, "catalogue", {"ad_id": "a", "ad_group": None, "born": float("nan")})
    assert not report.rejects
    (row,) = Tables(tmp_path).read("catalogue").to_pylist()
    assert (row["ad"], row["ad_group"], row["born"], row["text"]) == (key_of("a", pb.ID_TYPE_STRING), None, None, None)


def test_repeats_are_refused_within_an_import_and_across_imports(tmp_path: Path) -> None:
    event = {"source": "search", "user_id": 7, "ad_id": "a", "event_ms": 1_000, "event_id": "e1"}
    other = {**event, "event_id": "e2"}
    assert _take(tmp_path, "events", event, event, other).rejects == {"duplicate_event": 1}
    assert _take(tmp_path, "events", event).rejects == {"duplicate_event": 1}
    assert _take(tmp_path, "impressions", GOOD, GOOD).rejects == {"duplicate_impression": 1}
    assert _take(tmp_path, "users", {"user_id": 7}, {"user_id": 7}, {"user_id": 7, "valid_from_ms": 5}).rejects == {"duplicate_user": 1}
    assert _take(tmp_path, "users", {"user_id": 7}).rejects == {"duplicate_user": 1}
    assert Tables(tmp_path).read("events").num_rows == 2


def test_a_row_refused_for_another_reason_does_not_block_its_correction(tmp_path: Path) -> None:
    report = _take(tmp_path, "impressions", {**GOOD, "position": "first"}, GOOD)
    assert report.rejects == {"bad_position": 1}
    assert report.rows["impressions"] == 1


def test_an_outcome_needs_its_impression_from_this_import_or_an_earlier_one(tmp_path: Path) -> None:
    buy = {**GOOD, "objective": "buy", "occurred_ms": 5_000}
    assert _take(tmp_path, "outcomes", buy).rejects == {"outcome_without_impression": 1}
    _take(tmp_path, "impressions", GOOD)
    report = _take(tmp_path, "outcomes", buy, buy, {**buy, "objective": "sale"}, {**buy, "objective": "click", "occurred_ms": 999})
    assert report.rejects == {"duplicate_outcome": 1, "unknown_objective": 1, "outcome_before_impression": 1}
    assert _take(tmp_path, "outcomes", buy).rejects == {"duplicate_outcome": 1}
    (row,) = Tables(tmp_path).read("outcomes").to_pylist()
    assert row["example_id"] == Tables(tmp_path).read("impressions")["example_id"][0].as_py()
    assert (row["occurred_ms"], row["available_ms"], row["value"]) == (5_000, 5_000, 1.0)


def test_no_outcome_row_is_written_for_what_did_not_happen(tmp_path: Path) -> None:
    rows = [{**GOOD, "event_ms": n, "outcome.click": value} for n, value in enumerate([1, 0, None, 2.5])]
    assert _take(tmp_path, "impressions", *rows).rows == {"impressions": 4, "outcomes": 2}
    assert sorted(Tables(tmp_path).read("outcomes")["value"].to_pylist()) == [1.0, 2.5]


def test_an_event_of_an_unknown_source_is_refused(tmp_path: Path) -> None:
    assert _take(tmp_path, "events", {**GOOD, "source": "visits"}).rejects == {"unknown_source": 1}


COLUMNS = [
    *("user_id", "ad_id", "surface", "event_ms", "available_ms", "occurred_ms", "valid_from_ms", "request_id", "event_id"),
    *("impression_id", "position", "objective", "source", "value", "income", "born", "text", "hour", "outcome.click"),
]
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(max_size=9) | st.lists(st.floats())


@given(
    table=st.sampled_from(["impressions", "outcomes", "events", "catalogue", "users"]),
    rows=st.lists(
        st.dictionaries(
            st.sampled_from(COLUMNS),
            VALUES,
        ).map(lambda row: {**GOOD, "objective": "click", "source": "search", "occurred_ms": 2_000, **row}),
        min_size=1, max_size=4,
    ),
)  # fmt: skip
def test_no_row_whatever_stops_an_import_and_none_is_lost(
    table: str, rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    report = _take(tmp_path_factory.mktemp("any"), table, *rows)
    assert report.rows[table] + sum(report.rejects.values()) == report.seen == len(rows)


def test_too_many_rejects_refuse_the_whole_import_and_lie_where_the_message_says(tmp_path: Path) -> None:
    text = CSV + "7,a,feed,1000,0,5,1\n" * 2 + "x,a,feed,1000,0,5,1\n" + "".join(f"7,a,feed,{n},0,5,0\n" for n in range(47))
    words = r"log.csv: 4.0% of 50 rows .* more than the allowed 3.0% .*bad_user_id 1.*see (\S+)/rejects, fix the source"
    with pytest.raises(TooManyRejects, match=words) as refused:
        _import(tmp_path, text, share=0.03)
    (folder,) = re.findall(r"see (\S+)/rejects", str(refused.value))
    assert Tables(Path(folder)).read("rejects").num_rows == 2
    assert not any(Tables(tmp_path / "tables").exists(name) for name in ("impressions", "outcomes", "rejects"))
    report, tables = _import(tmp_path, text, share=0.04)
    assert (report.rows, tables.read("impressions").num_rows) == ({"impressions": 48, "outcomes": 1}, 48)
    assert tables.read("rejects").num_rows == 2


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share: float, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=f"max_reject_share is {share}; it must lie between 0 and 1"):
        _import(tmp_path, CSV, share=share)


def test_a_share_that_is_just_reached_is_allowed(tmp_path: Path) -> None:
    text = CSV + "x,a,feed,1000,0,5,1\n" + "".join(f"7,a,feed,{n},0,5,0\n" for n in range(49))
    report, _ = _import(tmp_path, text, share=0.02)
    assert report.reject_share == 0.02


def test_csv_cells_keep_every_digit_letter_and_gap(tmp_path: Path) -> None:
    text = CSV + '9007199254740993,"é, ""x""\n ",feed,1650000000001,,,\n-5, a,reels,1650000000002.0,3,9,1\n'
    report, tables = _import(tmp_path, "\ufeff" + text)
    assert not report.rejects
    rows = tables.read("impressions").sort_by("event_ms").to_pylist()
    assert [row["user_key"] for row in rows] == [2**53 + 1, -5]
    assert [row["ad_id"] for row in rows] == ['é, "x"\n ', " a"]
    assert [(row["position"], row["hour"], row["event_ms"]) for row in rows] == [(None, None, 1650000000001), (3, 9, 1650000000002)]
    assert rows[0]["example_id"] == example_id("9007199254740993:feed:1650000000001", rows[0]["ad_key"], "feed", 1650000000001)


def test_lines_that_no_reader_can_split_are_rejects_too(tmp_path: Path) -> None:
    report, tables = _import(tmp_path, CSV + "7,a,feed,1,0,5,1\n7,a,feed\n7,a,feed,2,0,5,1,9,9\n")
    assert report.rejects == {"malformed_row": 2}
    kept = [json.loads(text) for text in tables.read("rejects")["json"].to_pylist()]
    assert kept == [{"malformed": "7,a,feed"}, {"malformed": "7,a,feed,2,0,5,1,9,9"}]


def test_bytes_that_are_not_utf8_cost_their_row_only(tmp_path: Path) -> None:
    report, tables = _import(tmp_path, CSV + "7,caf\udce9,feed,1,0,5,1\n7,café,feed,2,0,5,1\n")
    assert report.rejects == {"bad_ad_id": 1}
    assert tables.read("impressions")["ad_id"].to_pylist() == ["café"]


@pytest.mark.parametrize(
    ("unit", "cell"),
    [("ms", "1650000000123"), ("s", "1650000000.123"), ("us", "1650000000123000"), ("iso", "2022-04-15T13:20:00.123+08:00"),
     ("iso", "2022-04-15T05:20:00.123")],
)  # fmt: skip
def test_times_are_read_in_their_unit(unit: str, cell: str, tmp_path: Path) -> None:
    _, tables = _import(tmp_path, f"{CSV}7,a,feed,{cell},0,5,1\n", IMPRESSIONS.replace("time_unit: ms", f"time_unit: {unit}"))
    assert tables.read("impressions")["event_ms"].to_pylist() == [1650000000123]


def test_parquet_times_and_ids_keep_their_types(tmp_path: Path) -> None:
    when = datetime(2022, 4, 15, 5, 20, 0, 123_000, tzinfo=UTC)
    rows = pa.table(
        {"who": [2**53 + 1], "what": [12], "where": ["feed"], "slot": [0], "hour": [1], "clicked": [True],
         "when": pa.array([when], pa.timestamp("us", "UTC"))}
    )  # fmt: skip
    pq.write_table(rows, tmp_path / "log.parquet")
    import_mapped(tmp_path, Tables(tmp_path / "tables"), _spec(IMPRESSIONS))
    (row,) = Tables(tmp_path / "tables").read("impressions").to_pylist()
    assert (row["user_key"], row["ad_id"], row["event_ms"]) == (2**53 + 1, "12", 1650000000123)
    assert row["ad_key"] == key_of("12", pb.ID_TYPE_STRING)


def test_constants_fill_columns_that_the_file_lacks(tmp_path: Path) -> None:
    more = IMPRESSIONS.replace("surface: where, ", "").replace("time_unit", "constants: { surface: reels }\n    time_unit")
    _, tables = _import(tmp_path, CSV + "7,a,feed,1,0,5,1\n", more)
    assert tables.read("impressions")["surface"].to_pylist() == ["reels"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("who,what\n1,2\n", r"lacks columns \['clicked'.*it has \['who', 'what'\]"),
        (CSV.replace("slot", "who") + "1,2,3,4,5,6,7\n", "lacks columns"),
        (CSV.replace("\n", ",who\n") + "1,2,3,4,5,6,7,8\n", r"has columns \['who'\] twice"),
        ("", "lacks columns"),
    ],
)
def test_a_file_without_the_mapped_columns_is_named(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=words):
        _import(tmp_path, text)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "log.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InvalidInput, match=r"log\.parquet cannot be read"):
        import_mapped(tmp_path, Tables(tmp_path / "tables"), _spec(IMPRESSIONS))
    (tmp_path / "log.parquet").rename(tmp_path / "log.xlsx")
    with pytest.raises(InvalidInput, match=r"neither \.parquet nor \.csv"):
        import_mapped(tmp_path, Tables(tmp_path / "tables"), _spec(IMPRESSIONS))


def test_a_map_that_matches_nothing_and_a_spec_that_maps_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="matches no file"):
        import_mapped(tmp_path, Tables(tmp_path), _spec(IMPRESSIONS))
    with pytest.raises(InvalidInput, match="maps none"):
        import_mapped(tmp_path, Tables(tmp_path), _spec())


def test_a_header_without_rows_imports_nothing(tmp_path: Path) -> None:
    report, tables = _import(tmp_path, CSV, share=0.0)
    assert (report.seen, tables.exists("impressions")) == (0, False)


def test_progress_is_told_and_batches_are_written_as_they_come(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    importer = Importer(Tables(tmp_path), _spec())
    rows = ({**GOOD, "event_ms": n} for n in range(70_000))
    importer.take("impressions", "log", rows, total=70_000, progress=lambda done, total: told.append((done, total)))
    assert told == [(65_536, 70_000), (70_000, 70_000)]
    assert Tables(tmp_path).version("impressions") == 1
