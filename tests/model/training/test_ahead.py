"""The next batch is read while the last one is worked on."""

from __future__ import annotations

import threading

import pytest

from model.training.ahead import read_ahead


def test_every_key_comes_with_its_item_in_order() -> None:
    assert list(read_ahead(lambda key: key * 10, range(5))) == [(0, 0), (1, 10), (2, 20), (3, 30), (4, 40)]
    assert list(read_ahead(str, ())) == []


@pytest.mark.parametrize("at_once", [1, 2])
def test_the_next_items_are_read_while_the_last_is_worked_on_and_none_further(at_once: int) -> None:
    begun = [threading.Event() for _ in range(5)]
    for key, _ in read_ahead(lambda key: begun[key].set(), range(5), at_once=at_once):
        assert all(event.wait(10) for event in begun[: key + 1 + at_once])
        assert not any(event.is_set() for event in begun[key + 1 + at_once :])


def test_what_fails_fails_at_its_key() -> None:
    made = read_ahead(lambda key: 1 // (2 - key), range(5))
    assert [next(made), next(made)] == [(0, 0), (1, 1)]
    with pytest.raises(ZeroDivisionError):
        next(made)


def test_whoever_stops_early_leaves_no_thread() -> None:
    made = read_ahead(str, range(5))
    next(made)
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]
