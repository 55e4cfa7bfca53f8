"""Draws where the parts of a model lie under the roof of a machine (Williams et al. 2009).

Knows arithmetic intensity and speed. Does not know how they were measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from model.training.profile import Cost, Profile
from model.training.throughput import Ceiling

_COLORS = {
    "interaction": "#12508f", "pooling": "#c2452d", "attention": "#2e7d4f", "pffn": "#8a5fb0", "tokens": "#b8860b",
    "heads": "#1b1b1b", "candidate read": "#d16d9e", "candidate summary": "#4c9fc0", "context summary": "#7f8a3a",
    "compressor": "#8b949e",
}  # fmt: skip
_ROOF, _FAINT, _LETTER = "#555", "#e6e8eb", 8.5
"""Colors of the roof and of the grid; height of letters in points."""


class _Box(NamedTuple):
    """A rectangle on the page, in points."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: _Box) -> bool:
        return self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top


def draw(profiles: Sequence[Profile], ceiling: Ceiling, bandwidth: float, path: Path, *, title: str) -> None:
    """One panel a profile; a point is a part, all layers together, its area the seconds it takes. The file's ending says its format."""
    figure, panels = plt.subplots(1, len(profiles), figsize=(6.4 * len(profiles), 5.4), sharey=True, sharex=True, squeeze=False)
    shown = [[cost for cost in profile.by_kind() if cost.flops and cost.bytes and cost.seconds] for profile in profiles]
    corners = _frame(panels[0], [cost for costs in shown for cost in costs], ceiling, bandwidth)
    for axes, profile in zip(panels[0], profiles, strict=True):
        candidates, mfu = f"{profile.candidates:,.0f} candidates", 100 * profile.mfu(ceiling.measured)
        axes.set_title(f"{profile.what}, {candidates}: {mfu:.0f} % of the ceiling end to end", fontsize=10.5)
        axes.set_xlabel("FLOPs a byte that unfused operations move  (area of a point: its seconds)")
    panels[0][0].set_ylabel("GFLOP/s")
    figure.suptitle(title, fontsize=12)
    figure.tight_layout()
    for axes, profile, costs in zip(panels[0], profiles, shown, strict=True):
        _points(axes, costs, profile.watched_seconds, _roof(axes, ceiling, corners))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _frame(panels: Sequence[Axes], costs: Sequence[Cost], ceiling: Ceiling, bandwidth: float) -> list[tuple[float, float]]:
    """Sets limits that hold all points and the roof's edge; returns the roof's corners."""
    edge, peak = ceiling.measured / bandwidth, ceiling.measured / 1e9
    low = 0.4 * min(edge, *(cost.intensity for cost in costs))
    high = 4.0 * max(edge, *(cost.intensity for cost in costs))
    for axes in panels:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(0.3 * min(cost.speed for cost in costs) / 1e9, 2.5 * max(peak, (ceiling.nominal or 0.0) / 1e9))
        axes.grid(which="major", color=_FAINT, zorder=0)
    return [(low, low * bandwidth / 1e9), (edge, peak), (high, peak)]


def _roof(axes: Axes, ceiling: Ceiling, corners: list[tuple[float, float]]) -> list[_Box]:
    """Draws the roof; returns what it covers."""
    (low, start), (edge, peak), (high, _) = corners
    axes.plot(*zip(*corners, strict=True), color=_ROOF, lw=1.6, zorder=1)
    lines = [((low, start), (edge, peak), f"copies {start / low:,.1f} GB/s"), ((edge, peak), (high, peak), f"products {peak:,.0f} GFLOP/s")]
    if ceiling.nominal:
        nominal = ceiling.nominal / 1e9
        axes.plot([low, high], [nominal, nominal], color=_ROOF, lw=1, ls=":", zorder=1)
        lines.append(((edge, nominal), (high, nominal), f"nominal {nominal:,.0f} GFLOP/s"))
    covered = []
    for begin, end, words in lines:
        (x0, y0), (x1, y1) = _place(axes, *begin), _place(axes, *end)
        steps = max(2, int(math.hypot(x1 - x0, y1 - y0) / 4))
        along = [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1)]
        covered += [_Box(x - 2, y - 2, x + 2, y + _LETTER * 2) for x, y in along]
        angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
        axes.annotate(
            words, begin if angle else end, xytext=(16, 20) if angle else (-6, 4), textcoords="offset points", color=_ROOF,
            fontsize=_LETTER, rotation=angle, rotation_mode="anchor", ha="left" if angle else "right", va="bottom",
        )  # fmt: skip
    return covered


