"""Packs rows of users and ads into bytes, so that one multi-get and one pass over a buffer read a thousand of them.

Knows columns. Does not know which store holds the bytes.

A row holds what `feature_store.log.Entities` gathers: keys of id features, dense values, and the times ages count from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import xxhash
from gem.schema.v1.dataset_spec_pb2 import OWNER_USER

from feature_store.aggregates import AggregateSet, Group
from feature_store.errors import CorruptArtefact, InvalidInput
from feature_store.ids import ABSENT
from feature_store.layout import Column, Layout, total_width
from feature_store.log import DAY_MS, Entities

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RowShape:
    """Columns of a packed row."""

    ids: tuple[Column, ...]
    dense: tuple[Column, ...]
    entity: str
    """The id column of this name is the entity's own key."""

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """Of one row; the digest differs between shapes, so that a row of another spec reads as absent."""
        width = total_width(self.dense)
        return np.dtype(
            [
                ("digest", "<u8"),
                ("since_ms", "<i8"),
                ("ids", "<i8", (len(self.ids),)),
                ("births_ms", "<i8", (width,)),
                ("dense", "<f4", (width,)),
            ]
        )

    @cached_property
    def digest(self) -> int:
        """64 bits of the columns' names and widths."""
        names = repr([(column.name, column.width) for column in (*self.ids, *self.dense)])
        return xxhash.xxh64_intdigest(names.encode())

    @property
    def entity_column(self) -> int | None:
        """Where the entity's own key lies among the ids."""
        names = [column.name for column in self.ids]
        return names.index(self.entity) if self.entity in names else None

    def encode(self, entities: Entities, rows: Ints, since_ms: Ints) -> list[bytes]:
        """Bytes of some version rows of a table, each with the instant from which it is in force.

        A stored value is the versions of one entity one after the other, earliest first.
        """
        packed = np.zeros(len(rows), dtype=self.dtype)
        packed["digest"], packed["since_ms"] = self.digest, since_ms
        packed["ids"], packed["births_ms"] = entities.ids[rows], entities.births_ms[rows]
        packed["dense"] = entities.dense[rows]
        return [row.tobytes() for row in packed]

    def decode(
        self, values: Sequence[bytes | None], keys: Ints, at_ms: Ints | int
    ) -> tuple[Ints, Floats, npt.NDArray[np.bool_]]:
        """Ids [n, ·], dense [n, ·] with ages, and which rows were there [n], each as of its instant.

        Of several versions the last one in force counts. A row that is not there, or of another shape, keeps its key and
        has no other value; the same as in replay.
        """
        size, n = self.dtype.itemsize, len(values)
        whole = [value if value and len(value) % size == 0 else b"" for value in values]
        rows = np.frombuffer(b"".join([*whole, bytes(size)]), dtype=self.dtype)
        owner = np.repeat(np.arange(n), [len(value) // size for value in whole])
        now = np.broadcast_to(np.asarray(at_ms, dtype=np.int64), n)
        usable = np.flatnonzero((rows["digest"][:-1] == self.digest) & (rows["since_ms"][:-1] <= now[owner]))
        chosen = np.full(n, -1, dtype=np.int64)
        chosen[owner[usable]] = usable  # of repeated places the last assignment stands
        known, rows = chosen >= 0, rows[chosen]
        ids = np.where(known[:, None], rows["ids"], ABSENT)
        if self.entity_column is not None:
            ids[:, self.entity_column] = keys
        dense = np.where(known[:, None], rows["dense"], np.float32("nan"))
        for column in self._age_columns:
            births = rows["births_ms"][:, column]
            born = known & (births != ABSENT)
            dense[:, column] = np.where(born, (now - births) / DAY_MS, np.nan)
        return ids, dense, known

    @cached_property
    def _age_columns(self) -> list[int]:
        starts = np.cumsum([0, *(column.width for column in self.dense)])[:-1]
        return [int(start) for start, column in zip(starts, self.dense, strict=True) if column.is_age]


def ad_shape(layout: Layout) -> RowShape:
    """Shape of an ad's row: versions of the catalogue."""
    return RowShape(layout.ad_ids, layout.stored_ad_dense, "ad")


def user_shape(layout: Layout) -> RowShape:
    """Shape of a user's profile row."""
    own = tuple(column for column in layout.user_ids if column.feature in layout.spec.features(OWNER_USER))
    return RowShape(own, layout.stored_user_dense, "user")


def ad_key(key: int) -> str:
    """Name of an ad's row."""
    return f"a/{key}"


def profile_key(key: int) -> str:
    """Name of a user's profile row."""
    return f"u/{key}/profile"


def past_key(key: int) -> str:
    """Name of a user's versioned row of history and counters."""
    return f"u/{key}/past"


def ledger_key(key: int) -> str:
    """Name of a user's versioned row of recent facts."""
    return f"u/{key}/ledger"


@lru_cache(maxsize=16)
def counters_digest(aggregates: AggregateSet) -> int:
    """32 bits that differ between sets of counters: rows of another spec are never read as this one's."""
    shape = [
        (group.by, [each.SerializeToString(deterministic=True) for each in group.aggregates])
        for group in aggregates.groups
    ]
    return xxhash.xxh32_intdigest(repr(shape).encode())


def counter_key(digest: int, group: Group, key: int) -> str:
    """Name of a shared counter row."""
    return counter_keys(digest, group, [key])[0]


def counter_keys(digest: int, group: Group, keys: Sequence[int]) -> list[str]:
    """Names of a group's shared counter rows."""
    prefix = f"c/{digest:08x}/{'+'.join(group.by) or 'all'}/"
    return [f"{prefix}{key}" for key in keys]


def counter_slots(values: Sequence[bytes | None], group: Group) -> npt.NDArray[np.float64]:
    """Slots [n, width] of stored counter rows, versions and all; zeros for those that are not there.

    Raises:
        CorruptArtefact: a row has another length.
    """
    size = 8 * (1 + group.width)
    whole = [value or bytes(size) for value in values]
    if {*map(len, whole)} - {size}:
        raise CorruptArtefact(f"a counter row by {group.by} is not of {size} bytes; rebuild the counters from the log")
    return np.frombuffer(b"".join(whole), dtype=np.float64).reshape(-1, 1 + group.width)[:, 1:]


def memory_key(space_id: bytes, key: int) -> str:
    """Name of a user's LoopFM memory."""
    return f"lf/{space_id.hex()}/{key}"


MEMORY_SPACES_KEY = "lf-spaces"
"""Wide row: space id in hex → bytes an entry, of every space that has memories."""

STEPS_PER_UNIT = 8
"""int4 codes -8 … 7 stand for -1 … 7/8, which float32, bfloat16 and float16 hold exactly."""


def quantize_int4(z: Floats) -> npt.NDArray[np.uint8]:
    """Codes [n, d/2] of vectors [n, d] in [-1, 1]: clamp(round half to even(8 z), -8, 7), low nibble first.

    Raises:
        InvalidInput: the width is odd, or a value is not finite.
    """
    if z.shape[1] % 2 or not np.isfinite(z).all():
        raise InvalidInput(f"vectors {list(z.shape)} must have an even width and finite values")
    codes = np.clip(np.rint(z * STEPS_PER_UNIT), -8, 7).astype(np.int8).view(np.uint8) & np.uint8(15)
    return np.asarray(codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4)), dtype=np.uint8)


def dequantize_int4(packed: npt.NDArray[np.uint8]) -> Floats:
    """Vectors [n, d] of codes [n, d/2]."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), 2 * packed.shape[1]).astype(np.int8)
    signed = np.where(nibbles > 7, nibbles - 16, nibbles)
    return (signed / STEPS_PER_UNIT).astype(np.float32)
