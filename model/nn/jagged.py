"""Lays jagged sequences out for dense arithmetic without padding them to the longest.

Knows offsets. Does not know what a token is.

T tokens packed over R sequences, L padded length of a bucket, P = rows · L padded places of a bucket.
Sequences are grouped by length so that a bucket wastes less than half of its places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Bucket(NamedTuple):
    """Sequences of similar length, padded to the longest of them."""

    rows: Tensor
    """[r] sequences."""
    tokens: Tensor
    """[r, L] token of each place; T (one past the last) where there is none."""
    valid: Tensor
    """[r, L]"""


class Jagged(NamedTuple):
    """The index maps of R packed sequences, computed once a batch."""

    offsets: Tensor
    """[R+1]"""
    sequence: Tensor
    """[T] sequence of each token."""
    position: Tensor
    """[T] place of each token in its sequence."""
    buckets: tuple[Bucket, ...]
    unpad: Tensor
    """[T] where each token lies among the places of all buckets, in bucket order."""

    @property
    def num_sequences(self) -> int:
        """R."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """[R]"""
        return self.offsets.diff()


def jagged(offsets: Tensor) -> Jagged:
    """Index maps of sequences given by offsets [R+1], int64."""
    lengths = offsets.diff()
    total = int(offsets[-1]) if len(offsets) else 0
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)
    position = torch.arange(total, device=offsets.device) - offsets[:-1][sequence]
    buckets: list[Bucket] = []
    unpad = torch.zeros(total, dtype=torch.int64, device=offsets.device)
    start = 0
    for rows in _by_length(lengths):
        bucket = _bucket(offsets, rows, total)
        places = torch.arange(start, start + bucket.tokens.numel(), device=offsets.device)
        unpad[bucket.tokens[bucket.valid]] = places.view_as(bucket.tokens)[bucket.valid]
        start += bucket.tokens.numel()
        buckets.append(bucket)
    return Jagged(offsets, sequence, position, tuple(buckets), unpad)


def pad(values: Tensor, bucket: Bucket) -> Tensor:
    """Places [r, L, …] of a bucket from tokens [T, …]; zeros where there is none."""
    zero = values.new_zeros(1, *values.shape[1:])
    return torch.cat([values, zero])[bucket.tokens]


def unpad(parts: list[Tensor], layout: Jagged) -> Tensor:
    """Tokens [T, …] from the places [r, L, …] of every bucket."""
    if not parts:
        raise ValueError("no bucket to take tokens from; a batch without tokens has nothing to unpad")
    return torch.cat([part.flatten(0, 1) for part in parts])[layout.unpad]


def reverse(offsets: Tensor) -> Tensor:
    """[T] index that turns every sequence around."""
    lengths = offsets.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)
    place = torch.arange(int(offsets[-1]), device=offsets.device)
    return offsets[:-1][sequence] + offsets[1:][sequence] - 1 - place


def newest(offsets: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Rows to keep, and their offsets, so that sequences stored oldest first keep their newest `limit` tokens."""
    lengths = offsets.diff()
    kept = lengths.clamp(max=limit)
    out = torch.zeros_like(offsets)
    out[1:] = kept.cumsum(0)
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), kept)
    place = torch.arange(int(out[-1]), device=offsets.device) - out[:-1][sequence]
    return offsets[1:][sequence] - kept[sequence] + place, out


def _by_length(lengths: Tensor) -> list[Tensor]:
    """Sequences with tokens, grouped so that the shortest of a group is more than half as long as the longest."""
    rows = torch.nonzero(lengths).flatten()
    if not len(rows):
        return []
    level = torch.log2(lengths[rows].double()).ceil().long()
    return [rows[level == value] for value in level.unique().tolist()]


def _bucket(offsets: Tensor, rows: Tensor, total: int) -> Bucket:
    lengths = offsets.diff()[rows]
    place = torch.arange(int(lengths.max()), device=offsets.device)
    valid = place < lengths[:, None]
    tokens = torch.where(valid, offsets[rows][:, None] + place, total)
    return Bucket(rows, tokens, valid)
