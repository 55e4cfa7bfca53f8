"""The order in which programs of a kernel take tiles of jagged sequences."""

from __future__ import annotations

from heapq import heapreplace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.kernels.gpu import longest_first, tiles_of

SLOTS = 264
"""Programs that run at once on an H200: two to each of its multiprocessors."""


def offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def filled(sequences: int, longest: int, fill: float) -> Tensor:
    """Lengths of Meta's kernel benchmarks: uniform from (2·fill − 1) of the longest to all of it."""
    torch.manual_seed(0)
    return torch.randint(round((2 * fill - 1) * longest), longest + 1, (sequences,))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.sampled_from([4, 16]), st.randoms())
def test_every_tile_that_holds_a_token_comes_once_in_the_order_of_sequences(lengths: list[int], size: int, random: object) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    offsets = offsets_of(torch.tensor(lengths, dtype=torch.int64))
    owner, firsts = tiles_of(offsets, sum(lengths), size, torch.tensor(order, dtype=torch.int64))
    there = owner < len(lengths)
    expected = [(row, first) for row in order for first in range(0, lengths[row], size)]
    assert list(zip(owner[there].tolist(), firsts[there].tolist(), strict=True)) == expected
    assert there.tolist() == sorted(there.tolist(), reverse=True), "what is only a bound comes last"
    plain = zip(*(x.tolist() for x in tiles_of(offsets, sum(lengths), size)), strict=True)
    assert [tile for tile in plain if tile[0] < len(lengths)] == sorted(expected)


def busiest(work: Tensor, slots: int) -> float:
    """Work of the fullest slot over the mean, when the slot that is free first takes the next tile."""
    load = [0] * slots
    for each in work.tolist():
        heapreplace(load, load[0] + each)
    return max(load) * slots / sum(load)


def dealt_in_turns(work: Tensor, slots: int) -> float:
    """The same, when slots take tiles by turns."""
    sums = torch.zeros(slots).index_add_(0, torch.arange(len(work)) % slots, work.float())
    return float(sums.max() / sums.mean())


@pytest.mark.parametrize("fill", [0.5, 0.6, 0.7])
@pytest.mark.parametrize("sequences", [32, 128, 1024])
def test_the_longest_sequences_tiles_first_leave_less_to_wait_for_than_as_they_come(sequences: int, fill: float) -> None:
    """Tiles of jagged queries over their own sequence's keys, four heads."""
    lengths = filled(sequences, 1000, fill)
    offsets, work = offsets_of(lengths), {}
    for name, order in {"longest first": longest_first(offsets), "as they come": None}.items():
        owner, _ = tiles_of(offsets, int(lengths.sum()), 128, order)
        work[name] = (lengths[owner[owner < sequences]] + 63) // 64
    assert (work["longest first"].diff() <= 0).all()
    ours, as_they_come = (busiest(each.repeat(4), SLOTS) for each in work.values())
    assert ours <= as_they_come
    assert ours < dealt_in_turns(work["as they come"].repeat(4), SLOTS)
    assert sequences < 1024 or ours < 1.02
