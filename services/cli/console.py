"""Shows people progress with an estimate of the end, and machines one JSON object.

Knows the terminal. Does not know what is being done.
"""

from __future__ import annotations

import json
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
    """Where a command speaks: text on stderr, its result on stdout.

    With `as_json` the result is one JSON object and the text stays away.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._err = RichConsole(stderr=True, quiet=as_json, highlight=False)
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
            sys.stdout.write(json.dumps(value, sort_keys=True) + "\n")
            return
        for table in tables:
            self._out.print(table)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table whose first column is text and whose others are right-aligned."""
    made = Table(title=title, title_justify="left", pad_edge=False)
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
