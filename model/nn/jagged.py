"""Lays jagged sequences out for dense arithmetic without padding them to the longest.

Knows offsets. Does not know what a token is.

T tokens packed over R sequences, L padded length of a bucket, P padded places of all buckets.
Sequences are grouped by length so that a bucket wastes less than 30 % of its places; on a CPU a long one has a bucket of
its own, which wastes none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

LONG = 512
"""Tokens from which a sequence is a bucket of its own on a CPU."""


class Bucket(NamedTuple):
    """Sequences of similar length, padded to the longest of them."""

    rows: Tensor
    """[r] sequences."""
    valid: Tensor
    """[r, L] whether a place holds a token."""


class Jagged(NamedTuple):
    """The index maps of R packed sequences, computed once a batch."""

    offsets: Tensor
    """[R+1]"""
    sequence: Tensor
    """[T] sequence of each token."""
    position: Tensor
    """[T] place of each token in its sequence."""
    buckets: tuple[Bucket, ...]
    place: Tensor
    """[T] where each token lies among the places of all buckets, in bucket order."""
    token: Tensor
    """[P] token of each place; any one where there is none."""
    vacant: Tensor
    """Places without a token."""
    straight: bool
    """Whether tokens lie in the order of places already, none vacant, so that nothing needs to be copied."""

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
    lengths, device = offsets.diff(), offsets.device
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    position = torch.arange(len(sequence), device=device) - offsets[:-1][sequence]
    buckets: list[Bucket] = []
    start, places = torch.zeros_like(lengths), 0
    for rows in _by_length(lengths):
        longest = int(lengths[rows].max())
        valid = torch.arange(longest, device=device) < lengths[rows][:, None]
        start[rows] = places + longest * torch.arange(len(rows), device=device)
        buckets.append(Bucket(rows, valid))
        places += valid.numel()
    place = start[sequence] + position
    straight = len(place) == places and bool((place.diff() > 0).all())
    return Jagged(offsets, sequence, position, tuple(buckets), place, *inverse(place, places), straight)


def inverse(place: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(token of each of `size` places, places without one) from the place of each token; no place occurs twice."""
    token = place.new_full((size,), -1)
    token[place] = torch.arange(len(place), device=place.device)
    return token.clamp_min(0), torch.nonzero(token < 0).flatten()


def pad(values: Tensor, layout: Jagged) -> list[Tensor]:
    """Places [r, L, …] of every bucket from tokens [T, …]; zeros where there is none."""
    sizes = [bucket.valid.numel() for bucket in layout.buckets]
    whole = values if layout.straight else spread(values, layout.place, layout.token, layout.vacant)
    parts = whole.split(sizes)
    return [
        part.unflatten(0, bucket.valid.shape)
        for part, bucket in zip(parts, layout.buckets, strict=True)
    ]


def unpad(parts: list[Tensor], layout: Jagged) -> Tensor:
    """Tokens [T, …] from the places [r, L, …] of every bucket."""
    if not parts:
        raise ValueError("no bucket to take tokens from; a batch without tokens has nothing to unpad")
    flat = [part.flatten(0, 1) for part in parts]
    whole = torch.cat(flat) if len(flat) > 1 else flat[0]
    return whole if layout.straight else collect(whole, layout.place, layout.token, layout.vacant)


def spread(values: Tensor, place: Tensor, token: Tensor, vacant: Tensor) -> Tensor:
    """`scatter` for a map whose inverse is known: reads rows in order of their places, at half the time on a CPU."""
    out: Tensor = _Spread.apply(values, place, token, vacant)
    return out


def collect(values: Tensor, place: Tensor, token: Tensor, vacant: Tensor) -> Tensor:
    """`gather` for a map whose inverse is known; its gradient is a `spread`."""
    out: Tensor = _Collect.apply(values, place, token, vacant)
    return out


class _Spread(torch.autograd.Function):
    """Transpose of `_Collect`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, place: Tensor, token: Tensor, vacant: Tensor) -> Tensor:
        ctx.save_for_backward(place, token, vacant)
        if not len(values):
            return values.new_zeros(len(token), *values.shape[1:])
        return values.index_select(0, token).index_fill_(0, vacant, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return collect(gradient, *ctx.saved_tensors), None, None, None


class _Collect(torch.autograd.Function):
    """Transpose of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, place: Tensor, token: Tensor, vacant: Tensor) -> Tensor:
        ctx.save_for_backward(place, token, vacant)
        return values.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return spread(gradient, *ctx.saved_tensors), None, None, None


def scatter(values: Tensor, index: Tensor, size: int) -> Tensor:
    """[size, …] zeros with row i of `values` at `index[i]`; no index occurs twice."""
    out: Tensor = _Scatter.apply(values, index, size)
    return out


def gather(values: Tensor, index: Tensor) -> Tensor:
    """Rows `index` of `values`; no index occurs twice."""
    out: Tensor = _Gather.apply(values, index)
    return out


class _Scatter(torch.autograd.Function):
    """Transpose of `_Gather`: since no row meets another, neither direction accumulates."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        return values.new_zeros(size, *values.shape[1:]).index_copy_(0, index, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gather(gradient, index), None, None


class _Gather(torch.autograd.Function):
    """Transpose of `_Scatter`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = len(values)
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return scatter(gradient, index, ctx.size), None


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


def only(chosen: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the chosen tokens [T] of every sequence, and their offsets."""
    counts = torch.zeros(len(chosen) + 1, dtype=torch.int64, device=chosen.device)
    counts[1:] = chosen.cumsum(0)
    return torch.nonzero(chosen).flatten(), counts[offsets]


def _by_length(lengths: Tensor) -> list[Tensor]:
    """Sequences with tokens, grouped so that the shortest of a group is longer than 1/√2 of the longest.

    A CPU takes long ones by themselves: their arithmetic outweighs a call, and one alone needs neither mask nor copy.
    """
    alone = lengths >= (LONG if lengths.device.type == "cpu" else 2**62)
    rows = torch.nonzero((lengths > 0) & ~alone).flatten()
    level = (2 * torch.log2(lengths[rows].double())).ceil().long()
    groups = [rows[level == value] for value in level.unique().tolist()]
    return [*groups, *torch.nonzero(alone).flatten().split(1)] if alone.any() else groups
