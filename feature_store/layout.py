"""Says which column of the batch holds which feature.

Knows the order of columns, from the spec alone. Does not know values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.spec import Spec

_USER_KEYS = {"user", "surface"}
_LEADING = ("ad", "ad_group", "campaign", "account")


@dataclass(frozen=True, slots=True)
class Column:
    """A feature's place in a tensor: `width` columns, 1 unless it is an embedding."""

    name: str
    feature: pb.Feature | None = None
    aggregate: pb.Aggregate | None = None
    width: int = 1

    @property
    def is_age(self) -> bool:
        """The stored value is a time in ms; the column holds the days from it to the request."""
        return self.feature is not None and self.feature.dense.age

    @property
    def is_embedding(self) -> bool:
        """It is a vector, to be projected rather than binned."""
        return self.feature is not None and self.feature.HasField("embedding")


@dataclass(frozen=True)
class Layout:
    """Columns of every tensor of the batch, in order."""

    spec: Spec

    @cached_property
    def user_ids(self) -> tuple[Column, ...]:
        """U: user id features, then request id features."""
        return _columns(self.spec.features(pb.OWNER_USER, "id") + self.spec.features(pb.OWNER_REQUEST, "id"))

    @cached_property
    def user_dense(self) -> tuple[Column, ...]:
        """UD: user and request dense features and embeddings, then aggregates by user and surface only."""
        return self.stored_user_dense + _columns(_dense(self.spec, pb.OWNER_REQUEST)) + self.user_aggregates

    @cached_property
    def stored_user_dense(self) -> tuple[Column, ...]:
        """The part of UD that the user row holds."""
        return _columns(_dense(self.spec, pb.OWNER_USER))

    @cached_property
    def user_aggregates(self) -> tuple[Column, ...]:
        """Aggregates whose keys are known without a candidate."""
        return _aggregates(self.spec, user_side=True)

    @cached_property
    def ad_ids(self) -> tuple[Column, ...]:
        """A: ad id features; ad, ad_group, campaign, account lead if declared."""
        features = self.spec.features(pb.OWNER_AD, "id")
        rank = {name: index for index, name in enumerate(_LEADING)}
        return _columns(sorted(features, key=lambda feature: rank.get(feature.name, len(rank))))

    @cached_property
    def ad_dense(self) -> tuple[Column, ...]:
        """AD: ad dense features (ages in days) and embeddings, then all other aggregates."""
        return self.stored_ad_dense + self.ad_aggregates

    @cached_property
    def stored_ad_dense(self) -> tuple[Column, ...]:
        """The part of AD that the catalogue holds."""
        return _columns(_dense(self.spec, pb.OWNER_AD))

    @cached_property
    def ad_aggregates(self) -> tuple[Column, ...]:
        """Aggregates that need the candidate."""
        return _aggregates(self.spec, user_side=False)

    @cached_property
    def event_ids(self) -> tuple[Column, ...]:
        """E: ad id features that any event source copies."""
        return tuple(column for column in self.ad_ids if column.name in self._copied)

    @cached_property
    def event_dense(self) -> tuple[Column, ...]:
        """ED: ad dense features and embeddings that any event source copies; ages are days from it to the event."""
        return tuple(column for column in self.stored_ad_dense if column.name in self._copied)

    @cached_property
    def _copied(self) -> frozenset[str]:
        return frozenset(name for source in self.spec.message.event_sources for name in source.features)


def total_width(columns: tuple[Column, ...]) -> int:
    """Number of tensor columns that some layout columns take."""
    return sum(column.width for column in columns)


def column_index(columns: tuple[Column, ...], name: str) -> int | None:
    """First tensor column of a feature; None if it has none."""
    start = 0
    for column in columns:
        if column.name == name:
            return start
        start += column.width
    return None


def _dense(spec: Spec, owner: pb.Owner) -> list[pb.Feature]:
    return [feature for feature in spec.features(owner) if not feature.HasField("id")]


def _columns(features: list[pb.Feature]) -> tuple[Column, ...]:
    return tuple(Column(feature.name, feature=feature, width=feature.embedding.dim or 1) for feature in features)


def _aggregates(spec: Spec, *, user_side: bool) -> tuple[Column, ...]:
    return tuple(
        Column(aggregate.name, aggregate=aggregate)
        for aggregate in spec.message.aggregates
        if (set(aggregate.by) <= _USER_KEYS) == user_side
    )
