"""Shows people progress with an estimate of the end, and machines one JSON object.

Knows the terminal. Does not know what is being done.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_FILE_WIDTH = 160
"""Columns of a table that is not written to a terminal."""
Advance = Callable[[int, int], None]


class Console:
    """Where a command speaks: news on stderr, its result on stdout; with `as_json` the result is one JSON object."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._err = RichConsole(stderr=True, highlight=False)
        self._out = RichConsole(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)

    def say(self, text: str) -> None:
        """A line of news."""
        self._err.print(text)

    @contextmanager
    def progress(self, title: str) -> Iterator[Advance]:
        """A bar with elapsed and remaining time; yields a callback (done, total)."""
        columns = (
            TextColumn("{task.description:<28}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._err, refresh_per_second=4) as bar:
            task = bar.add_task(title, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    def result(self, value: Mapping[str, Any], *tables: Table) -> None:
        """The command's result: tables for people, `value` for machines."""
        if self.as_json:
            sys.stdout.write(as_json_line(value))
            return
        for table in tables:
            self._out.print(table)


def as_json_line(value: Mapping[str, Any]) -> str:
    """A line of JSON as the standard has it: a number that is not finite is null, and `<its name>_is` says which it was."""
    return json.dumps(_finite(value), sort_keys=True, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        odd = {f"{key}_is": str(each) for key, each in value.items() if _is_odd(each)}
        return {**{str(key): _finite(each) for key, each in value.items()}, **odd}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if _is_odd(value) else value


def _is_odd(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table whose first column is text and whose others are right-aligned."""
    made = Table(title=title, title_justify="left", pad_edge=False, min_width=len(title))
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(cell(value) for value in row))
    return made


def cell(value: object) -> str:
    """A value as a short text; an en dash where there is none."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
