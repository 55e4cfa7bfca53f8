"""Packed rows: what goes in comes out, as of an instant; a strange or damaged row is absent, never garbage."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from gem.schema.v1 import dataset_spec_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from feature_store.aggregates import Group
from feature_store.errors import CorruptArtefact, InvalidInput
from feature_store.ids import ABSENT
from feature_store.layout import Layout
from feature_store.log import DAY_MS, Entities
from feature_store.online import with_version
from feature_store.packing import ad_shape, counter_slots, dequantize_int4, quantize_int4
from feature_store.spec import Spec, parse_yaml
from feature_store.versions import VersionIndex

SPEC = """
name: packing
surfaces: [{ name: feed }]
objectives: [{ name: click, attribution_window_seconds: 60 }]
entities: { user: { id_type: int64 }, ad: { id_type: int64 }, ad_group: { id_type: int64 } }
features:
  - { name: price, owner: ad, dense: {} }
  - { name: ad_group, owner: ad, id: { rows: 64 } }
  - { name: ad, owner: ad, id: { rows: 64 } }
  - { name: born, owner: ad, dense: { age: true } }
  - { name: text, owner: ad, embedding: { dim: 3 } }
"""
SHAPE = ad_shape(Layout(Spec(parse_yaml(SPEC, pb.DatasetSpec))))
KEYS = st.integers(-(2**63) + 1, 2**63 - 1)
NUMBERS = st.floats(width=32, allow_infinity=False)


@st.composite
def catalogues(draw: st.DrawFn) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Entities]:
    n = draw(st.integers(1, 12))
    keys = np.array(draw(st.lists(st.sampled_from([-5, 0, 2**62, 7]), min_size=n, max_size=n)), dtype=np.int64)
    since = np.array(draw(st.lists(st.integers(0, 50), min_size=n, max_size=n)), dtype=np.int64)
    groups = np.array(draw(st.lists(KEYS, min_size=n, max_size=n)), dtype=np.int64)
    dense = np.array(draw(st.lists(st.lists(NUMBERS, min_size=5, max_size=5), min_size=n, max_size=n)), dtype=np.float32)
    births = np.full((n, 5), ABSENT, dtype=np.int64)
    births[:, 1] = draw(st.lists(st.sampled_from([ABSENT, 0, 3, 10**12]), min_size=n, max_size=n))
    dense[:, 1] = np.nan
    ids = np.stack([keys, groups], axis=1)
    versions = VersionIndex(keys, since, since)
    return keys, since, Entities(versions, ids, dense, births, 0)


@given(catalogues(), st.integers(-1, 60))
def test_a_packed_row_reads_as_the_table_does_at_every_instant(
    catalogue: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Entities], at_ms: int
) -> None:
    _, _, entities = catalogue
    versions = entities.versions
    asked = np.array([-5, 99, 0, 2**62, 7, 0], dtype=np.int64)
    stored: dict[int, bytes] = {}
    for key, first, end in zip(versions.keys.tolist(), *(span.tolist() for span in versions.spans), strict=True):
        rows = SHAPE.encode(entities, versions.order[first:end], versions.since_ms[first:end])
        stored[key] = b"".join(rows)
    now = np.full(len(asked), at_ms)
    ids, dense, known = SHAPE.decode([stored.get(key) for key in asked.tolist()], asked, at_ms)
    rows_at = versions.at(asked, now)
    np.testing.assert_array_equal(known, rows_at >= 0)
    np.testing.assert_array_equal(ids, entities.gather_ids(rows_at, asked))
    np.testing.assert_array_equal(dense, entities.gather_dense(rows_at, now))


def test_ages_are_days_to_each_instant() -> None:
    births = np.array([[ABSENT, 5 * DAY_MS, ABSENT, ABSENT, ABSENT]])
    dense = np.zeros((1, 5), dtype=np.float32)
    entities = Entities(VersionIndex(*[np.zeros(1, np.int64)] * 3), np.array([[0, 1]]), dense, births, 0)
    (row,) = SHAPE.encode(entities, np.array([0]), np.array([0]))
    _, read, _ = SHAPE.decode([row, row], np.array([0, 0]), np.array([6 * DAY_MS, 5 * DAY_MS + DAY_MS // 2]))
    assert read[:, 1].tolist() == [1.0, 0.5]


@pytest.mark.parametrize("value", [None, b"", b"x", bytes(SHAPE.dtype.itemsize), b"\xff" * SHAPE.dtype.itemsize * 2])
def test_what_is_no_row_of_this_shape_is_an_unknown_ad_that_keeps_its_key(value: bytes | None) -> None:
    ids, dense, known = SHAPE.decode([value], np.array([-7]), 10)
    assert ids.tolist() == [[-7, ABSENT]]
    assert np.isnan(dense).all()
    assert known.tolist() == [False]


@given(keys=st.lists(st.integers(-(2**62), 2**62), max_size=5, unique=True), data=st.data())
def test_stored_counter_rows_read_as_their_slots_and_absent_ones_as_zeros(keys: list[int], data: st.DataObject) -> None:
    group = Group(("ad",), (), (), 3, per_user=False, parts=(0,))
    there = data.draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys)))
    slots = np.array([[key, key / 3, -key] for key in keys], dtype=np.float64).reshape(-1, 3)
    stored = [with_version(row.tobytes(), 7) if is_there else None for row, is_there in zip(slots, there, strict=True)]
    assert np.array_equal(counter_slots(stored, group), np.where(np.array(there, dtype=bool)[:, None], slots, 0.0))


def test_a_counter_row_of_another_length_is_damaged() -> None:
    group = Group(("ad",), (), (), 3, per_user=False, parts=(0,))
    with pytest.raises(CorruptArtefact, match="not of 32 bytes; rebuild the counters"):
        counter_slots([bytes(32), bytes(16), bytes(48)], group)


def test_no_ads_are_no_rows() -> None:
    ids, dense, known = SHAPE.decode([], np.zeros(0, dtype=np.int64), 10)
    assert (ids.shape, dense.shape, known.shape) == ((0, 2), (0, 5), (0,))


@given(st.lists(st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6), max_size=9))
def test_int4_keeps_a_vector_to_an_eighth_and_its_codes_exactly(rows: list[list[float]]) -> None:
    z = np.array(rows, dtype=np.float32).reshape(-1, 6)
    packed = quantize_int4(z)
    back = dequantize_int4(packed)
    assert packed.shape == (len(z), 3)
    inside = np.clip(z, -1.0, 0.875)
    assert (np.abs(back - inside) <= 1 / 16).all()
    np.testing.assert_array_equal(back * 8, np.clip(np.rint(z * 8), -8, 7))
    np.testing.assert_array_equal(quantize_int4(back), packed)


def test_int4_rounds_half_to_even_and_puts_the_low_nibble_first() -> None:
    z = np.array([[0.0625, 0.1875, -0.0625, -1.5, 1.0, 0.0]], dtype=np.float32)
    assert (dequantize_int4(quantize_int4(z)) * 8).tolist() == [[0, 2, 0, -8, 7, 0]]
    assert quantize_int4(np.array([[0.125, -0.125]], dtype=np.float32)).tolist() == [[0xF1]]


def test_int4_refuses_what_has_no_code() -> None:
    for wrong in (np.zeros((1, 3)), np.array([[0.0, np.nan]]), np.array([[np.inf, 0.0]])):
        with pytest.raises(InvalidInput, match="even width and finite"):
            quantize_int4(wrong.astype(np.float32))
