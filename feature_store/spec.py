"""Reads a dataset spec: YAML as people write it, checked against the contract, and hashed.

Knows the rules of a spec and where in the file each was broken. Does not know the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import xxhash
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.errors import InvalidInput, UnknownSurface
from feature_store.strict_yaml import parse_yaml as parse_yaml

IMPRESSION = "impression"
"""The event source that is derived from shown ads and carries outcome bits."""
ENTITIES = ("user", "ad", "ad_group", "campaign", "account")
RESERVED = frozenset(
    ["example_id", "event_id", "request_id", "user_id", "user_key", "ad_id", "ad_key", "source", "surface", "position", "event_ms", "occurred_ms", "available_ms", "valid_from_ms"]
)
"""Columns of the tables themselves; no feature may take their names."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")
_BUILT_IN_KEYS = ("user", "surface")


@dataclass(frozen=True)
class Spec:
    """A checked dataset spec with lookups. Equal messages have equal hashes."""

    message: pb.DatasetSpec

    @cached_property
    def hash(self) -> bytes:
        """16 bytes; every artefact and message that depends on the spec carries them.

        Written-out defaults and the source files of an import change nothing that is built from the spec, nor its hash.
        """
        return xxhash.xxh128_digest(_canonical(self.message).SerializeToString(deterministic=True))

    @cached_property
    def surfaces(self) -> tuple[str, ...]:
        """Names, in order: a surface's index is its position."""
        return tuple(surface.name for surface in self.message.surfaces)

    @cached_property
    def objectives(self) -> tuple[str, ...]:
        """Names, in order: outcome bit k and output k belong to objective k."""
        return tuple(objective.name for objective in self.message.objectives)

    @cached_property
    def event_sources(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(source.name for source in self.message.event_sources)

    def surface_index(self, name: str) -> int:
        """Position of a surface.

        Raises:
            UnknownSurface: the spec does not have it.
        """
        if name not in self.surfaces:
            raise UnknownSurface(f"surface {name!r} is not in the spec; use one of {list(self.surfaces)}", surface=name)
        return self.surfaces.index(name)

    def objective(self, name: str) -> pb.Objective:
        """An objective by name.

        Raises:
            InvalidInput: the spec does not have it.
        """
        for objective in self.message.objectives:
            if objective.name == name:
                return objective
        raise InvalidInput(f"objective {name!r} is not in the spec; use one of {list(self.objectives)}")

    def parent_index(self, index: int) -> int | None:
        """Position of the objective that objective `index` is conditional on."""
        parent = self.message.objectives[index].parent
        return self.objectives.index(parent) if parent else None

    def id_type(self, entity_or_feature: str) -> pb.IdType:
        """How ids of an entity, or values of an id feature, are written."""
        return self._id_types.get(entity_or_feature, pb.ID_TYPE_STRING)

    @cached_property
    def _id_types(self) -> dict[str, pb.IdType]:
        entities = {name: entity.id_type for name, entity in self.message.entities.items()}
        own = {feature.name: feature.id.id_type for feature in self.message.features if feature.id.id_type}
        return {**entities, **own}

    def features(self, owner: pb.Owner, kind: str | None = None) -> list[pb.Feature]:
        """Features of an owner, optionally of one kind (id, dense, embedding), in order."""
        return [feature for own, of_kind, feature in self._features if own == owner and kind in (None, of_kind)]

    @cached_property
    def _features(self) -> tuple[tuple[pb.Owner, str | None, pb.Feature], ...]:
        return tuple((feature.owner, feature.WhichOneof("kind"), feature) for feature in self.message.features)


def load_spec(path: Path) -> Spec:
    """Reads and checks a spec.

    Raises:
        InvalidInput: lists every problem with its line, key, value and the way out.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}; give the path of a spec") from error
    return Spec(parse_yaml(text, pb.DatasetSpec, name=path.name, check=problems_of))


def _canonical(message: pb.DatasetSpec) -> pb.DatasetSpec:
    own = pb.DatasetSpec.FromString(message.SerializeToString())
    own.ClearField("tables")
    for feature in own.features:
        if feature.HasField("id"):
            feature.id.table = feature.id.table or feature.name
    for source in own.event_sources:
        source.merge_group = source.merge_group or "default"
    return own


def problems_of(spec: pb.DatasetSpec) -> Iterator[str]:
    """What is wrong with the meaning of a spec, one sentence each."""
    for what, names in (
        ("surfaces", [surface.name for surface in spec.surfaces]),
        ("objectives", [objective.name for objective in spec.objectives]),
        ("features", [feature.name for feature in spec.features]),
        ("event_sources", [source.name for source in spec.event_sources]),
        ("aggregates", [aggregate.name for aggregate in spec.aggregates]),
    ):
        yield from _names(what, names)
    for required in ("name", "surfaces", "objectives", "entities"):
        if not getattr(spec, required):
            yield f"{required}: is missing; every spec needs it"
    if len(spec.objectives) > 31:
        yield f"objectives: {len(spec.objectives)} exceed 31, the outcome bits of an event; drop some"
    yield from _entity_problems(spec)
    yield from _objective_problems(spec)
    yield from _feature_problems(spec)
    yield from _source_problems(spec)
    yield from _aggregate_problems(spec)


def _names(what: str, names: Sequence[str]) -> Iterator[str]:
    for index, name in enumerate(names):
        if not name:
            yield f"{what}[{index}].name: is empty; name it"
        elif not _NAME.fullmatch(name):
            yield f"{what}[{index}].name: {name!r} must be up to 63 ASCII letters, digits, - and _; it becomes a column and a header"
        elif name in names[:index]:
            yield f"{what}[{index}].name: {name!r} is there twice; rename one"


def _entity_problems(spec: pb.DatasetSpec) -> Iterator[str]:
    for name, entity in spec.entities.items():
        if name not in ENTITIES:
            yield f"entities.{name}: unknown entity; use {list(ENTITIES)}"
        if not entity.id_type:
            yield f"entities.{name}.id_type: is missing; write int64 or string"
    for name in ("user", "ad"):
        if name not in spec.entities:
            yield f"entities.{name}: is missing; every spec has users and ads"


def _objective_problems(spec: pb.DatasetSpec) -> Iterator[str]:
    parents = {objective.name: objective.parent for objective in spec.objectives}
    for objective in spec.objectives:
        where = f"objectives.{objective.name}"
        if objective.attribution_window_seconds < 1:
            yield f"{where}.attribution_window_seconds: {objective.attribution_window_seconds} must be at least 1"
        if objective.parent and objective.parent not in parents:
            yield f"{where}.parent: {objective.parent!r} is not an objective; use one of {sorted(parents)}"
        chain, name = {objective.name}, objective.parent
        while name in parents and name:
            if name in chain:
                yield f"{where}.parent: the parents form a circle over {name!r}; remove one"
                break
            chain.add(name)
            name = parents[name]


def _feature_problems(spec: pb.DatasetSpec) -> Iterator[str]:
    rows: dict[str, int] = {}
    for feature in spec.features:
        where, kind = f"features.{feature.name}", feature.WhichOneof("kind")
        yield from _clashes(feature, spec)
        if not feature.owner:
            yield f"{where}.owner: is missing; write user, ad or request"
        if not kind:
            yield f"{where}: has no kind; give one of id, dense, embedding"
        if kind == "embedding" and feature.embedding.dim < 1:
            yield f"{where}.embedding.dim: {feature.embedding.dim} must be at least 1"
        if kind == "id":
            table = feature.id.table or feature.name
            if feature.id.rows < 3:
                yield f"{where}.id.rows: {feature.id.rows} must be at least 3: absent, unknown and one for keys"
            elif rows.setdefault(table, feature.id.rows) != feature.id.rows:
                yield f"{where}.id.rows: {feature.id.rows} differs from {rows[table]} of table {table!r}; make them equal"


def _clashes(feature: pb.Feature, spec: pb.DatasetSpec) -> Iterator[str]:
    """Names that mean something else already."""
    where = f"features.{feature.name}"
    if feature.name in RESERVED:
        yield f"{where}.name: {feature.name!r} is a column of the tables themselves; rename the feature"
    if feature.name not in ENTITIES:
        return
    owner = pb.OWNER_USER if feature.name == "user" else pb.OWNER_AD
    if feature.owner and feature.owner != owner:
        yield f"{where}.owner: ids of {feature.name} belong to the {'user' if owner == pb.OWNER_USER else 'ad'}; correct the owner"
    declared = spec.entities[feature.name].id_type if feature.name in spec.entities else pb.ID_TYPE_UNSPECIFIED
    if feature.id.id_type and declared and feature.id.id_type != declared:
        yield f"{where}.id.id_type: differs from entities.{feature.name}.id_type; drop it here"


def _source_problems(spec: pb.DatasetSpec) -> Iterator[str]:
    ad_features = {feature.name for feature in spec.features if feature.owner == pb.OWNER_AD}
    for source in spec.event_sources:
        where = f"event_sources.{source.name}"
        if source.max_length < 1:
            yield f"{where}.max_length: {source.max_length} must be at least 1"
        for name in source.features:
            if name not in ad_features:
                yield f"{where}.features: {name!r} is not an ad feature; use one of {sorted(ad_features)}"


def _aggregate_problems(spec: pb.DatasetSpec) -> Iterator[str]:
    sources = {source.name for source in spec.event_sources} | {IMPRESSION}
    objectives = {objective.name for objective in spec.objectives}
    for aggregate in spec.aggregates:
        where, over = f"aggregates.{aggregate.name}", aggregate.WhichOneof("over")
        if not over:
            yield f"{where}: counts nothing; give a source or an objective"
        if over == "source" and aggregate.source not in sources:
            yield f"{where}.source: {aggregate.source!r} is not an event source; use one of {sorted(sources)}"
        if over == "objective" and aggregate.objective not in objectives:
            yield f"{where}.objective: {aggregate.objective!r} is not an objective; use one of {sorted(objectives)}"
        if not aggregate.statistic:
            yield f"{where}.statistic: is missing; write count, rate or recency"
        if aggregate.statistic == pb.STATISTIC_RATE and over != "objective":
            yield f"{where}.statistic: a rate is of an objective; give objective instead of source"
        if aggregate.half_life_seconds < 0 or aggregate.prior_strength < 0:
            yield f"{where}: half_life_seconds and prior_strength must not be negative"
        yield from _key_problems(aggregate, spec)


def _key_problems(aggregate: pb.Aggregate, spec: pb.DatasetSpec) -> Iterator[str]:
    where = f"aggregates.{aggregate.name}"
    keys = {f.name for f in spec.features if f.owner == pb.OWNER_AD and f.HasField("id")} | set(_BUILT_IN_KEYS)
    if aggregate.name in {feature.name for feature in spec.features}:
        yield f"{where}.name: {aggregate.name!r} is a feature too; rename one"
    if len(set(aggregate.by)) < len(aggregate.by):
        yield f"{where}.by: {list(aggregate.by)} names a key twice; drop one"
    for name in aggregate.by:
        if name not in keys:
            yield f"{where}.by: {name!r} is not a key; use one of {sorted(keys)}"
