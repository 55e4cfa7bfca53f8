"""Keys from two keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feature_store.mixing import mix, mix_many

keys = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(keys, keys), max_size=20))
def test_many_at_once_equal_one_by_one(pairs: list[tuple[int, int]]) -> None:
    a, b = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    assert mix_many(a, b).tolist() == [mix(*pair) for pair in pairs]


def test_the_mix_stays_what_stored_rows_were_written_with() -> None:
    assert [mix(1, 2), mix(2, 1), mix(0, 0), mix(-1, 7)] == [
        -7541218347953203506,
        -4689498862643123097,
        0,
        -6669320256883009345,
    ]


def test_neighbours_get_unlike_keys() -> None:
    made = {mix(a, b) for a in range(100) for b in range(100)}
    assert len(made) == 10_000
    ones = [bin((mix(n, 5) ^ mix(n + 1, 5)) & (2**64 - 1)).count("1") for n in range(500)]
    assert 28 < np.mean(ones) < 36
