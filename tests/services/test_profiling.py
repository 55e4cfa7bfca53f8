"""What `gemctl profile` prints and draws, and on which log it measures."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.text import Text
from rich.console import Console as RichConsole
from rich.table import Table

from model.training.profile import Cost, Profile
from model.training.throughput import Ceiling
from services.cli.console import Console
from services.cli.home import Home
from services.cli.profiling import _largest, _log, _table
from services.cli.roofline import draw

KNOWN = Ceiling(measured=50e9, nominal=100e9, precision="bfloat16", threads=1)
UNKNOWN = Ceiling(measured=50e9, nominal=None, precision="float32", threads=1)


def profile(*, close: bool = False) -> Profile:
    """A part twice as slow as the ceiling in two layers, one without products; and parts that lie on one spot if asked."""
    costs = [
        Cost(name=f"layer {layer} · pooling", flops=50e9, bytes=10e9, forward_seconds=0.5, backward_seconds=1.5) for layer in (0, 1)
    ]
    costs.append(Cost(name="losses", flops=0.0, bytes=1e9, forward_seconds=1.0, backward_seconds=0.0))
    if close:
        kinds = ("heads", "tokens", "attention", "pffn", "interaction", "candidate read", "candidate summary")
        costs += [Cost(name=kind, flops=50e9, bytes=10e9, forward_seconds=2.0, backward_seconds=0.0) for kind in kinds]
    return Profile(
        what="training step", requests=1, candidates=9, events=1234, flops=100e9, seconds=8.0, costs=tuple(costs)
    )


def printed(table: Table) -> str:
    console = RichConsole(width=200, record=True, quiet=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def line(text: str, begin: str) -> list[str]:
    (found,) = [row for row in text.splitlines() if row.strip("│ ").startswith(begin)]
    return [cell.strip() for cell in found.strip("│").split("│")]


def test_a_part_is_measured_against_the_measured_ceiling_and_against_the_nominal_one_where_it_is_known() -> None:
    text = printed(_table(profile(), KNOWN))
    assert line(text, "layer 1 · pooling")[1:] == [
        "50,000", "10,000", "5.00", "500", "1,500", "40.0 %", "25.0", "50.0 %", "25.0 %",
    ]  # fmt: skip
    assert line(text, "all parts")[-2:] == ["50.0 %", "25.0 %"]
    assert line(text, "end to end")[-2:] == ["25.0 %", "12.5 %"]
    assert "1 request, 9 candidates, 1,234 events; scaling ratio 0.50" in text
    assert "of nominal" not in printed(_table(profile(), UNKNOWN))


def test_a_part_without_products_has_no_mfu() -> None:
    row = line(printed(_table(profile(), UNKNOWN)), "losses")
    assert row[1:] == ["–", "1,000", "–", "1,000", "–", "20.0 %", "–", "–"]


def test_the_largest_costs_take_layers_together() -> None:
    text = printed(_largest(profile()))
    assert line(text, "pooling")[1:] == ["4,000", "80.0 %"]
    assert line(text, "losses")[1:] == ["1,000", "20.0 %"]


@pytest.mark.parametrize("ceiling", [KNOWN, UNKNOWN], ids=["nominal known", "nominal unknown"])
def test_a_roofline_names_every_part_with_products_once_a_panel(tmp_path: Path, ceiling: Ceiling) -> None:
    draw([profile(close=True), profile(close=True)], ceiling, 10e9, tmp_path / "roof.svg", title="all on one spot")
    drawn = (tmp_path / "roof.svg").read_text()
    for kind in ("pooling", "heads", "candidate read", "candidate summary"):
        assert drawn.count(f"<!-- {kind} -->") == 2
    assert "<!-- losses -->" not in drawn
    assert ("<!-- nominal 100 GFLOP/s -->" in drawn) == (ceiling.nominal is not None)


def test_names_that_lie_on_one_spot_do_not_cover_each_other() -> None:
    from matplotlib import pyplot as plt

    from services.cli import roofline

    figure, axes = plt.subplots()
    costs = profile(close=True).by_kind()[:-1]
    roofline._frame([axes], costs, UNKNOWN, 10e9)
    roofline._points(axes, costs, 20.0, [])
    figure.canvas.draw()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the line to its point
    assert len(boxes) == 8
    assert not [1 for i, one in enumerate(boxes) for other in boxes[:i] if one.overlaps(other)]
    plt.close(figure)


def test_without_a_log_a_world_is_generated_that_does_not_stay(tmp_path: Path) -> None:
    console = Console(as_json=True)
    with _log(console, Home(tmp_path / "none")) as (made, name):
        assert name == "a generated world"
        assert made.tables().exists("impressions")
        with _log(console, made) as (given, own):
            assert (given, own) == (made, str(made.root))
        assert made.root.exists()
    assert not made.root.exists()
    assert not (tmp_path / "none").exists()
