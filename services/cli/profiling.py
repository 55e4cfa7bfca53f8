"""What `gemctl profile` does: measures a model on the home's log, or on a generated one, and says where its time goes.

Knows the order of calls and what is printed. Does not know how anything is measured.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feature_store.errors import InvalidInput, NotFound
from services.cli.console import Console, table
from services.cli.home import DATASETS, Home
from services.cli.learning import counted_replay

if TYPE_CHECKING:
    from model.training.profile import Cost, Profile
    from model.training.throughput import Ceiling

FORMATS = (".svg", ".png")
_WORLD = {"users": 100, "ads": 100, "days": 3}
"""Of the generated log."""
_LARGEST = 3
"""Costs that are named once more."""
_SAMPLE = 512
"""Requests, evenly over the log, among which the one with most events is scored."""


def profile(
    console: Console, home: Home, *, preset: str, candidates: int, history: int, steps: int, plot: Path | None
) -> None:
    """Every part's cost in a training step and in a scoring call."""
    _check(candidates=candidates, history=history, steps=steps, plot=plot)
    from model.training.profile import Profiler, scoring_batch, untrained
    from model.training.rows import ReplayRows, spread
    from model.training.teacher import TeacherConfig
    from model.training.throughput import measure_bandwidth, measure_ceiling
    from model.training.trainer import preset as configuration

    config = TeacherConfig(foundation=configuration(preset))
    with _log(console, home) as (known, log):
        replay, (first, end) = counted_replay(console, known)
        rows = ReplayRows(replay, first, end)
        profiler = Profiler(untrained(config, rows), rows)
        request = scoring_batch(rows.batch(spread(len(rows), _SAMPLE))[0], candidates=candidates, history=history)
        with console.progress("training steps") as advance:
            ceilings = [measure_ceiling()]
            training = profiler.training(steps, advance)
        with console.progress("scoring calls") as advance:
            ceilings.append(measure_ceiling())
            scoring = profiler.scoring(request, 4 * steps, advance)
    # Others may use the machine: the fastest product of three moments is nearest to what it can do.
    ceiling = max(*ceilings, measure_ceiling(), key=lambda each: each.measured)
    bandwidth = measure_bandwidth()
    profiles = [training, scoring]
    result = {"preset": preset, "log": log, "machine": {**asdict(ceiling), "bandwidth": bandwidth}, "plot": None}
    result |= {key: _values(each, ceiling) for key, each in zip(("training", "scoring"), profiles, strict=True)}
    if plot is not None:
        from services.cli.roofline import draw

        draw(profiles, ceiling, bandwidth, plot, title=f"{preset.rpartition(':')[2]} on {log}")
        result["plot"] = str(plot)
    console.result(result, *(_table(each, ceiling) for each in profiles), *(_largest(each) for each in profiles))
    console.say(_machine(ceiling, bandwidth))
    if plot is not None:
        console.say(f"roofline: {plot}")


def _check(*, candidates: int, history: int, steps: int, plot: Path | None) -> None:
    for name, value, least in (("candidates", candidates, 1), ("history", history, 0), ("steps", steps, 1)):
        if value < least:
            raise InvalidInput(f"{name} is {value}; it must be at least {least}")
    if plot is None:
        return
    if plot.suffix not in FORMATS:
        raise InvalidInput(f"--plot {plot} ends with {plot.suffix!r}; let it end with one of {list(FORMATS)}")
    if not plot.parent.is_dir():
        raise NotFound(f"{plot.parent} is not a folder; make it before, or give --plot another")


@contextmanager
def _log(console: Console, home: Home) -> Iterator[tuple[Home, str]]:
    """A home that has a log, and what to call it: the one that is given, or a generated one that is removed afterwards."""
    if home.spec_path.exists() and home.tables().exists("impressions"):
        yield home, str(home.root)
        return
    from feature_store.world import WorldConfig, generate

    console.say(f"{home.root} holds no log; a small world is generated instead")
    with tempfile.TemporaryDirectory() as folder:
        made = Home(Path(folder))
        made.adopt(DATASETS / "world.yaml")
        with console.progress("world") as advance:
            generate(WorldConfig(**_WORLD), made.tables(), advance)
        yield made, "a generated world"


