"""Reads messages from YAML as people write it, strictly: every mistake is named with its line and the way out.

Knows messages by their descriptors alone. Does not know what they mean.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import yaml
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from feature_store.errors import InvalidInput

M = TypeVar("M", bound=Message)


def parse_yaml(
    text: str, kind: type[M], *, name: str = "yaml", check: Callable[[M], Iterator[str]] = lambda message: iter(())
) -> M:
    """A message from YAML, strictly: unknown or repeated keys and values of a wrong type are errors.

    `check` yields further problems of the whole message as `path: text`; a list's items are named by index or by their
    `name`, and each problem is given the line of the longest part of its path that the file has. Enum values are written without their prefix, in any case.

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
    if not problems and node is not None:
        lines = dict(_lines(node, ""))
        problems.extend(_located(problem, lines) for problem in check(message))
    if problems:
        raise InvalidInput(f"{name} has {len(problems)} problem(s):\n  " + "\n  ".join(problems))
    return message


def _lines(node: yaml.Node, path: str) -> Iterator[tuple[str, int]]:
    """Line of every path of the file."""
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            where = f"{path}.{key.value}" if path else str(key.value)
            yield from _lines(value, where)
            yield where, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _lines(item, f"{path}[{index}]")
            if name := _name_of(item):
                yield from _lines(item, f"{path}.{name}")


def _name_of(node: yaml.Node) -> str:
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((str(value.value) for key, value in pairs if key.value == "name"), "")


def _located(problem: str, lines: dict[str, int]) -> str:
    """The problem behind the line of its path, or of the nearest part of the path above it."""
    path = problem.split(": ")[0]
    while path and path not in lines:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return f"line {lines.get(path, 1)}: {problem}"


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
            problems.append(_at(key_node, where, _unknown(key, list(fields))))
        else:
            _set(message, fields[key], value, where, problems)
        seen.add(key)


def _unknown(key: str, names: list[str]) -> str:
    known = sorted(names)
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
    value = _value(node)
    accepted = _TYPES[field.cpp_type]
    fits = isinstance(value, accepted) and (accepted is bool or not isinstance(value, bool))
    if fits and isinstance(value, int) and accepted is int:
        bits = 32 if field.cpp_type == FieldDescriptor.CPPTYPE_INT32 else 64
        fits = -(2 ** (bits - 1)) <= value < 2 ** (bits - 1)
    elif fits and isinstance(value, float):
        fits = math.isfinite(value)
    if not fits:
        problems.append(_at(node, path, f"{node.value!r} must be {_WANTED[field.cpp_type]}"))
        return None
    return value


def _value(node: yaml.ScalarNode) -> Any:
    """What YAML reads; nothing where it cannot (an impossible date, a tag of some other program)."""
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (ValueError, yaml.YAMLError):
        return None


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
    FieldDescriptor.CPPTYPE_DOUBLE: "a finite number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_ENUM: "one of the known words",
}
