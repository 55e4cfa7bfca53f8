"""trivago: sessions become lists of impressions with position and price, and events; a list never knows its own click."""

from __future__ import annotations

import csv
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.batch import FeatureBatch
from feature_store.errors import NotFound
from feature_store.ids import key_of
from feature_store.importing.trivago import PLATFORMS, import_trivago, is_trivago
from feature_store.layout import column_index
from feature_store.replay import Replay
from feature_store.spec import load_spec
from feature_store.tables import Tables

ROOT = Path(__file__).parents[2]
SPEC = load_spec(ROOT / "feature_store" / "datasets" / "trivago.yaml")
REAL = Path(os.environ.get("GEM_DATA", ROOT / "../shared/data")) / "trivago"
COLUMNS = "user_id,session_id,timestamp,step,action_type,reference,platform,city,device,current_filters,impressions,prices"
START = 1_541_600_000
TABLES = ("impressions", "outcomes", "events", "catalogue")
Cells = list[object]
needs_trivago = pytest.mark.skipif(not REAL.is_dir(), reason=f"trivago is not at {REAL}; set GEM_DATA")


def _step(
    action: object, reference: object, *, at: object = START, step: object = 1, user: object = "U", platform: object = "DE",
    city: object = "Berlin, Germany", device: object = "mobile", filters: object = "", items: object = "", prices: object = "",
) -> Cells:  # fmt: skip
    return [user, f"S{user}", at, step, action, reference, platform, city, device, filters, items, prices]


def _list(reference: object, items: str = "10|11|12", prices: str = "90|50|90", **cells: object) -> Cells:
    return _step("clickout item", reference, items=items, prices=prices, **cells)


def _write(folder: Path, *rows: Cells) -> None:
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS.split(","), *rows])


def _import(folder: Path, *rows: Cells, **options: Any) -> tuple[Counter[str], Tables]:
    _write(folder, *rows)
    tables = Tables(folder / "tables")
    return import_trivago(folder, tables, SPEC, max_reject_share=1.0, **options).rejects, tables