def _points(axes: Axes, costs: Sequence[Cost], whole: float, taken: list[_Box]) -> None:
    """Points, large ones first, each with its name where nothing else is."""
    places = {cost.kind: _place(axes, cost.intensity, cost.speed / 1e9) for cost in costs}
    radius = {cost.kind: 3.5 + 11 * math.sqrt(cost.seconds / whole) for cost in costs}
    taken = taken + [_Box(x - radius[kind], y - radius[kind], x + radius[kind], y + radius[kind]) for kind, (x, y) in places.items()]
    left, bottom, right, top = (each * 72 / axes.figure.dpi for each in axes.get_window_extent().extents)
    names: list[_Box] = []
    page = _Box(left + 3, bottom + 3, right - 3, top - 3)
    for cost in sorted(costs, key=lambda cost: -cost.seconds):
        kind, point, color = cost.kind, (cost.intensity, cost.speed / 1e9), _COLORS.get(cost.kind, "#8b949e")
        axes.plot(*point, "o", ms=2 * radius[kind], color=color, mec="white", mew=0.8, zorder=3)
        x, y = places[kind]
        box = _free((x, y), radius[kind], kind, page, taken, names)
        names.append(box)
        taken.append(box)
        away = math.hypot(max(box.left - x, x - box.right, 0.0), max(box.bottom - y, y - box.top, 0.0))
        line = {"arrowstyle": "-", "color": color, "lw": 0.7, "shrinkA": 0, "shrinkB": radius[kind]}
        axes.annotate(
            kind, point, xytext=((box.left + box.right) / 2 - x, (box.bottom + box.top) / 2 - y), textcoords="offset points",
            color=color, fontsize=_LETTER, ha="center", va="center", zorder=4,
            arrowprops=line if away > radius[kind] + _LETTER else None,
        )  # fmt: skip


def _free(
    place: tuple[float, float], radius: float, words: str, page: _Box, taken: list[_Box], names: list[_Box]
) -> _Box:
    """The nearest rectangle for some words that meets nothing, if possible with a line that crosses no name."""
    boxes = list(_around(place, radius, words))
    inside = [box for box in boxes if box.left > page.left and box.right < page.right and box.bottom > page.bottom and box.top < page.top]
    alone = [box for box in inside if not any(box.meets(other) for other in taken)]
    clear = (box for box in alone if not any(dot.meets(name) for dot in _line(place, box) for name in names))
    return next(clear, alone[0] if alone else boxes[0])


def _line(place: tuple[float, float], box: _Box) -> list[_Box]:
    """Dots from a point to its name."""
    (x, y), steps = place, 12
    across, up = (box.left + box.right) / 2 - x, (box.bottom + box.top) / 2 - y
    dots = [(x + across * i / steps, y + up * i / steps) for i in range(steps)]
    return [_Box(left - 1, bottom - 1, left + 1, bottom + 1) for left, bottom in dots]


def _around(place: tuple[float, float], radius: float, words: str) -> Iterator[_Box]:
    """Rectangles around a point, nearest first."""
    width, height = 0.58 * _LETTER * len(words), 1.25 * _LETTER
    for gap in range(3, 120, 6):
        for turn in (0, 8, 4, 12, 2, 14, 6, 10, 1, 15, 7, 9, 3, 5, 11, 13):  # sixteenths of a turn
            cos, sin = math.cos(turn * math.pi / 8), math.sin(turn * math.pi / 8)
            x = place[0] + cos * (radius + gap + width / 2)
            y = place[1] + sin * (radius + gap + height / 2)
            yield _Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def _place(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """A point of the plot on the page, in points."""
    across, up = axes.transData.transform((x, y))
    return float(across) * 72 / axes.figure.dpi, float(up) * 72 / axes.figure.dpi
