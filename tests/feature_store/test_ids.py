"""Ids become keys without losing a bit, and examples have names that nothing else has."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import pytest
import xxhash
from gem.schema.v1.dataset_spec_pb2 import ID_TYPE_INT64, ID_TYPE_STRING, ID_TYPE_UNSPECIFIED
from hypothesis import given
from hypothesis import strategies as st

from feature_store.errors import InvalidInput
from feature_store.ids import ABSENT, example_id, example_ids, key_of, to_keys

INT64 = st.integers(-(2**63) + 1, 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(value=INT64)
def test_an_int64_is_its_own_key_however_it_is_written(value: int) -> None:
    assert key_of(value, ID_TYPE_INT64) == key_of(str(value), ID_TYPE_INT64) == key_of(np.int64(value), ID_TYPE_INT64) == value


@pytest.mark.parametrize("value", [16_777_216, 16_777_217, 2**53 + 1, -(2**53) - 1, 0, -1, 2**63 - 1, -(2**63) + 1])
def test_ids_that_floats_confuse_stay_apart(value: int) -> None:
    mixed = to_keys([str(value), value, np.int64(value)], ID_TYPE_INT64)
    array = to_keys(np.array([value]), ID_TYPE_INT64)
    assert mixed.tolist() == [value] * 3
    assert array.tolist() == [value]
    assert mixed.dtype == array.dtype == np.int64


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (7.0, "7.0 is float"),
        (float("nan"), "nan is float"),
        (np.float32(16_777_217), "float32"),
        (True, "True is bool"),
        (None, "NoneType"),
        (b"7", "bytes"),
        ("7.0", "'7.0' is not a decimal integer"),
        ("", "'' is not a decimal integer"),
        (" 7", "is not a decimal integer"),
        ("7\n", "is not a decimal integer"),
        ("1_000", "is not a decimal integer"),
        ("٧", "is not a decimal integer"),
        ("0x10", "is not a decimal integer"),
        (2**63, "does not fit in 64 bits"),
        ("9223372036854775808", "does not fit in 64 bits"),
        ("9" * 5000, "does not fit in 64 bits"),
        (np.uint64(2**63), "does not fit in 64 bits"),
        (ABSENT, "-9223372036854775808 is reserved for 'no value'"),
        (str(ABSENT), "-9223372036854775808 is reserved for 'no value'"),
    ],
)
def test_what_is_no_int64_id_is_refused_by_name(value: object, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        to_keys([1, value], ID_TYPE_INT64)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300
    with pytest.raises(InvalidInput, match=re.escape(words)):
        to_keys(["1", value], ID_TYPE_INT64)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array([1, 2**63], dtype=np.uint64), "9223372036854775808 does not fit"),
        (np.array([1, ABSENT]), "reserved"),
        (np.array([1.0, 2.0]), "float"),
        (np.array([True]), "bool"),
    ],
)
def test_arrays_are_refused_like_single_ids(values: np.ndarray, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        to_keys(values, ID_TYPE_INT64)


@given(values=st.lists(INT64))
def test_arrays_and_lists_have_the_same_keys(values: list[int]) -> None:
    assert to_keys(np.array(values, dtype=np.int64), ID_TYPE_INT64).tolist() == to_keys(values, ID_TYPE_INT64).tolist() == values
    assert to_keys([str(value) for value in values], ID_TYPE_INT64).tolist() == values


@given(text=TEXT)
def test_a_string_key_is_xxhash64_of_its_normal_form(text: str) -> None:
    expected = np.uint64(xxhash.xxh64_intdigest(unicodedata.normalize("NFC", text).encode())).astype(np.int64)
    assert key_of(text, ID_TYPE_STRING) == expected
    assert key_of(unicodedata.normalize("NFD", text), ID_TYPE_STRING) == key_of(unicodedata.normalize("NFC", text), ID_TYPE_STRING)


def test_keys_of_strings_stay_what_they_were() -> None:
    """Rows on disk carry them."""
    assert [key_of(text, ID_TYPE_STRING) for text in ("", "user-1", "été")] == [
        -1205034819632174695, -6812973808080884760, -1420242354991543887
    ]  # fmt: skip


def test_two_encodings_of_one_word_are_one_id_and_near_misses_are_others() -> None:
    assert key_of("caf\u00e9", ID_TYPE_STRING) == key_of("cafe\u0301", ID_TYPE_STRING)
    others = ["café", "cafe", "café ", " café", "café\0", "\0café", "CAFÉ", "café😀", "😀", "7", "07", ""]
    assert len(set(to_keys(others, ID_TYPE_STRING).tolist())) == len(others)


@pytest.mark.parametrize(("value", "words"), [(7, "int"), (float("nan"), "float"), (None, "NoneType"), ("a\ud800", "lone surrogate")])
def test_what_is_no_text_is_refused_by_name(value: object, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        key_of(value, ID_TYPE_STRING)


def test_an_undeclared_type_is_refused() -> None:
    with pytest.raises(InvalidInput, match="declare int64 or string"):
        key_of("7", ID_TYPE_UNSPECIFIED)


PARTS = st.tuples(TEXT, INT64, TEXT, st.integers(0, 2**62))


@given(one=PARTS, other=PARTS)
def test_only_equal_impressions_share_a_name(one: tuple[str, int, str, int], other: tuple[str, int, str, int]) -> None:
    assert (example_id(*one) == example_id(*other)) == (one == other)
    assert len(example_id(*one)) == 16


def test_a_letter_that_moves_between_the_parts_changes_the_name() -> None:
    assert example_id("ab", 1, "c", 5) != example_id("a", 1, "bc", 5)
    assert example_id("a\0", 1, "c", 5) != example_id("a", 1, "\0c", 5)


def test_many_names_are_the_names_of_each() -> None:
    rows = [("r1", 1, "feed", 5), ("r1", 2, "feed", 5), ("r2", -1, "reels", 6)]
    assert example_ids(*zip(*rows, strict=True)) == [example_id(*row) for row in rows]


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        example_ids(["r1", "r2"], [1], ["feed"], [5])


def test_a_request_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidInput, match="lone surrogate"):
        example_id("r\ud800", 1, "feed", 5)
