"""Specs: what is wrong is said at once, with its line, key, value and way out; what means the same hashes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store import tables
from feature_store.errors import InvalidInput, UnknownSurface
from feature_store.spec import RESERVED, Spec, load_spec, parse_yaml, problems_of

DATASETS = Path(__file__).parents[2] / "feature_store" / "datasets"
GOOD = """\
name: shop
surfaces: [{ name: feed }, { name: reels }]
objectives:
  - { name: click, attribution_window_seconds: 60 }
  - name: buy
    attribution_window_seconds: 3600
    parent: click
entities:
  user: { id_type: int64 }
  ad: { id_type: string }
features:
  - { name: ad, owner: ad, id: { rows: 100 } }
  - { name: price, owner: ad, dense: {} }
event_sources:
  - { name: impression, features: [ad], max_length: 50 }
aggregates:
  - name: user_clicks
    by: [user]
    objective: click
    statistic: rate
    prior_strength: 20
"""


def _spec(text: str) -> Spec:
    return Spec(parse_yaml(text, pb.DatasetSpec, name="spec.yaml", check=problems_of))


def _problems(text: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        _spec(text)
    return str(caught.value)


@pytest.mark.parametrize("name", ["kuairand", "trivago", "world"])
def test_the_specs_we_ship_are_good(name: str) -> None:
    assert load_spec(DATASETS / f"{name}.yaml").message.name == name


def test_lookups_follow_the_order_of_the_file() -> None:
    spec = _spec(GOOD)
    assert spec.surfaces == ("feed", "reels")
    assert spec.objectives == ("click", "buy")
    assert spec.surface_index("reels") == 1
    assert [spec.parent_index(0), spec.parent_index(1)] == [None, 0]
    assert spec.id_type("user") == pb.ID_TYPE_INT64
    assert spec.id_type("ad") == pb.ID_TYPE_STRING
    assert [feature.name for feature in spec.features(pb.OWNER_AD, "dense")] == ["price"]


def test_an_unknown_surface_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownSurface, match=r"'stories'.*feed.*reels") as caught:
        _spec(GOOD).surface_index("stories")
    assert caught.value.metadata == {"surface": "stories"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("parent: click", "parnet: click", "line 7: objectives[1].parnet: unknown key; did you mean 'parent'?"),
        ("name: shop", "name: 7", "line 1: name: '7' must be text (quote numbers)"),
        ("name: shop", "name: 2022-13-45", "line 1: name: '2022-13-45' must be text (quote numbers)"),
        ("name: shop", "name: !!python/object:os.system x", "must be text (quote numbers)"),
        ("name: shop", "name: shop\nname: mall", "line 2: name: is there twice; keep one"),
        ("owner: ad, dense", "owner: add, dense", "line 13: features[1].owner: 'add' must be one of ['ad', 'request', 'user']"),
        ("3600", "1e3", "line 6: objectives[1].attribution_window_seconds: '1e3' must be a whole number of 64 bits"),
        ("3600", "true", "must be a whole number of 64 bits"),
        ("3600", "9223372036854775808", "must be a whole number of 64 bits"),
        ("max_length: 50", "max_length: 2147483648", "must be a whole number of 32 bits"),
        ("prior_strength: 20", "prior_strength: .nan", "line 21: aggregates[0].prior_strength: '.nan' must be a finite number"),
        ("surfaces: [{ name: feed }, { name: reels }]", "surfaces: feed", "line 2: surfaces: must be a list"),
        ("user: { id_type: int64 }", "user: int64", "line 9: entities.user: must be a mapping of keys to values"),
        ("dense: {}", "dense: {}, id: { rows: 9 }", "line 13: features[1].id: only one of"),
        ("by: [user]", "by: [[user]]", "line 18: aggregates[0].by[0]: must be text (quote numbers)"),
    ],
)  # fmt: skip
def test_what_is_not_of_the_form_is_named_with_its_line(old: str, new: str, expected: str) -> None:
    assert expected in _problems(GOOD.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("parent: click", "parent: clik", "line 7: objectives.buy.parent: 'clik' is not an objective"),
        ("60 }", "60, parent: buy }", "line 4: objectives.click.parent: the parents form a circle over 'click'"),
        ("60 }", "0 }", "line 4: objectives.click.attribution_window_seconds: 0 must be at least 1"),
        ("name: reels", "name: feed", "line 2: surfaces[1].name: 'feed' is there twice; rename one"),
        ("name: reels", "name: the feed", "line 2: surfaces[1].name: 'the feed' must be up to 63 ASCII letters"),
        ("name: reels", "name: ''", "line 2: surfaces[1].name: is empty; name it"),
        ("ad: { id_type: string }", "ads: { id_type: string }", "entities.ads: unknown entity"),
        ("ad: { id_type: string }", "ad: {}", "line 10: entities.ad.id_type: is missing; write int64 or string"),
        ("rows: 100", "rows: 2", "line 12: features.ad.id.rows: 2 must be at least 3"),
        ("rows: 100", "rows: 100, id_type: int64", "features.ad.id.id_type: differs from entities.ad.id_type"),
        ("owner: ad, id", "owner: user, id", "line 12: features.ad.owner: ids of ad belong to the ad"),
        (", dense: {}", "", "line 13: features.price: has no kind; give one of id, dense, embedding"),
        ("dense: {}", "embedding: {}", "features.price.embedding.dim: 0 must be at least 1"),
        ("name: price", "name: event_ms", "line 13: features.event_ms.name: 'event_ms' is a column of the tables"),
        ("name: price", "name: user_clicks", "line 17: aggregates.user_clicks.name: 'user_clicks' is a feature too"),
        ("features: [ad]", "features: [colour]", "line 15: event_sources.impression.features: 'colour' is not an ad feature"),
        ("max_length: 50", "max_length: 0", "line 15: event_sources.impression.max_length: 0 must be at least 1"),
        ("by: [user]", "by: [price]", "line 18: aggregates.user_clicks.by: 'price' is not a key; use one of ['ad', 's"),
        ("by: [user]", "by: [user, user]", "line 18: aggregates.user_clicks.by: ['user', 'user'] names a key twice"),
        ("objective: click", "objective: clicks", "line 19: aggregates.user_clicks.objective: 'clicks' is not an objective"),
        ("objective: click", "source: impression", "line 20: aggregates.user_clicks.statistic: a rate is of an objective"),
        ("objective: click", "source: searches", "aggregates.user_clicks.source: 'searches' is not an event source"),
        ("    objective: click\n", "", "line 17: aggregates.user_clicks: counts nothing; give a source or an objective"),
        ("prior_strength: 20", "prior_strength: -1", "half_life_seconds and prior_strength must not be negative"),
        ("name: shop\n", "", "line 1: name: is missing; every spec needs it"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_named_with_its_line(old: str, new: str, expected: str) -> None:
    assert expected in _problems(GOOD.replace(old, new, 1))


def test_all_problems_are_listed_at_once() -> None:
    text = GOOD.replace("parent: click", "parent: clik").replace("max_length: 50", "max_length: 0")
    assert _problems(text).startswith("spec.yaml has 2 problem(s):\n  line 7: ")


def test_more_objectives_than_an_event_has_bits_for_are_refused() -> None:
    many = "".join(f"  - {{ name: o{index}, attribution_window_seconds: 1 }}\n" for index in range(31))
    assert "objectives: 33 exceed 31" in _problems(GOOD.replace("entities:\n", f"{many}entities:\n"))


def test_features_that_share_a_table_agree_on_its_rows() -> None:
    text = GOOD.replace("event_sources:", "  - { name: seen, owner: user, id: { rows: 9, table: ad } }\nevent_sources:")
    assert "line 14: features.seen.id.rows: 9 differs from 100 of table 'ad'" in _problems(text)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "a: [", "a: 1\n---\nb: 2\n", "just words", "\t"])
def test_what_is_no_spec_at_all_is_refused_in_words(text: str) -> None:
    assert "spec.yaml" in _problems(text)


def test_a_spec_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"gone\.yaml cannot be read: No such file"):
        load_spec(tmp_path / "gone.yaml")


def test_equal_meanings_hash_equally() -> None:
    same = GOOD.replace("rows: 100", "table: ad, rows: 0x64").replace("owner: ad", "owner: AD")
    same = same.replace("max_length: 50", "max_length: 50, merge_group: default").replace("name: shop", "# a shop\nname: 'shop'")
    mapped = GOOD + "tables:\n  users: { path: u.csv, columns: { user_id: id } }\n"
    assert _spec(GOOD).hash == _spec(same).hash == _spec(mapped).hash
    assert len(_spec(GOOD).hash) == 16


@pytest.mark.parametrize(
    ("old", "new"),
    [("name: reels", "name: stories"), ("3600", "3601"), ("prior_strength: 20", "prior_strength: 21"), ("rows: 100", "rows: 101"),
     ("[{ name: feed }, { name: reels }]", "[{ name: reels }, { name: feed }]"), ("id_type: string", "id_type: int64")],
)  # fmt: skip
def test_other_meanings_hash_otherwise(old: str, new: str) -> None:
    assert _spec(GOOD).hash != _spec(GOOD.replace(old, new, 1)).hash


def test_the_hash_of_a_spec_stays_what_it_was() -> None:
    """Artefacts on disk carry it: a change here makes every one of them unusable."""
    assert _spec(GOOD).hash.hex() == "1b239eb0282b5ca38c3225df4c116bbf"


def test_no_feature_can_take_the_name_of_a_table_column() -> None:
    with_features = (tables.IMPRESSIONS, tables.CATALOGUE, tables.USERS, tables.EVENTS, tables.OUTCOMES)
    fixed = {name for columns in with_features for name in columns.names} - {"objective", "value"}
    assert fixed <= RESERVED
