"""KuaiRand: its published CSV files and Parquet files of the same columns become the same tables."""

from __future__ import annotations

import os
from collections import Counter
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.errors import NotFound
from feature_store.ids import key_of
from feature_store.importing.kuairand import import_kuairand, is_kuairand
from feature_store.spec import load_spec
from feature_store.tables import Tables

ROOT = Path(__file__).parents[2]
SPEC = load_spec(ROOT / "feature_store" / "datasets" / "kuairand.yaml")
REAL = Path(os.environ.get("GEM_DATA", ROOT / "../shared/data")) / "kuairand"
LOG_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
)
USERS = (
    "user_id,user_active_degree,is_lowactive_period,is_live_streamer,is_video_author,follow_user_num,follow_user_num_range,"
    "fans_user_num,fans_user_num_range,friend_user_num,friend_user_num_range,register_days,register_days_range,"
    "onehot_feat0,onehot_feat4\n"
    '0,full_active,0,-124,1,5,"(0,10]",3,"[1,10)",0,0,327,181-365,1,15.0\n'
    '1,UNKNOWN,0,0,1,5,"(0,10]",3,"[1,10)",0,0,327,181-365,2,\n'
)
VIDEOS = (
    "video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,server_width,server_height,music_id,"
    "music_type,tag\n"
    '10,5000000001,NORMAL,2022-04-10,LongImport,0.0,87433.0,720.0,1280.0,9155697141,9.0,"39,12"\n'
    "11,5000000001,AD,,Web,1.0,,,,6355810746,,\n"
)  # fmt: skip
START = 1_651_000_000_000


def _line(user: object, video: object, when: object, *, tab: object = 1, click: object = 0, long_view: object = 0) -> str:
    return f"{user},{video},20220427,306,{when},{click},0,0,0,0,0,{long_view},77,88,0,0,1,0,{tab}\n"


def _import(tmp_path: Path, *lines: str, **options: Any) -> tuple[Counter[str], Tables]:
    (tmp_path / "user_features_pure.csv").write_text(USERS)
    (tmp_path / "video_features_basic_pure.csv").write_text(VIDEOS)
    (tmp_path / "log_standard_4_22_to_5_08_pure.csv").write_text(LOG_HEADER + "".join(lines))
    tables = Tables(tmp_path / "tables")
    return import_kuairand(tmp_path, tables, SPEC, max_reject_share=1.0, **options).rejects, tables


def _impressions(tables: Tables) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tables.read("impressions").sort_by([("event_ms", "ascending"), ("position", "ascending")]).to_pylist()
    return rows


def test_the_published_files_are_recognized(tmp_path: Path) -> None:
    assert not is_kuairand(tmp_path)
    _import(tmp_path, _line(0, 10, START))
    assert is_kuairand(tmp_path)


def test_tabs_are_surfaces_and_the_rest_is_other(tmp_path: Path) -> None:
    rejects, tables = _import(tmp_path, *(_line(0, 10, START + n, tab=tab) for n, tab in enumerate([0, 1, 2, 4, 6, 3, 14])))
    assert not rejects
    surfaces = [row["surface"] for row in _impressions(tables)]
    assert surfaces == ["tab_0", "tab_1", "tab_2", "tab_4", "tab_6", "other", "other"]


def test_a_request_is_a_minute_of_one_user_in_one_tab_from_its_first_impression(tmp_path: Path) -> None:
    times = [0, 30_000, 60_000, 60_001, 120_001, 120_002]
    lines = [_line(0, 10, START + t) for t in times]
    lines += [_line(0, 11, START + 5, tab=0), _line(1, 11, START + 6)]
    _, tables = _import(tmp_path, *reversed(lines))
    rows = _impressions(tables)
    own = [row for row in rows if row["user_key"] == 0 and row["surface"] == "tab_1"]
    names = [row["request_id"] for row in own]
    assert [names.index(name) for name in names] == [0, 0, 0, 3, 3, 5]
    assert [row["position"] for row in own] == [0, 1, 2, 0, 1, 0]
    assert len({row["request_id"] for row in rows}) == 5


def test_outcomes_are_rows_and_a_long_view_counts_twice_only_after_a_click(tmp_path: Path) -> None:
    lines = [_line(0, 10, START + n, click=n & 1, long_view=n >> 1) for n in range(4)]
    _, tables = _import(tmp_path, *lines, outcome_delay_ms=500)
    at = {row["example_id"]: row["event_ms"] - START for row in _impressions(tables)}
    rows = tables.read("outcomes").to_pylist()
    assert Counter((at[row["example_id"]], row["objective"]) for row in rows if row["objective"] != "profile_enter") == Counter(
        [(1, "click"), (3, "click"), (2, "long_view"), (3, "long_view"), (3, "long_view_click")]
    )
    assert all(row["available_ms"] == row["occurred_ms"] + 500 for row in rows)
    assert {row["value"] for row in rows} == {1.0}


