"""Reads a frozen dataclass from environment variables, naming everything that is wrong at once.

Knows names and types. Does not know what any setting means.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Settings = TypeVar("Settings")

PREFIX = "GEM_"


class SettingsError(ValueError):
    """One or more settings are missing or malformed; the message lists each of them."""


def load(cls: type[Settings], environ: Mapping[str, str]) -> Settings:
    """The settings of a process.

    A field `store` is read from GEM_STORE, unless its metadata names another variable as `env`; a field that is itself
    a dataclass is read from the same flat names. Fields may be str, int, float, bool, Path, a tuple of str (separated by
    commas), or one of these or None. An empty variable counts as absent.

    Raises:
        SettingsError: listing every missing and every malformed name.
    """
    problems: list[str] = []
    settings = _read(cls, environ, problems)
    if problems or settings is None:
        raise SettingsError(f"{cls.__name__} cannot be read:\n  " + "\n  ".join(problems))
    return settings


def variable(field: Field[Any]) -> str:
    """Name of the environment variable that a field is read from."""
    return str(field.metadata.get("env", PREFIX + field.name.upper()))


def _read(cls: type[Settings], environ: Mapping[str, str], problems: list[str]) -> Settings | None:
    hints = get_type_hints(cls)
    known = len(problems)
    values: dict[str, object] = {}
    for field in fields(cast(Any, cls)):
        hint = hints[field.name]
        if is_dataclass(hint):
            values[field.name] = _read(cast(type[object], hint), environ, problems)
            continue
        text = environ.get(variable(field), "")
        if text:
            _take(field, hint, text, values, problems)
        elif field.default is MISSING and field.default_factory is MISSING:
            problems.append(f"{variable(field)} is missing; set it to {_wanted(hint)}")
    if len(problems) > known:
        return None
    try:
        return cls(**values)
    except ValueError as error:
        problems.append(str(error))
        return None


def _take(
    field: Field[Any], hint: object, text: str, values: dict[str, object], problems: list[str]
) -> None:
    try:
        values[field.name] = _parse(hint, text)
    except ValueError:
        problems.append(f"{variable(field)} is {text!r}; it must be {_wanted(hint)}")


def _parse(hint: object, text: str) -> object:
    kind = _plain(hint)
    if get_origin(kind) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    parser = _PARSERS.get(kind)
    if parser is None:
        raise TypeError(f"settings cannot hold {kind!r}; use one of {list(_PARSERS)}")
    return parser(text)


def _plain(hint: object) -> object:
    """`T` of `T | None`, else the hint itself."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(arm for arm in get_args(hint) if arm is not type(None))
    return hint


def _wanted(hint: object) -> str:
    kind = _plain(hint)
    return _WANTED.get(kind, "a list separated by commas")


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


_PARSERS: Mapping[object, Callable[[str], object]] = {
    str: str,
    int: int,
    float: float,
    bool: _boolean,
    Path: Path,
}
_WANTED: Mapping[object, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}
