"""The tree of errors: every one bound to a status that gRPC has and a reason of its own."""

from __future__ import annotations

import re

import grpc
import pytest

from feature_store import errors
from feature_store.errors import GemError

ALL = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GemError)),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", ALL)
def test_an_error_has_a_status_of_grpc_and_a_stable_reason(kind: type[GemError]) -> None:
    assert kind.code in grpc.StatusCode.__members__
    assert re.fullmatch(r"[A-Z][A-Z0-9_]{0,62}", kind.reason)


def test_no_two_errors_share_a_reason() -> None:
    assert len({kind.reason for kind in ALL}) == len(ALL)


def test_the_tree_is_drawn_as_it_is() -> None:
    drawn = dict(re.findall(r"── (\w+) +([A-Z_]+) ", str(errors.__doc__)))
    assert drawn == {kind.__name__: kind.code for kind in ALL if kind is not GemError}


def test_variables_of_a_message_travel_as_text() -> None:
    error = errors.ResourceExhausted("1001 candidates exceed 1000", count=1001, limit=1000)
    assert error.metadata == {"count": "1001", "limit": "1000"}
    assert str(error) == "1001 candidates exceed 1000"


def test_bad_input_is_a_value_error_and_a_peer_that_fails_is_not() -> None:
    assert issubclass(errors.UnknownSurface, ValueError)
    assert not issubclass(errors.NotReady, ValueError)
