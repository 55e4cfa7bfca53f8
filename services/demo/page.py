"""Draws a demo's report as one self-contained HTML page.

Knows the report's keys. Does not know how the numbers came about.
"""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

ARMS = ("FM", "A0", "A1", "A2", "A3")
_COLORS = {"FM": "#1b1b1b", "A0": "#b9c0c9", "A1": "#8fb3d9", "A2": "#4c86c0", "A3": "#12508f"}
_LEVELS = {
    "exact": "#12508f",
    "ad_group": "#4c86c0",
    "similar_users": "#7aa7d6",
    "user": "#a9c7e6",
    "default": "#d9dde2",
}
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1080px;padding:0 1rem;color:#1b1b1b}
h1{font-size:1.6rem;margin-bottom:.2rem} h2{margin-top:2.4rem;font-size:1.15rem;border-bottom:1px solid #ddd}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px} th,td{padding:.25rem .7rem;text-align:right}
th:first-child,td:first-child{text-align:left} thead th{border-bottom:1px solid #888} tbody tr:nth-child(even){background:#f6f7f9}
.note{color:#666;font-size:13px} svg{max-width:100%;height:auto}
.wf td{padding:.1rem .5rem;white-space:nowrap} .wf .lane{width:55%;position:relative;background:#f6f7f9}
.wf .bar{position:absolute;top:3px;bottom:3px;border-radius:2px;background:#4c86c0;min-width:2px} .wf .failed{background:#c2452d}
"""


def render(report: Mapping[str, Any]) -> str:
    """The page as HTML text; needs nothing from elsewhere."""
    sections = [
        ("Quality on the test rows", _quality_table(report) + _figure(_plot_quality(report))),
        ("What each channel adds to A0", _control_table(report)),
        ("What the top slot is truly worth", _worth_table(report)),
        ("Knowledge levels of scored candidates", _figure(_plot_coverage(report))),
        ("Latency by hop", _latency_table(report) + _figure(_plot_latency(report))),
        ("One request, end to end", _waterfall(report.get("trace") or {})),
        ("What it cost", _cost_table(report)),
    ]
    body = "".join(f"<h2>{html.escape(title)}</h2>{content}" for title, content in sections)
    title = html.escape(f"gem · {report['dataset']}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p class=note>{html.escape(report['note'])}</p>{body}</html>\n"
    )


def _cells(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(surface, objective) for surface in evaluation for objective in evaluation[surface]]


def _quality_table(report: Mapping[str, Any]) -> str:
    evaluation, bayes = report["evaluation"], report.get("bayes") or {}
    rows = []
    for surface, objective in _cells(evaluation):
        arms = evaluation[surface][objective]
        floor = bayes.get(surface, {}).get(objective, {}).get("ne")
        rows.append(
            [
                f"{surface} · {objective}",
                max((metrics["rows"] for metrics in arms.values()), default=0),
                *(_number(arms.get(arm, {}).get("ne")) for arm in ARMS),
                _number(floor),
                *(_number(arms.get(arm, {}).get("auc")) for arm in ARMS),
            ]
        )
    head = ["surface · objective", "rows", *(f"NE {arm}" for arm in ARMS), "NE Bayes", *(f"AUC {arm}" for arm in ARMS)]
    return _table(head, rows)


def _control_table(report: Mapping[str, Any]) -> str:
    against = report.get("against_control") or {}
    if not against:
        return "<p class=note>There is no A0 on the same rows.</p>"
    arms = [arm for arm in ARMS if any(arm in by_arm for by_arm in against.values())]
    rows = [[objective, *(interval(by_arm.get(arm, {})) for arm in arms)] for objective, by_arm in against.items()]
    note = "<p class=note>NE minus A0's on the same rows, with the interval in which 95 % of resampled users leave it.</p>"
    return note + _table(["objective", *arms], rows)


def interval(found: Mapping[str, float | None]) -> str:
    """A difference and its bounds, as text; a dash where one is undefined."""
    difference, low, high = (found.get(key) for key in ("difference", "low", "high"))
    if difference is None or low is None or high is None:
        return "–"
    return f"{difference:+.4f} ({low:+.4f} … {high:+.4f})"


def _worth_table(report: Mapping[str, Any]) -> str:
    worth = report.get("top_slot_value") or {}
    if not worth:
        return "<p class=note>Only a generated world knows.</p>"
    return _table(["arm", "mean true expected value"], [[name, _number(value)] for name, value in worth.items()])


def _plot_quality(report: Mapping[str, Any]) -> Figure:
    cells = _cells(report["evaluation"])
    figure, axes = plt.subplots(figsize=(10.5, 0.36 * len(cells) + 1.4))
    for y, (surface, objective) in enumerate(cells):
        _plot_cell(axes, y, report, surface, objective)
    axes.set_yticks(range(len(cells)), [f"{surface} · {objective}" for surface, objective in cells])
    axes.invert_yaxis()
    axes.set_xlabel("normalized entropy (lower is better; | marks what no model can beat)")
    axes.grid(axis="x", color="#eee")
    handles = [Line2D([], [], marker="o", ls="", color=_COLORS[arm], label=arm) for arm in ARMS]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1.12), ncol=5, frameon=False)
    return figure


def _plot_cell(axes: Axes, y: int, report: Mapping[str, Any], surface: str, objective: str) -> None:
    arms = report["evaluation"][surface][objective]
    for arm in ARMS:
        value = arms.get(arm, {}).get("ne")
        if value is not None:
            axes.plot(value, y, "o", color=_COLORS[arm], ms=7 if arm == "FM" else 6, zorder=3)
    floor = (report.get("bayes") or {}).get(surface, {}).get(objective, {}).get("ne")
    if floor is not None:
        axes.plot(floor, y, "|", color="#c2452d", ms=16, mew=2)


def _plot_coverage(report: Mapping[str, Any]) -> Figure:
    windows = report.get("coverage_over_time") or [report["coverage"]]
    figure, axes = plt.subplots(figsize=(10.5, 2.6))
    levels = [[window.get(level, 0.0) for window in windows] for level in _LEVELS]
    if len(windows) > 1:
        axes.stackplot(range(len(windows)), levels, colors=list(_LEVELS.values()), labels=list(_LEVELS))
        axes.set_xlim(0, len(windows) - 1)
        axes.set_xlabel("time of the replay, in equal numbers of requests")
    else:
        bottom = 0.0
        for level, value in zip(_LEVELS, levels, strict=True):
            axes.bar(0, value[0], bottom=bottom, color=_LEVELS[level], label=level)
            bottom += value[0]
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of candidates")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.22), ncol=5, frameon=False)
    return figure


def _latency_table(report: Mapping[str, Any]) -> str:
    rows = [[hop, f"{value['p50']:.2f}", f"{value['p99']:.2f}"] for hop, value in report["latency_ms"].items()]
    return _table(["hop", "p50 ms", "p99 ms"], rows)


def _plot_latency(report: Mapping[str, Any]) -> Figure:
    hops = list(report["latency_ms"])
    figure, axes = plt.subplots(figsize=(10.5, 0.4 * max(1, len(hops)) + 0.9))
    for y, hop in enumerate(hops):
        value = report["latency_ms"][hop]
        axes.barh(y, value["p99"], color="#d9dde2", height=0.6)
        axes.barh(y, value["p50"], color="#4c86c0", height=0.6)
    axes.set_yticks(range(len(hops)), hops)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds (dark: median, light: 99th percentile)")
    return figure


def _waterfall(trace: Mapping[str, Any]) -> str:
    rows: Sequence[Mapping[str, Any]] = trace.get("spans", [])
    if not rows:
        return "<p class=note>No trace was kept.</p>"
    total = max(row["offset_ms"] + row["duration_ms"] for row in rows) or 1.0
    lines = []
    for row in rows:
        left, width = 100 * row["offset_ms"] / total, 100 * row["duration_ms"] / total
        name = "&nbsp;" * (3 * row["depth"]) + html.escape(f"{row['service']} · {row['name']}")
        kind = "bar failed" if row.get("failed") else "bar"
        bar = f'<div class="{kind}" style="left:{left:.2f}%;width:{min(width, 100 - left):.2f}%"></div>'
        lines.append(f'<tr><td style="text-align:left">{name}<td class=lane>{bar}<td>{row["duration_ms"]:.2f} ms')
    return f"<p class=note>trace {html.escape(trace['trace_id'])}</p><table class=wf width=100%>{''.join(lines)}</table>"


def _cost_table(report: Mapping[str, Any]) -> str:
    rows = [[f"seconds · {stage}", f"{seconds:.1f}"] for stage, seconds in report["stage_seconds"].items()]
    rows.append(["FLOPs an example (forward)", f"{report['flops_per_example']:,.0f}"])
    rows.append(["MFU of the measured GEMM ceiling", _number(report["mfu"])])
    return _table(["what", "value"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    top = "".join(f"<th>{html.escape(name)}" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(value))}" for value in row) for row in rows)
    return f"<div style='overflow-x:auto'><table><thead><tr>{top}<tbody>{body}</table></div>"


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "–"


def _figure(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight")
    plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]