def _values(profile: Profile, ceiling: Ceiling) -> dict[str, Any]:
    """For machines: seconds, FLOPs, bytes, shares of the ceilings."""
    return {
        "requests": profile.requests,
        "candidates": profile.candidates,
        "events": profile.events,
        "flops": profile.flops,
        "seconds": profile.seconds,
        "watched_seconds": profile.watched_seconds,
        **_whole(profile, ceiling),
        "largest": [
            {"part": cost.kind, "seconds": cost.seconds, "share": profile.share(cost)} for cost in profile.by_kind()[:_LARGEST]
        ],
        "parts": {cost.name: _part(cost, profile, ceiling) for cost in profile.costs},
    }


def _whole(profile: Profile, ceiling: Ceiling) -> dict[str, float | None]:
    nominal = ceiling.nominal
    return {
        "mfu": profile.mfu(ceiling.measured),
        "local_mfu": profile.local_mfu(ceiling.measured),
        "scaling_ratio": profile.mfu(1.0) / profile.local_mfu(1.0),
        "nominal_mfu": profile.mfu(nominal) if nominal else None,
        "nominal_local_mfu": profile.local_mfu(nominal) if nominal else None,
    }


def _part(cost: Cost, profile: Profile, ceiling: Ceiling) -> dict[str, float | None]:
    values = {name: getattr(cost, name) for name in ("flops", "bytes", "forward_seconds", "backward_seconds", "intensity")}
    return {
        **values,
        "share": profile.share(cost),
        "mfu": cost.speed / ceiling.measured,
        "nominal_mfu": cost.speed / ceiling.nominal if ceiling.nominal else None,
    }


def _table(profile: Profile, ceiling: Ceiling) -> Any:
    columns = ["part", "MFLOP", "MB", "FLOP/byte", "forward ms", "backward ms", "share", "GFLOP/s", "MFU"]
    rows = [_row(cost, profile, ceiling) for cost in profile.costs]
    whole = _whole(profile, ceiling)
    moved = sum(cost.bytes for cost in profile.costs)
    forward, backward = (1e3 * sum(getattr(c, f"{each}_seconds") for c in profile.costs) for each in ("forward", "backward"))
    rows.append(["all parts, watched", _short(profile.flops / 1e6), _short(moved / 1e6), None, _short(forward), _short(backward) if backward else None, _share(1.0), None, _share(whole["local_mfu"])])  # fmt: skip
    rows.append(["end to end, not watched", _short(profile.flops / 1e6), None, None, _short(1e3 * profile.seconds), None, None, _short(profile.flops / profile.seconds / 1e9), _share(whole["mfu"])])  # fmt: skip
    if ceiling.nominal:
        columns.append("of nominal")
        last = [whole["nominal_local_mfu"], whole["nominal_mfu"]]
        each = [cost.speed / ceiling.nominal if cost.flops else None for cost in profile.costs]
        rows = [[*row, _share(value)] for row, value in zip(rows, [*each, *last], strict=True)]
    requests = "1 request" if profile.requests == 1 else f"{profile.requests:,.0f} requests"
    size = f"{requests}, {profile.candidates:,.0f} candidates, {profile.events:,.0f} events"
    return table(f"A {profile.what}: {size}; scaling ratio {whole['scaling_ratio']:.2f}", columns, rows)


def _row(cost: Cost, profile: Profile, ceiling: Ceiling) -> list[object]:
    products = bool(cost.flops)
    return [
        cost.name,
        _short(cost.flops / 1e6) if products else None,
        _short(cost.bytes / 1e6) if cost.bytes else None,
        _short(cost.intensity) if products else None,
        _short(1e3 * cost.forward_seconds),
        _short(1e3 * cost.backward_seconds) if cost.backward_seconds else None,
        _share(profile.share(cost)),
        _short(cost.speed / 1e9) if products else None,
        _share(cost.speed / ceiling.measured) if products else None,
    ]


def _largest(profile: Profile) -> Any:
    rows = [[cost.kind, _short(1e3 * cost.seconds), _share(profile.share(cost))] for cost in profile.by_kind()[:_LARGEST]]
    return table(f"What a {profile.what} costs most, all layers together", ["part", "ms", "share"], rows)


def _machine(ceiling: Ceiling, bandwidth: float) -> str:
    nominal = f"nominal peak {ceiling.nominal / 1e12:,.0f} TFLOP/s" if ceiling.nominal else "no nominal peak is known"
    return (
        f"MFU is of {ceiling.measured / 1e9:,.1f} GFLOP/s, measured in {ceiling.precision} products on {ceiling.threads} threads; "
        f"{nominal}; copies move {bandwidth / 1e9:,.1f} GB/s"
    )


def _short(value: float) -> str:
    """Three digits."""
    if not value:
        return "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if abs(value) >= 0.001 else f"{value:.0e}"


def _share(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"
