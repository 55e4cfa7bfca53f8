"""Runs rivals alternately, and writes what a reader needs to repeat a figure.

Knows clocks and machines. Does not know what is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli.console import table

_FILE_WIDTH = 160
"""Columns of a table that is not written to a terminal."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall seconds of one rival: median and spread over rounds."""

    median: float
    low: float
    high: float
    rounds: int


def alternate(rivals: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, Timing]:
    """Times rivals in turn, so that a noisy minute hurts all of them; one untimed round first."""
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(rounds + 1):
        for name, run in rivals.items():
            start = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return {
        name: Timing(statistics.median(values), min(values), max(values), rounds) for name, values in seconds.items()
    }


def peak_megabytes(run: Callable[[], object]) -> float | None:
    """Memory that a run needs at once beyond what the process held before, in MB; None where the system does not say."""
    if sys.platform != "linux":
        return None
    ctypes.CDLL(None).malloc_trim(0)  # else it would reuse what earlier runs left
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident("VmRSS")
    run()
    return (_resident("VmHWM") - before) / 1e6


def _resident(field: str) -> int:
    line = next(line for line in _read("/proc/self/status").splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def parser(description: str) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--quick", action="store_true", help="a size for checking shape, not figures; under 3 minutes")
    made.add_argument("--json", type=Path, metavar="OUT", help="write the result here")
    return made


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of the known names, separated by commas."""
    known = list(known)

    def split(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))} is not known; choose of {', '.join(known)}")
        return found

    return split


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
    }


def finish(result: dict[str, Any], *, out: Path | None, columns: list[str], rows: list[list[object]]) -> None:
    """Prints the table and writes the JSON, with command and machine."""
    result |= {"command": " ".join(["python", "-m", *_command()]), "machine": machine(), "written": int(time.time())}
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table(str(result["benchmark"]), columns, rows))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1, sort_keys=True, default=_plain) + "\n")


def _command() -> list[str]:
    return [f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]


def _plain(value: object) -> object:
    if isinstance(value, Timing):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no plain form; convert it before finish()")


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""
