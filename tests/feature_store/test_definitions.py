"""User features through Feast: what went in comes out, and each of Feast's known traps is stepped over."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store import definitions
from feature_store.definitions import FeastSettings, State
from feature_store.errors import InvalidInput, NotFound
from feature_store.spec import Spec, parse_yaml
from feature_store.tables import Tables

HOUR = 3_600_000
T0 = 1_700_000_000_000
BIG = 2**53 + 1
SPEC = Spec(
    parse_yaml(
        """
name: feast_test
surfaces: [{ name: feed }]
objectives: [{ name: click, attribution_window_seconds: 60 }]
entities: { user: { id_type: int64 }, ad: { id_type: int64 } }
features:
  - { name: user, owner: user, id: { rows: 64 } }
  - { name: city, owner: user, id: { rows: 64, id_type: int64 } }
  - { name: score, owner: user, dense: {} }
  - { name: vector, owner: user, embedding: { dim: 2 } }
  - { name: ad, owner: ad, id: { rows: 64 } }
""",
        pb.DatasetSpec,
    )
)
USERS = [  # user, valid from, available, city, score, vector
    (1, T0, T0, 10, 0.5, [1.0, 2.0]),
    (1, T0 + 5 * HOUR, T0 + 6 * HOUR, 11, 0.75, [3.0, 4.0]),  # known an hour after it became valid
    (2, T0, T0, BIG, None, None),
    (-(2**62) - 1, T0, T0, -5, float("nan"), [5.0, 6.0]),
]
pytestmark = pytest.mark.filterwarnings("ignore:fetch_arrow_table:DeprecationWarning", "ignore:unclosed:ResourceWarning")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    tables = Tables(tmp_path_factory.mktemp("tables"))
    keys, valid, available, city, score, vector = zip(*USERS, strict=True)
    table = {
        "user_id": pa.array([str(key) for key in keys]),
        "user_key": pa.array(keys, pa.int64()),
        "valid_from_ms": pa.array(valid, pa.int64()),
        "available_ms": pa.array(available, pa.int64()),
        "user": pa.array(keys, pa.int64()),
        "city": pa.array(city, pa.int64()),
        "score": pa.array(score, pa.float64()),
        "vector": pa.array(vector, pa.list_(pa.float32())),
    }
    tables.append("users", pa.table(table))
    return tables


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def feast(request: pytest.FixtureRequest, tables: Tables, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    folder = tmp_path_factory.mktemp("feast")
    url = f"sqlite:///{folder / 'online.sqlite'}"
    if request.param == "redis":
        url = request.getfixturevalue("redis_server").removesuffix("/0") + "/2"
    settings = FeastSettings(folder=folder, store=url, max_age_days=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = definitions.open_feast(SPEC, settings)
        assert definitions.apply(store, SPEC, tables, settings) == 3
    yield store
    store.teardown()


def history(feast: object, rows: dict[str, list[object]]) -> pa.Table:
    return definitions.historical_user_features(feast, SPEC, pa.table(rows))  # type: ignore[arg-type]


def test_rows_of_one_user_and_instant_all_come_back_in_their_order_with_their_labels(feast: object) -> None:
    rows = {"user_key": [2, 1, 1, 99, 1], "at_ms": [T0 + HOUR] * 5, "label": [0.0, 1.0, 0.0, 1.0, 1.0]}
    joined = history(feast, rows)
    assert joined["user_key"].to_pylist() == rows["user_key"]
    assert joined["label"].to_pylist() == rows["label"]
    assert joined["city"].to_pylist() == [BIG, 10, 10, None, 10]
    assert joined["score"].to_pylist() == [None, 0.5, 0.5, None, 0.5]
    assert joined["vector"].to_pylist() == [None, [1.0, 2.0], [1.0, 2.0], None, [1.0, 2.0]]
    assert joined.schema.field("city").type == pa.int64()


def test_a_value_is_not_known_before_it_was_created_however_early_it_is_valid(feast: object) -> None:
    at = [T0 - 1, T0, T0 + 5 * HOUR, T0 + 6 * HOUR - 1, T0 + 6 * HOUR, T0 + 7 * HOUR]
    joined = history(feast, {"user_key": [1] * 6, "at_ms": at})
    assert joined["city"].to_pylist() == [None, 10, 10, 10, 11, 11]


def test_a_value_older_than_allowed_is_null_offline_as_it_is_stale_online(feast: object) -> None:
    joined = history(feast, {"user_key": [1, 1], "at_ms": [T0 + 101 * HOUR, T0 + 101 * HOUR + 1]})
    assert joined["city"].to_pylist() == [11, None]
    for at_ms, state in ((T0 + 101 * HOUR, State.PRESENT), (T0 + 101 * HOUR + 1, State.STALE)):
        read = definitions.online_user_features(feast, SPEC, [1], at_ms=at_ms)  # type: ignore[arg-type]
        assert read.states["city"].tolist() == [state]
        assert read.values["city"].to_pylist() == [11]


def test_online_reads_tell_present_null_stale_and_absent_apart_and_keep_integers(feast: object) -> None:
    keys = [2, 99, 1, -(2**62) - 1, 2]
    read = definitions.online_user_features(feast, SPEC, keys, at_ms=T0 + HOUR)  # type: ignore[arg-type]
    assert read.values["city"].to_pylist() == [BIG, None, 11, -5, BIG]
    assert read.values["city"].type == pa.int64()
    assert read.states["city"].tolist() == [State.PRESENT, State.ABSENT, State.PRESENT, State.PRESENT, State.PRESENT]
    assert read.states["score"].tolist() == [State.NULL, State.ABSENT, State.PRESENT, State.NULL, State.NULL]
    assert read.values["vector"].to_pylist() == [None, None, [3.0, 4.0], [5.0, 6.0], None]
    assert read.counts()["score"] == {"present": 1, "null": 3, "stale": 0, "absent": 1}


def test_nothing_asked_is_an_empty_answer_and_a_missing_key_a_named_error(feast: object) -> None:
    read = definitions.online_user_features(feast, SPEC, [], at_ms=T0)  # type: ignore[arg-type]
    assert read.values["city"].to_pylist() == []
    none = {"user_key": pa.array([], pa.int64()), "at_ms": pa.array([], pa.int64()), "label": pa.array([], pa.float32())}
    joined = definitions.historical_user_features(feast, SPEC, pa.table(none))  # type: ignore[arg-type]
    assert joined.column_names == ["user_key", "at_ms", "label", "city", "score", "vector"]
    for wrong in (None, "1", 2.0, True, 2**63):
        with pytest.raises(InvalidInput, match="user_key"):
            definitions.online_user_features(feast, SPEC, [wrong], at_ms=T0)  # type: ignore[list-item, arg-type]
    with pytest.raises(InvalidInput, match="user_key"):
        history(feast, {"user_key": [1, None], "at_ms": [T0, T0]})
    with pytest.raises(InvalidInput, match="'city'"):
        history(feast, {"user_key": [1], "at_ms": [T0], "city": [3]})


def test_many_rows_come_back_as_a_search_finds_them(feast: object) -> None:
    random = np.random.default_rng(3)
    keys = random.choice([1, 2, 99], size=2_000)
    at = T0 + random.integers(-HOUR, 8 * HOUR, size=2_000)
    joined = history(feast, {"user_key": keys.tolist(), "at_ms": at.tolist()})
    want = []
    for key, when in zip(keys.tolist(), at.tolist(), strict=True):
        known = [user for user in USERS if user[0] == key and user[1] <= when and user[2] <= when]
        want.append(max(known, key=lambda user: user[1])[3] if known else None)
    assert joined["city"].to_pylist() == want


def test_python_m_feature_store_registers_from_any_folder_and_says_what_it_lacks(tables: Tables, tmp_path: Path) -> None:
    lacking = subprocess.run([sys.executable, "-m", "feature_store"], cwd=tmp_path, env={}, capture_output=True, text=True)
    assert lacking.returncode == 2
    for name in ("GEM_SPEC", "GEM_STORE", "GEM_TABLES", "GEM_FEAST"):
        assert name in lacking.stderr


def test_without_a_table_of_users_nothing_is_registered(tmp_path: Path) -> None:
    settings = FeastSettings(folder=tmp_path, store=f"sqlite:///{tmp_path / 'o.sqlite'}")
    with pytest.raises(NotFound, match="import data first"):
        definitions.apply(None, SPEC, Tables(tmp_path / "tables"), settings)  # type: ignore[arg-type]
