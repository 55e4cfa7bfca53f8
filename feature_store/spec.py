"""Reads a dataset spec: YAML as people write it, checked against the contract, and hashed.

Knows the rules of a spec and where in the file each was broken. Does not know the data.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import xxhash
import yaml
from gem.schema.v1 import dataset_spec_pb2 as pb
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from feature_store.errors import InvalidInput, UnknownSurface

M = TypeVar("M", bound=Message)
IMPRESSION = "impression"
"""The event source that is derived from shown ads and carries outcome bits."""
ENTITIES = ("user", "ad", "ad_group", "campaign", "account")
_BUILT_IN_KEYS = ("user", "surface")


@dataclass(frozen=True)
class Spec:
    """A checked dataset spec with lookups. Equal messages have equal hashes."""

    message: pb.DatasetSpec

    @cached_property
    def hash(self) -> bytes:
        """16 bytes; every artefact and message that depends on the spec carries them."""
        return xxhash.xxh128_digest(self.message.SerializeToString(deterministic=True))

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


def parse_yaml(
    text: str, kind: type[M], *, name: str = "yaml", check: Callable[[M], Iterator[str]] = lambda message: iter(())
) -> M:
    """A message from YAML, strictly: unknown or repeated keys and values of a wrong type are errors.

    `check` yields further problems of the whole message. Enum values are written without their prefix, in any case.

    Raises:
        InvalidInput: lists every problem with its line.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise InvalidInput(f"{name} is not YAML: {error}") from error
    message, problems = kind(), []
    if node is None:
        problems.append("line 1: the file is empty; write at least `name:`")
    else:
        _fill(message, node, "", problems)
    if not problems:
        problems.extend(check(message))
    if problems:
        raise InvalidInput(f"{name} has {len(problems)} problem(s):\n  " + "\n  ".join(problems))
    return message


def _at(node: yaml.Node, path: str, text: str) -> str:
    return f"line {node.start_mark.line + 1}: {path or 'top level'}: {text}"


def _fill(message: Message, node: yaml.Node, path: str, problems: list[str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        problems.append(_at(node, path, "must be a mapping of keys to values"))
        return
    seen: set[str] = set()
    fields = message.DESCRIPTOR.fields_by_name
    for key_node, value in node.value:
        key = str(key_node.value)
        where = f"{path}.{key}" if path else key
        if key in seen:
            problems.append(_at(key_node, where, "is there twice; keep one"))
        elif key not in fields:
            problems.append(_at(key_node, where, _unknown(key, message.DESCRIPTOR)))
        else:
            _set(message, fields[key], value, where, problems)
        seen.add(key)


def _unknown(key: str, descriptor: Descriptor) -> str:
    known = sorted(descriptor.fields_by_name)
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys are {known}"
    return f"unknown key; {hint}"


def _set(message: Message, field: FieldDescriptor, node: yaml.Node, path: str, problems: list[str]) -> None:
    target = getattr(message, field.name)
    oneof = field.containing_oneof
    if oneof and message.WhichOneof(oneof.name):
        problems.append(_at(node, path, f"only one of {[f.name for f in oneof.fields]} may be given"))
    elif field.message_type and field.message_type.GetOptions().map_entry:
        _fill_map(target, field, node, path, problems)
    elif field.is_repeated:
        _fill_list(target, field, node, path, problems)
    elif field.message_type:
        target.SetInParent()
        if not (isinstance(node, yaml.ScalarNode) and node.value == ""):
            _fill(target, node, path, problems)
    else:
        value = _scalar(field, node, path, problems)
        if value is not None:
            setattr(message, field.name, value)


def _fill_map(target: Any, field: FieldDescriptor, node: yaml.Node, path: str, problems: list[str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        problems.append(_at(node, path, "must be a mapping of names to values"))
        return
    value_field = field.message_type.fields_by_name["value"]
    seen: set[str] = set()
    for key_node, value in node.value:
        key, where = str(key_node.value), f"{path}.{key_node.value}"
        if key in seen:
            problems.append(_at(key_node, where, "is there twice; keep one"))
        elif value_field.message_type:
            _fill(target[key], value, where, problems)
        elif (scalar := _scalar(value_field, value, where, problems)) is not None:
            target[key] = scalar
        seen.add(key)


def _fill_list(target: Any, field: FieldDescriptor, node: yaml.Node, path: str, problems: list[str]) -> None:
    if not isinstance(node, yaml.SequenceNode):
        problems.append(_at(node, path, "must be a list"))
        return
    for index, item in enumerate(node.value):
        where = f"{path}[{index}]"
        if field.message_type:
            _fill(target.add(), item, where, problems)
        elif (scalar := _scalar(field, item, where, problems)) is not None:
            target.append(scalar)


def _scalar(field: FieldDescriptor, node: yaml.Node, path: str, problems: list[str]) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        problems.append(_at(node, path, f"must be {_WANTED[field.cpp_type]}"))
        return None
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return _enum(field, node, path, problems)
    value = yaml.SafeLoader("").construct_object(node, deep=True)  # type: ignore[no-untyped-call]  # PyYAML is untyped here
    accepted = _TYPES[field.cpp_type]
    fits = isinstance(value, accepted) and (accepted is bool or not isinstance(value, bool))
    if fits and isinstance(value, int) and accepted is int:
        bits = 32 if field.cpp_type == FieldDescriptor.CPPTYPE_INT32 else 64
        fits = -(2 ** (bits - 1)) <= value < 2 ** (bits - 1)
    if not fits:
        problems.append(_at(node, path, f"{node.value!r} must be {_WANTED[field.cpp_type]}"))
        return None
    return value


def _enum(field: FieldDescriptor, node: yaml.ScalarNode, path: str, problems: list[str]) -> int | None:
    values = field.enum_type.values
    prefix = values[0].name.removesuffix("UNSPECIFIED")
    names = {value.name.removeprefix(prefix).lower(): value.number for value in values if value.number}
    number = names.get(node.value.lower())
    if number is None:
        problems.append(_at(node, path, f"{node.value!r} must be one of {sorted(names)}"))
    return number


_TYPES: dict[int, Any] = {
    FieldDescriptor.CPPTYPE_STRING: str,
    FieldDescriptor.CPPTYPE_INT64: int,
    FieldDescriptor.CPPTYPE_INT32: int,
    FieldDescriptor.CPPTYPE_DOUBLE: (int, float),
    FieldDescriptor.CPPTYPE_BOOL: bool,
}
_WANTED: dict[int, str] = {
    FieldDescriptor.CPPTYPE_STRING: "text (quote numbers)",
    FieldDescriptor.CPPTYPE_INT64: "a whole number of 64 bits",
    FieldDescriptor.CPPTYPE_INT32: "a whole number of 32 bits",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_ENUM: "one of the known words",
}


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
    keys = {f.name for f in spec.features if f.owner == pb.OWNER_AD and f.HasField("id")} | set(_BUILT_IN_KEYS)
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
        for name in aggregate.by:
            if name not in keys:
                yield f"{where}.by: {name!r} is not a key; use one of {sorted(keys)}"