def _rows(tables: Tables, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tables.read(name).sort_by("event_ms").to_pylist()
    return sorted(rows, key=lambda row: (row["event_ms"], row.get("position") or 0))


def _text(value: str) -> int:
    return key_of(value, pb.ID_TYPE_STRING)


def test_files_are_recognized_by_their_columns(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "damaged.parquet").write_bytes(b"no parquet")
    assert not is_trivago(tmp_path)
    with pytest.raises(NotFound, match=r"no \.parquet or \.csv with the columns"):
        import_trivago(tmp_path, Tables(tmp_path / "tables"), SPEC)
    _write(tmp_path)
    assert is_trivago(tmp_path)


def test_a_list_becomes_an_impression_an_item_with_position_price_and_its_rank(tmp_path: Path) -> None:
    rejects, tables = _import(tmp_path, _list(11, filters="Hotel|Motel"), outcome_delay_ms=500)
    assert not rejects
    rows = _rows(tables, "impressions")
    assert [row["ad_id"] for row in rows] == ["10", "11", "12"]
    shown = [[row[name] for name in ("list_position", "price", "price_rank", "list_length", "active_filters")] for row in rows]
    assert shown == [[0, 90, 1, 3, 2], [1, 50, 0, 3, 2], [2, 90, 1, 3, 2]]
    assert {row["surface"] for row in rows} == {"mobile"}
    assert {row["event_ms"] for row in rows} == {1000 * START}
    assert len({row["request_id"] for row in rows}) == 3
    (click,) = tables.read("outcomes").to_pylist()
    assert click["example_id"] == rows[1]["example_id"]
    assert click["available_ms"] == click["occurred_ms"] + 500 == 1000 * START + 500


def test_a_click_outside_of_its_list_leaves_a_list_without_a_click(tmp_path: Path) -> None:
    rejects, tables = _import(tmp_path, _list(99), _list(10, at=START + 1))
    assert not rejects
    assert len(_rows(tables, "impressions")) == 6
    assert tables.read("outcomes").num_rows == 1


def test_sites_beyond_the_largest_are_other(tmp_path: Path) -> None:
    _, tables = _import(tmp_path, *(_list(10, at=START + n, platform=site) for n, site in enumerate([*PLATFORMS, "TR", "CA", ""])))
    found = [row["platform"] for row in _rows(tables, "impressions")[::3]]
    assert found == [*map(_text, PLATFORMS), _text("other"), _text("other"), None]


def test_steps_of_one_second_keep_their_order_and_a_repeat_is_refused(tmp_path: Path) -> None:
    before = _step("interaction item image", 10, step=9)
    after = _step("interaction item image", 12, step=11)
    shown = _list(10, step=10)
    rejects, tables = _import(tmp_path, after, shown, before, before, shown, _step("filter selection", "Hotel", step=1, user="V"))
    assert rejects == {"duplicate_event": 1, "duplicate_impression": 3}
    times = {row["ad_key"]: row["event_ms"] - 1000 * START for row in _rows(tables, "events")}
    assert times == {_text("10"): 0, _text("12"): 2, _text("filter:Hotel"): 0}
    assert {row["event_ms"] - 1000 * START for row in _rows(tables, "impressions")} == {1}


def test_every_kind_of_step_is_a_source_of_its_own(tmp_path: Path) -> None:
    kinds = {
        "interaction item image": ("item_image", "10"),
        "interaction item info": ("item_info", "10"),
        "interaction item rating": ("item_rating", "10"),
        "interaction item deals": ("item_deals", "10"),
        "search for item": ("search_item", "10"),
        "search for destination": ("search_destination", "search_destination:10"),
        "search for poi": ("search_poi", "search_poi:10"),
        "filter selection": ("filter", "filter:10"),
        "change of sort order": ("sort", "sort:10"),
    }
    rejects, tables = _import(tmp_path, _list(10), *(_step(kind, 10, at=START + n + 1) for n, kind in enumerate(kinds)))
    assert not rejects
    rows = _rows(tables, "events")
    assert [(row["source"], row["ad_key"]) for row in rows] == [(name, _text(ad)) for name, ad in kinds.values()]


def test_an_item_belongs_to_the_city_that_was_searched_when_it_was_first_seen(tmp_path: Path) -> None:
    _, tables = _import(tmp_path, _step("search for item", 12, city="Rome, Italy"), _list(10, at=START + 5), _list(12, at=START + 9))
    found = {row["ad_id"]: (row["ad_group"], row["valid_from_ms"]) for row in tables.read("catalogue").to_pylist()}
    berlin = (_text("Berlin, Germany"), 1000 * (START + 5))
    assert found == {"12": (_text("Rome, Italy"), 1000 * START), "10": berlin, "11": berlin}


def test_bad_cells_cost_their_row_only(tmp_path: Path) -> None:
    bad = [
        ("unparseable_time", _step("filter selection", "Hotel", at="soon")),
        ("missing_time", _step("filter selection", "Hotel", at="")),
        ("negative_time", _step("filter selection", "Hotel", at=-5)),
        ("time_out_of_range", _step("filter selection", "Hotel", at=START * 1000)),
        ("missing_user_id", _step("filter selection", "Hotel", user="")),
        ("missing_ad_id", _step("interaction item info", "unknown", at=START + 1)),
        ("unknown_source", _step("booking", 10, at=START + 2)),
        ("unknown_surface", _step("filter selection", "Hotel", at=START + 3, device="fridge")),
        ("malformed_row", _list(10, prices="90|50", at=START + 4)),
        ("malformed_row", _list(10, items="", prices="", at=START + 5)),
        ("missing_ad_id", _list(10, items="10||12", at=START + 6)),
        ("bad_feature_price", _list(10, prices="90|50|cheap", at=START + 7)),
        ("malformed_row", ["U", "S", START]),
    ]
    rejects, tables = _import(tmp_path, *(row for _, row in bad))
    assert rejects == Counter(reason for reason, _ in bad)
    assert tables.read("rejects").num_rows == len(bad)
    assert [row["ad_id"] for row in _rows(tables, "impressions")] == ["10", "12", "10", "11"]
    assert [row["price_rank"] for row in _rows(tables, "impressions")[2:]] == [1, 0]
    assert not tables.exists("events")


def _features(tables: Tables, until_ms: int) -> FeatureBatch:
    """Everything that is known of the impressions until an instant, that instant included."""
    replay = Replay(SPEC, tables)
    examples = replay.examples(0, until_ms + 1, requests="impression")
    return replay.batch(examples, np.arange(len(examples)))[0]


def _session() -> list[Cells]:
    """Two users; lists share a second with other steps, and with lists of the other user."""
    rows = []
    for step in range(8):
        for user in "UV":
            at = START + 3 * step + (step == 5)
            rows.append(_step("interaction item image", 10 + step % 3, at=at, step=2 * step, user=user))
            rows.append(_list(10 + (step * step) % 3, at=at, step=2 * step + 1, user=user))
    return rows


def test_a_click_changes_nothing_of_its_own_list_nor_of_what_came_before(tmp_path: Path) -> None:
    rows = _session()
    (tmp_path / "as_it_was").mkdir()
    _, truth = _import(tmp_path / "as_it_was", *rows)
    lists = [n for n, row in enumerate(rows) if row[4] == "clickout item"]
    for place in lists[::3]:
        changed = [list(row) for row in rows]
        changed[place][5] = 10 + (int(str(rows[place][5])) - 9) % 3
        folder = tmp_path / str(place)
        folder.mkdir()
        _, other = _import(folder, *changed)
        own_ms = 1000 * int(str(rows[place][2])) + 1
        for name, before, after in zip(FeatureBatch._fields, _features(truth, own_ms), _features(other, own_ms), strict=True):
            np.testing.assert_array_equal(before, after, err_msg=name)
        last = place >= lists[-2]
        everything = [_features(tables, 2**42) for tables in (truth, other)]
        same = all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(*everything, strict=True))
        assert same == last, "later lists know the click"


