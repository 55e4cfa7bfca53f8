"""Turns the ids of a spec's users and ads into keys.

Knows the spec's id types. Does not know what is stored under a key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from feature_store.ids import key_of
from feature_store.spec import Spec


class Keys(NamedTuple):
    """Id → key of each entity; both raise InvalidInput for an id that is not written as the spec says."""

    user: Callable[[str], int]
    ad: Callable[[str], int]


def keys_of(spec: Spec) -> Keys:
    """The keys of a spec."""
    return Keys(
        user=partial(key_of, id_type=spec.id_type("user")),
        ad=partial(key_of, id_type=spec.id_type("ad")),
    )