def test_repeats_of_user_video_and_time_are_dropped_even_from_another_tab(tmp_path: Path) -> None:
    rejects, tables = _import(tmp_path, _line(0, 10, START), _line(0, 10, START), _line(0, 10, START, tab=0), _line(1, 10, START))
    assert rejects == {"duplicate_impression": 2}
    assert tables.read("impressions").num_rows == 2


def test_bad_cells_cost_their_row_only(tmp_path: Path) -> None:
    bad = {
        "unparseable_time": _line(0, 10, "soon"),
        "missing_time": _line(0, 10, ""),
        "negative_time": _line(0, 10, -5),
        "time_out_of_range": _line(0, 10, START * 1000),
        "bad_user_id": _line("me", 10, START),
        "missing_ad_id": _line(0, "", START),
        "bad_ad_id": _line(0, 2**64, START),
        "bad_outcome": _line(0, 10, START + 1, click="yes"),
        "missing_surface": _line(0, 10, START + 2, tab="home"),
        "malformed_row": "0,10,1\n",
    }
    rejects, tables = _import(tmp_path, *bad.values(), _line(0, 10, START + 9, click=1, long_view=1))
    assert rejects == dict.fromkeys(bad, 1)
    (row,) = _impressions(tables)
    assert row["event_ms"] == START + 9
    assert tables.read("outcomes").num_rows == 4


def test_users_and_videos_keep_their_codes_and_gaps(tmp_path: Path) -> None:
    _, tables = _import(tmp_path, _line(0, 10, START))
    first, second = tables.read("users").sort_by("user_key").to_pylist()
    assert (first["onehot_feat4"], second["onehot_feat4"], first["register_days"]) == (15, None, 327.0)
    assert first["follow_user_num_range"] == key_of("(0,10]", pb.ID_TYPE_STRING)
    assert first["is_live_streamer"] == key_of("-124", pb.ID_TYPE_STRING)
    assert (first["valid_from_ms"], first["history_len"]) == (0, None)
    video, bare = tables.read("catalogue").sort_by("ad_key").to_pylist()
    assert (video["ad_group"], video["campaign"], video["music"], video["music_type"]) == (5_000_000_001, 39, 9_155_697_141, 9)
    assert video["age"] == datetime(2022, 4, 10, tzinfo=UTC).timestamp() * 1000
    assert [bare[name] for name in ("campaign", "age", "duration", "music_type")] == [None] * 4


def test_rows_that_were_inserted_at_random_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "log_random_4_22_to_5_08_pure.csv").write_text(LOG_HEADER + _line(1, 11, START))
    _, tables = _import(tmp_path, _line(0, 10, START))
    assert [row["user_key"] for row in _impressions(tables)] == [0]


def test_a_folder_without_the_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"log_\*\.parquet or \.csv does not exist"):
        import_kuairand(tmp_path, Tables(tmp_path / "tables"), SPEC)


needs_kuairand = pytest.mark.skipif(not REAL.is_dir(), reason=f"KuaiRand is not at {REAL}; set GEM_DATA")


@needs_kuairand
def test_parquet_and_csv_of_the_same_rows_become_the_same_tables(tmp_path: Path) -> None:
    for ending in ("parquet", "csv"):
        (tmp_path / ending).mkdir()
    for path in REAL.glob("*.parquet"):
        if "prehistory" not in path.name:  # its lists have no CSV form
            rows = pq.read_table(path).slice(0, 3_000)
            pq.write_table(rows, tmp_path / "parquet" / path.name)
            pa_csv.write_csv(rows, tmp_path / "csv" / f"{path.stem}.csv")
    read = {ending: Tables(tmp_path / ending / "tables") for ending in ("parquet", "csv")}
    reports = {ending: import_kuairand(tmp_path / ending, tables, SPEC) for ending, tables in read.items()}
    assert reports["parquet"] == reports["csv"]
    for name in ("impressions", "outcomes", "users", "catalogue"):
        assert read["parquet"].read(name) == read["csv"].read(name)


@needs_kuairand
def test_what_was_watched_before_the_log_ends_before_it_in_its_order(tmp_path: Path) -> None:
    for path in REAL.glob("*.parquet"):
        rows = pq.read_table(path)
        pq.write_table(rows.slice(0, 500) if "video" not in path.name else rows, tmp_path / path.name)
    tables = Tables(tmp_path / "tables")
    import_kuairand(tmp_path, tables, SPEC)
    events = tables.read("events").sort_by([("user_key", "ascending"), ("event_ms", "ascending")])
    log_begins = round(datetime(2022, 4, 24, 23, 52, tzinfo=timezone(timedelta(hours=8))).timestamp() * 1000)
    assert events["event_ms"].to_numpy().max() < log_begins
    (path,) = tmp_path.glob("user_prehistory*")
    for given in pq.read_table(path).slice(0, 50).to_pylist():
        own = events.filter(pa.compute.equal(events["user_key"], given["user_id"])).to_pylist()
        for source, column in (("watch", "watch_seq"), ("like", "like_seq"), ("long_watch", "long_watch_seq")):
            kept = [event for event in own if event["source"] == source]
            assert [event["ad_key"] for event in kept] == given[column]
            assert not kept or kept[-1]["event_ms"] == given["last_time_ms"]
