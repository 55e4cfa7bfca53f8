"""Turns keys into embedding rows, and rows into vectors.

Knows tables and hashing. Does not know what a key stands for.

Row 0 is "no value", row 1 "unknown"; other keys hash to 2 … rows−1 with a salt a table, or, where the spec asks for a
vocabulary, have rows of their own if they were frequent in training and are unknown otherwise.
n keys, D width of an embedding, C columns.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from feature_store.ids import ABSENT
from model.nn.shape import IdColumn

ABSENT_ROW, UNKNOWN_ROW, FIRST_ROW = 0, 1, 2
_M1, _M2 = -4658895280553007687, -7723592293110705685
"""splitmix64's multipliers 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as int64."""


def mix64(keys: Tensor, salt: int) -> Tensor:
    """splitmix64's finalizer of keys + salt, in wrapping int64 arithmetic."""
    z = keys + salt
    z = (z ^ _shift(z, 30)) * _M1
    z = (z ^ _shift(z, 27)) * _M2
    return z ^ _shift(z, 31)


def mix64_reference(keys: npt.NDArray[np.int64], salt: int) -> npt.NDArray[np.int64]:
    """The same in uint64: the definition."""
    z = keys.astype(np.uint64) + np.uint64(salt)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).astype(np.int64)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift right."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def table_salt(table: str) -> int:
    """Salt of a table: the same wherever it is computed."""
    return zlib.crc32(table.encode()) * 0x9E3779B1


def hashed_rows(keys: Tensor, rows: int, salt: int) -> Tensor:
    """Rows [n] of keys [n] in a table of `rows` rows."""
    hashed = (mix64(keys, salt) & (2**63 - 1)) % (rows - FIRST_ROW) + FIRST_ROW
    return torch.where(keys == ABSENT, ABSENT_ROW, hashed)


class IdEmbeddings(nn.Module):
    """Embedding tables over which columns of keys are looked up; columns that name the same table share it."""

    def __init__(self, columns: Iterable[IdColumn], width: int, *, initial_std: float = 0.02) -> None:
        super().__init__()
        tables: dict[str, IdColumn] = {column.table: column for column in columns}
        self.width = width
        self._tables = dict(sorted(tables.items()))
        configs = [
            EmbeddingConfig(
                name=name, embedding_dim=width, num_embeddings=column.rows, feature_names=[name], init_fn=_normal(initial_std)
            )
            for name, column in self._tables.items()
        ]
        self.collection = EmbeddingCollection(tables=configs) if configs else None
        for name, column in self._tables.items():
            if column.min_count:
                empty = torch.empty(0, dtype=torch.int64)
                self.register_buffer(f"vocabulary_{name}", empty)

    def fit(self, keys: dict[str, Counter[int]]) -> None:
        """Sets vocabularies from key counts a table, frequent keys first.

        Raises:
            ValueError: a vocabulary has more keys than its table has rows.
        """
        for name, column in self._tables.items():
            if not column.min_count:
                continue
            frequent = sorted(k for k, n in keys.get(name, Counter()).items() if n >= column.min_count and k != ABSENT)
            if len(frequent) > column.rows - FIRST_ROW:
                raise ValueError(
                    f"vocabulary of table {name!r} has {len(frequent)} keys, its {column.rows} rows hold "
                    f"{column.rows - FIRST_ROW}; raise rows or vocabulary_min_count"
                )
            setattr(self, f"vocabulary_{name}", torch.tensor(frequent, dtype=torch.int64))

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: object) -> None:
        """Vocabularies come in the size they were saved with."""
        for name, column in self._tables.items():
            key = f"{prefix}vocabulary_{name}"
            if column.min_count and key in state:
                setattr(self, f"vocabulary_{name}", torch.empty_like(state[key]))
        super()._load_from_state_dict(state, prefix, *rest)

    def rows_of(self, table: str, keys: Tensor) -> Tensor:
        """Rows [n] of keys [n] in a table."""
        column = self._tables[table]
        if not column.min_count:
            return hashed_rows(keys, column.rows, table_salt(table))
        known: Tensor = getattr(self, f"vocabulary_{table}")
        if not len(known):
            return torch.where(keys == ABSENT, ABSENT_ROW, UNKNOWN_ROW)
        at = torch.searchsorted(known, keys.contiguous()).clamp(max=len(known) - 1)
        found = torch.where(known[at] == keys, at + FIRST_ROW, UNKNOWN_ROW)
        return torch.where(keys == ABSENT, ABSENT_ROW, found)

    def forward(self, columns: Sequence[IdColumn], keys: Sequence[Tensor], *, drop: float = 0.0) -> list[Tensor]:
        """Vectors [n_c, D] of columns of keys [n_c], any lengths; one lookup a table.

        `drop` replaces that share of the present rows by the unknown row, so that unknown ids are trained.
        """
        by_table: dict[str, list[int]] = {}
        for index, column in enumerate(columns):
            by_table.setdefault(column.table, []).append(index)
        out: list[Tensor] = [torch.empty(0)] * len(columns)
        values, lengths = [], []
        for name in self._tables:
            rows = [self.rows_of(name, keys[index]) for index in by_table.get(name, [])]
            values.extend(rows)
            lengths.append(sum(len(part) for part in rows))
        if self.collection is None or not values:
            return out
        flat = torch.cat(values)
        if drop:
            dropped = (torch.rand(len(flat), device=flat.device) < drop) & (flat != ABSENT_ROW)
            flat = torch.where(dropped, UNKNOWN_ROW, flat)
        features = KeyedJaggedTensor(keys=list(self._tables), values=flat, lengths=torch.tensor(lengths, device=flat.device))
        found = self.collection(features)
        for name, indices in by_table.items():
            parts = found[name].values().split([len(keys[index]) for index in indices])
            for index, part in zip(indices, parts, strict=True):
                out[index] = part
        return out


def unknown_counts(embeddings: IdEmbeddings, columns: Sequence[IdColumn], keys: Sequence[Tensor]) -> dict[str, int]:
    """Keys a column that have no row of their own."""
    return {
        column.name: int((embeddings.rows_of(column.table, key) == UNKNOWN_ROW).sum())
        for column, key in zip(columns, keys, strict=True)
    }


def collision_counts(embeddings: IdEmbeddings, columns: Sequence[IdColumn], keys: Sequence[Tensor]) -> dict[str, int]:
    """Distinct keys a column minus the distinct rows they fall on."""
    counts = {}
    for column, key in zip(columns, keys, strict=True):
        distinct = key[key != ABSENT].unique()
        rows = embeddings.rows_of(column.table, distinct)
        counts[column.name] = len(distinct) - len(rows[rows >= FIRST_ROW].unique()) - int((rows == UNKNOWN_ROW).sum())
    return counts


def _normal(std: float):  # type: ignore[no-untyped-def]  # torchrec types init_fn as Callable of an in-place tensor op
    return lambda weight: nn.init.normal_(weight, std=std)
