"""Writes a configuration as JSON and reads it back, strictly.

Knows frozen dataclasses of numbers, words, tuples and each other. Does not know what any field means.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from feature_store.errors import InvalidInput

C = TypeVar("C")


def dump(config: object) -> str:
    """A dataclass as JSON with sorted keys: equal configurations give equal text."""
    return json.dumps(asdict(cast(Any, config)), sort_keys=True)


def parse(kind: type[C], text: str) -> C:
    """A dataclass from its JSON; absent fields take their defaults.

    Raises:
        InvalidInput: a key is unknown, or a value has another type than its field (true is not 1).
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{kind.__name__} is not JSON: {error}") from error
    return cast(C, _read(kind, value, kind.__name__))


def differences(first: object, second: object) -> list[str]:
    """Fields in which two configurations of one kind differ, as `name: a → b`."""
    one, two = asdict(cast(Any, first)), asdict(cast(Any, second))
    return [f"{name}: {one[name]!r} → {two[name]!r}" for name in one if one[name] != two[name]]


def _read(hint: Any, value: object, where: str) -> object:
    origin = get_origin(hint)
    if is_dataclass(hint):
        return _dataclass(cast(type[object], hint), value, where)
    if origin in (Union, types.UnionType):
        return _union(get_args(hint), value, where)
    if origin is tuple:
        return _tuple(get_args(hint), value, where)
    if origin is Literal:
        if value not in get_args(hint):
            raise InvalidInput(f"{where} is {value!r}; it must be one of {list(get_args(hint))}")
        return value
    return _plain(hint, value, where)


def _plain(kind: Any, value: object, where: str) -> object:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind not in (int, float, bool, str):
        raise InvalidInput(f"{where} has type {kind}, which is not a configuration's; use plain values")
    if type(value) is not kind:
        raise InvalidInput(f"{where} is {value!r}; it must be {kind.__name__}, not {type(value).__name__}")
    return value


def _dataclass(kind: type[object], value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{where} is {value!r}; it must be the fields of {kind.__name__}")
    hints = get_type_hints(kind)
    known = [field.name for field in fields(cast(Any, kind)) if field.init]
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise InvalidInput(f"{where} has unknown fields {unknown}; it knows {known}")
    return kind(**{name: _read(hints[name], each, f"{where}.{name}") for name, each in value.items()})


def _union(arms: tuple[Any, ...], value: object, where: str) -> object:
    if value is None and type(None) in arms:
        return None
    return _read(next(arm for arm in arms if arm is not type(None)), value, where)


def _tuple(arms: tuple[Any, ...], value: object, where: str) -> object:
    if not isinstance(value, (list, tuple)):
        raise InvalidInput(f"{where} is {value!r}; it must be a list")
    if len(arms) == 2 and arms[1] is Ellipsis:
        return tuple(_read(arms[0], each, f"{where}[{index}]") for index, each in enumerate(value))
    if len(arms) != len(value):
        raise InvalidInput(f"{where} has {len(value)} values; it must have {len(arms)}")
    return tuple(_read(arm, each, f"{where}[{index}]") for index, (arm, each) in enumerate(zip(arms, value, strict=True)))
