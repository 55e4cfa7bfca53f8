"""Turns the ids that teams write into int64 keys, and names examples.

Knows how ids are written. Does not know what they identify.

An int64 id is its own key; a string's key is xxhash64 of its NFC-normalized UTF-8. Inside the platform only keys travel,
never through a float. One int64 is not a legal id: `ABSENT`, which stands for "no value" in feature columns.
"""

from __future__ import annotations

import re
import struct
import unicodedata
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import xxhash
from gem.schema.v1.dataset_spec_pb2 import ID_TYPE_INT64, ID_TYPE_STRING, IdType

from feature_store.errors import InvalidInput

Keys = npt.NDArray[np.int64]

ABSENT = -(2**63)
"""Key that means "no value"."""
_LOW, _HIGH = -(2**63), 2**63 - 1
_HEAD = struct.Struct("<4q")
_LONGEST = 100
"""Characters of a decimal id that are worth reading; Python refuses some thousands of digits."""
_SHORT = 18
"""Digits that always fit in 64 bits."""
_DECIMAL = re.compile(r"[+-]?[0-9]+")


def key_of(value: object, id_type: IdType) -> int:
    """The key of one id.

    Raises:
        InvalidInput: it is not written as the type demands, or is the reserved id.
    """
    if id_type == ID_TYPE_STRING:
        return _string_key(value)
    if id_type == ID_TYPE_INT64:
        return _int64_key(value)
    raise InvalidInput(f"id type {id_type} is not known; declare int64 or string in the spec")


def to_keys(values: Sequence[object] | npt.NDArray[np.generic], id_type: IdType) -> Keys:
    """Keys [n] of n ids.

    Raises:
        InvalidInput: an id is not written as the type demands; names the first one.
    """
    if id_type == ID_TYPE_INT64 and isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        return _from_integers(values)
    if id_type == ID_TYPE_INT64 and _are_short_decimals(values):
        return np.array(list(map(int, values)), dtype=np.int64)
    return np.fromiter((key_of(value, id_type) for value in values), dtype=np.int64, count=len(values))


def example_id(request_id: str, ad_key: int, surface: str, event_ms: int) -> bytes:
    """Name of an impression: xxh128 of its request, ad, surface and time, 16 bytes.

    Parts are preceded by their lengths, so that no two impressions spell the same bytes.

    Raises:
        InvalidInput: a text is not valid Unicode.
    """
    try:
        request, place = request_id.encode(), surface.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{request_id!r} or {surface!r} holds a lone surrogate; send valid Unicode") from error
    return xxhash.xxh128_digest(_HEAD.pack(len(request), len(place), ad_key, event_ms) + request + place)


def example_ids(
    request_ids: Iterable[str], ad_keys: Iterable[int], surfaces: Iterable[str], event_ms: Iterable[int]
) -> list[bytes]:
    """Names of n impressions."""
    rows = zip(request_ids, ad_keys, surfaces, event_ms, strict=True)
    return [example_id(request, int(ad), surface, int(when)) for request, ad, surface, when in rows]


def _string_key(value: object) -> int:
    if not isinstance(value, str):
        raise InvalidInput(f"id {value!r} is {type(value).__name__}; a string id must be text")
    try:
        normal = unicodedata.normalize("NFC", value).encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"id {value!r} holds a lone surrogate; send valid Unicode") from error
    key = xxhash.xxh64_intdigest(normal)
    signed = key - 2**64 if key > _HIGH else key
    return signed if signed != ABSENT else ABSENT + 1


def _int64_key(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str, np.integer)):
        raise InvalidInput(f"id {value!r} is {type(value).__name__}; an int64 id must be an integer or decimal text")
    if isinstance(value, str) and not _DECIMAL.fullmatch(value):
        raise InvalidInput(f"id {value!r} is not a decimal integer; declare the entity as string or fix the id")
    key = int(value) if not isinstance(value, str) or len(value) <= _LONGEST else _HIGH + 1
    if not _LOW <= key <= _HIGH:
        raise InvalidInput(f"id {str(value)[:_LONGEST]!r} does not fit in 64 bits; declare the entity as string")
    if key == ABSENT:
        raise InvalidInput(f"id {key} is reserved for 'no value'; renumber it, or declare the entity as string")
    return key


def _are_short_decimals(values: Iterable[object]) -> bool:
    """Texts of one to eighteen digits, all of which fit: what a thousand candidates are, checked without a loop."""
    texts = [*values]
    if set(map(type, texts)) != {str}:
        return False
    words = cast(list[str], texts)
    digits = "".join(words)
    return digits.isascii() and digits.isdecimal() and min(map(len, words)) > 0 and max(map(len, words)) <= _SHORT


def _from_integers(values: npt.NDArray[np.generic]) -> Keys:
    if values.dtype == np.uint64 and (values > np.uint64(_HIGH)).any():
        bad = int(cast(npt.NDArray[np.uint64], values).max())
        raise InvalidInput(f"id {bad} does not fit in 64 bits; declare the entity as string")
    keys = values.astype(np.int64)
    if (keys == ABSENT).any():
        raise InvalidInput(f"id {ABSENT} is reserved for 'no value'; renumber it, or declare the entity as string")
    return keys
