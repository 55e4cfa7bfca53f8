"""Packs rows of users and ads into bytes, so that one multi-get and one pass over a buffer read a thousand of them.

Knows columns. Does not know which store holds the bytes.

A row holds what `feature_store.log.Entities` gathers: keys of id features, dense values, and the times ages count from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash
from gem.schema.v1.dataset_spec_pb2 import OWNER_USER

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
                ("valid_from_ms", "<i8"),
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

    def encode(self, entities: Entities, rows: Ints, valid_from_ms: Ints) -> list[bytes]:
        """Bytes of some version rows of a table."""
        packed = np.zeros(len(rows), dtype=self.dtype)
        packed["digest"], packed["valid_from_ms"] = self.digest, valid_from_ms
        packed["ids"], packed["births_ms"] = entities.ids[rows], entities.births_ms[rows]
        packed["dense"] = entities.dense[rows]
        return [row.tobytes() for row in packed]

    def decode(self, values: Sequence[bytes | None], keys: Ints, at_ms: int) -> tuple[Ints, Floats, npt.NDArray[np.bool_]]:
        """Ids [n, ·], dense [n, ·] with ages at an instant, and which rows were there [n].

        A row that is not there, or of another shape, keeps its key and has no other value; the same as in replay.
        """
        blank = bytes(self.dtype.itemsize)
        whole = [v if v is not None and len(v) == len(blank) else blank for v in values]
        rows = np.frombuffer(b"".join(whole), dtype=self.dtype)
        known = rows["digest"] == self.digest
        ids = np.where(known[:, None], rows["ids"], ABSENT)
        if self.entity_column is not None:
            ids[:, self.entity_column] = keys
        dense = np.where(known[:, None], rows["dense"], np.float32("nan"))
        for column in self._age_columns:
            births = rows["births_ms"][:, column]
            born = known & (births != ABSENT)
            dense[:, column] = np.where(born, (at_ms - births) / DAY_MS, np.nan)
        return ids, dense, known

    @cached_property
    def _age_columns(self) -> list[int]:
        starts = np.cumsum([0, *(column.width for column in self.dense)])[:-1]
        return [int(start) for start, column in zip(starts, self.dense, strict=True) if column.is_age]


def ad_shape(layout: Layout) -> RowShape:
    """Shape of an ad's row: the latest version of the catalogue."""
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


def counter_key(group: int, key: int) -> str:
    """Name of a shared counter row."""
    return f"c/{group}/{key}"


def memory_key(space_id: bytes, key: int) -> str:
    """Name of a user's LoopFM memory."""
    return f"lf/{space_id.hex()}/{key}"


MEMORY_SPACES_KEY = "lf-spaces"
"""Wide row: space id in hex → bytes an entry, of every space that has memories."""