def test_permuting_the_clicks_of_all_lists_from_an_instant_on_leaves_the_past_as_it_was(tmp_path: Path) -> None:
    rows = _session()
    cut = START + 12
    own = [n for n, row in enumerate(rows) if row[4] == "clickout item" and int(str(row[2])) >= cut]
    permuted = [list(row) for row in rows]
    for n, source in zip(own, np.roll(own, 1), strict=True):
        permuted[n][5] = rows[source][5]
    read = []
    for name, given in (("truth", rows), ("permuted", permuted)):
        (tmp_path / name).mkdir()
        read.append(_import(tmp_path / name, *given)[1])
    assert read[0].read("outcomes") != read[1].read("outcomes")
    for one, two in zip(*(_features(tables, 1000 * cut + 1) for tables in read), strict=True):
        np.testing.assert_array_equal(one, two)


def test_each_shown_item_reads_its_own_position_and_price_and_what_the_user_did_with_it(tmp_path: Path) -> None:
    _, tables = _import(tmp_path, _step("interaction item image", 12), _list(12, step=2), _list(10, at=START + 60))
    replay = Replay(SPEC, tables)
    for requests in ("impression", "request"):
        examples = replay.examples(0, 2**42, requests=requests)
        batch = replay.batch(examples, np.arange(len(examples)))[0]
        assert len(batch.request_ms) == 6
        request, ad = replay.layout.user_dense, replay.layout.ad_dense
        found = np.stack([
            batch.user_dense[:, column_index(request, "list_position")],
            batch.user_dense[:, column_index(request, "price")],
            batch.ad_dense[:, column_index(ad, "user_ad_images")] > 0,
            batch.ad_dense[:, column_index(ad, "user_ad_clicks")] > 0,
        ], axis=1).tolist()  # fmt: skip
        assert sorted(found[:3]) == [[0, 90, 0, 0], [1, 50, 0, 0], [2, 90, 1, 0]]
        assert sorted(found[3:]) == [[0, 90, 0, 0], [1, 50, 0, 0], [2, 90, 1, 1]]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tables, Any]:
    tables = Tables(tmp_path_factory.mktemp("trivago"))
    return tables, import_trivago(REAL, tables, SPEC, max_reject_share=0.001)


@needs_trivago
@pytest.mark.timeout(300)
def test_all_steps_of_the_published_sessions_arrive(real: tuple[Tables, Any]) -> None:
    tables, report = real
    assert report.rows == {"impressions": 261_007, "events": 70_472, "outcomes": 11_348, "catalogue": 94_825}
    assert report.rejects == {"missing_ad_id": 4}  # items named `unknown`
    (path,) = REAL.glob("*.parquet")
    log = pq.read_table(path)
    clickouts = log.filter(pc.equal(log["action_type"], "clickout item"))
    assert log.num_rows == 81_825 == clickouts.num_rows + report.rows["events"] + 4
    shown = tables.read("impressions")
    assert shown["list_length"].to_pylist().count(25) == 25 * 8_808
    seconds = pc.unique(pc.divide(shown["event_ms"], 1000)).to_pylist()
    assert set(seconds) == set(clickouts["timestamp"].to_pylist())
    hours = {name: 1000 * (1_541_548_800 + 3_600 * hour) for name, hour in (("valid", 24), ("test", 32), ("end", 41))}
    inside = pc.sum(pc.and_(pc.greater_equal(shown["event_ms"], hours["test"]), pc.less(shown["event_ms"], hours["end"])))
    assert inside.as_py() == 65_002


@needs_trivago
def test_parquet_and_csv_of_the_same_steps_become_the_same_tables(tmp_path: Path) -> None:
    (path,) = REAL.glob("*.parquet")
    steps = pq.read_table(path).slice(0, 2_000)
    read: list[Tables] = []
    for ending in ("parquet", "csv"):
        folder = tmp_path / ending
        folder.mkdir()
        write = pq.write_table if ending == "parquet" else pa_csv.write_csv
        write(pa.table(steps), folder / f"sessions.{ending}")
        read.append(Tables(folder / "tables"))
        import_trivago(folder, read[-1], SPEC)
    for name in TABLES:
        assert read[0].read(name) == read[1].read(name), name
