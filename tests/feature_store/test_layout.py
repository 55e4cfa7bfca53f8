"""Where each feature lies: the order of columns is a contract between training and serving."""

from __future__ import annotations

from pathlib import Path

import pytest
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.layout import Column, Layout, column_index, total_width
from feature_store.spec import Spec, load_spec, parse_yaml, problems_of

DATASETS = Path(__file__).parents[2] / "feature_store" / "datasets"
SPEC = """
name: shop
surfaces: [{ name: feed }]
objectives: [{ name: click, attribution_window_seconds: 60 }]
entities: { user: { id_type: int64 }, ad: { id_type: int64 }, ad_group: { id_type: int64 } }
features:
  - { name: hour, owner: request, id: { rows: 30 } }
  - { name: colour, owner: ad, id: { rows: 30 } }
  - { name: text, owner: ad, embedding: { dim: 4 } }
  - { name: born, owner: ad, dense: { age: true } }
  - { name: price, owner: ad, dense: {} }
  - { name: ad_group, owner: ad, id: { rows: 30 } }
  - { name: ad, owner: ad, id: { rows: 30 } }
  - { name: depth, owner: request, dense: {} }
  - { name: face, owner: user, embedding: { dim: 3 } }
  - { name: income, owner: user, dense: {} }
  - { name: city, owner: user, id: { rows: 30 } }
event_sources:
  - { name: impression, features: [price, ad], max_length: 5 }
  - { name: view, features: [colour, ad, text], max_length: 5 }
aggregates:
  - { name: by_ad, by: [ad], objective: click, statistic: rate }
  - { name: by_user, by: [user], source: view, statistic: count }
  - { name: by_both, by: [user, ad], source: view, statistic: count }
  - { name: by_place, by: [surface, user], source: view, statistic: count }
  - { name: overall, source: view, statistic: count }
"""


@pytest.fixture
def layout() -> Layout:
    return Layout(Spec(parse_yaml(SPEC, pb.DatasetSpec, check=problems_of)))


def _names(columns: tuple[Column, ...]) -> list[str]:
    return [column.name for column in columns]


def test_user_columns_come_before_request_columns_and_counters_last(layout: Layout) -> None:
    assert _names(layout.user_ids) == ["city", "hour"]
    assert _names(layout.user_dense) == ["face", "income", "depth", "by_user", "by_place", "overall"]


def test_ad_columns_lead_with_the_ad_and_its_group(layout: Layout) -> None:
    assert _names(layout.ad_ids) == ["ad", "ad_group", "colour"]
    assert _names(layout.ad_dense) == ["text", "born", "price", "by_ad", "by_both"]


def test_events_carry_what_any_source_copies_in_the_order_of_ads(layout: Layout) -> None:
    assert _names(layout.event_ids) == ["ad", "colour"]
    assert _names(layout.event_dense) == ["text", "price"]


def test_a_vector_takes_as_many_columns_as_it_is_wide(layout: Layout) -> None:
    assert total_width(layout.ad_dense) == 4 + 4
    assert [column_index(layout.ad_dense, name) for name in _names(layout.ad_dense)] == [0, 4, 5, 6, 7]
    assert column_index(layout.ad_dense, "city") is None
    assert total_width(()) == 0


def test_a_column_says_what_it_holds(layout: Layout) -> None:
    text, born, price, by_ad, _ = layout.ad_dense
    assert [column.is_embedding for column in (text, born, price, by_ad)] == [True, False, False, False]
    assert [column.is_age for column in (text, born, price, by_ad)] == [False, True, False, False]
    assert by_ad.feature is None
    assert by_ad.aggregate is not None
    assert by_ad.aggregate.objective == "click"


@pytest.mark.parametrize("name", ["kuairand", "trivago", "world"])
def test_every_feature_and_counter_has_one_place(name: str) -> None:
    spec = load_spec(DATASETS / f"{name}.yaml")
    layout = Layout(spec)
    placed = _names(layout.user_ids + layout.user_dense + layout.ad_ids + layout.ad_dense)
    declared = [feature.name for feature in spec.message.features] + [counter.name for counter in spec.message.aggregates]
    assert sorted(placed) == sorted(declared)
