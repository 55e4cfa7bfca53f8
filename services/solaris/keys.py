"""Turns the ids of a spec's users and ads into keys.

Knows the spec's id types. Does not know what is stored under a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gem.schema.v1.dataset_spec_pb2 import IdType

from feature_store.ids import key_of, to_keys
from feature_store.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """Ids → keys of each entity; an id that is not written as its type demands raises InvalidInput."""

    user_type: IdType
    ad_type: IdType

    def user(self, user_id: str) -> int:
        """Key of a user."""
        return key_of(user_id, self.user_type)

    def ads(self, ad_ids: Sequence[str]) -> list[int]:
        """Keys of N ads."""
        keys: list[int] = to_keys(ad_ids, self.ad_type).tolist()
        return keys


def keys_of(spec: Spec) -> Keys:
    """The keys of a spec."""
    return Keys(user_type=spec.id_type("user"), ad_type=spec.id_type("ad"))
