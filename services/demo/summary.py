"""Turns what a demo learned and served into one report: plain numbers under stable names.

Knows definitions of figures. Does not know how they are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from feature_store.replay import Replay
from model.training import metrics
from model.training.evaluate import POOLED, Evaluation, Predictions, SliceMetrics, compare
from model.training.metrics import Undefined
from services.cli.routes import WORTH
from services.cli.traces import Span, waterfall
from services.demo.config import Days
from services.demo.learning import Learned
from services.demo.serving import Served


def quality(learned: Learned) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """evaluation[surface][objective][arm] = {ne, auc, gauc, calibration, rows}; null where a metric is undefined."""
    out: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for name, evaluation in learned.evaluations.items():
        for (surface, objective), measured in evaluation.items():
            out.setdefault(surface, {}).setdefault(objective, {})[name] = numbers(measured)
    return {surface: out[surface] for surface in sorted(out, key=lambda s: (s == POOLED, s))}


def bayes(replay: Replay, days: Days, evaluation: Evaluation) -> dict[str, Any]:
    """The same for the true probabilities, where the world knows them: what no model can beat."""
    truth = _truth(replay, days)
    if truth is None:
        return {}
    out: dict[str, Any] = {}
    for surface, objective in evaluation:
        rows, labels = truth.slice(replay, surface, objective)
        p = truth.probabilities[objective][rows]
        ne, auc = metrics.ne(p, labels), metrics.auc(p, labels)
        out.setdefault(surface, {})[objective] = {"ne": _plain(ne), "auc": _plain(auc)}
    return out


def headroom(evaluation: Mapping[str, Any], floor: Mapping[str, Any]) -> dict[str, Any]:
    """headroom[surface][objective][arm]: share of the way from A0's NE to the Bayes NE."""
    out: dict[str, Any] = {}
    for surface, objectives in evaluation.items():
        for objective, arms in objectives.items():
            base = arms.get("A0", {}).get("ne")
            best = floor.get(surface, {}).get(objective, {}).get("ne")
            if base is None or best is None or base <= best:
                continue
            shares = {name: (base - m["ne"]) / (base - best) for name, m in arms.items() if m["ne"] is not None}
            out.setdefault(surface, {})[objective] = shares
    return out


def against_control(replay: Replay, learned: Learned) -> dict[str, dict[str, dict[str, float | None]]]:
    """against_control[objective][arm] = {difference, low, high}: NE minus A0's on identical rows, 95 % over users."""
    control = learned.predictions.get("A0")
    out: dict[str, dict[str, dict[str, float | None]]] = {}
    for name, made in learned.predictions.items():
        if control is None or name in ("FM", "A0") or len(made.example_id_N) != len(control.example_id_N):
            continue
        for (_, objective), found in compare(made, control, (), replay.spec.objectives, num_draws=300).items():
            interval = {"difference": _plain(found.difference), "low": _plain(found.low), "high": _plain(found.high)}
            out.setdefault(objective, {})[name] = interval
    return out


def top_slot(replay: Replay, days: Days, learned: Learned) -> dict[str, float]:
    """Mean true expected value of the candidate that each arm would put first; `best` and `random` beside it."""
    truth = _truth(replay, days)
    if truth is None:
        return {}
    worth = truth.worth()
    log = replay.impressions
    request, values = log.request[truth.rows], {"random": None, "best": worth}
    out = {}
    for name, scores in {**values, **{n: _value(replay, p) for n, p in learned.predictions.items()}}.items():
        if scores is None:
            out[name] = float(np.mean([worth[part].mean() for part in _groups(request)]))
        else:
            own = scores if name == "best" else _aligned(scores, learned.predictions[name], log, truth.rows)
            out[name] = float(np.mean([worth[part][np.argmax(own[part])] for part in _groups(request)]))
    return out


def latency(spans: Iterable[Span], served: Served) -> dict[str, dict[str, float]]:
    """latency_ms[hop] = {p50, p99}: Rank as the client saw it, then every service's own calls."""
    hops: dict[str, list[float]] = {"rank (client)": served.latency_ms}
    for span in spans:
        if span.attributes.get("rpc.method") and span.attributes.get("rpc.system") == "grpc":
            hops.setdefault(f"{span.service} · {span.name.rsplit('/', 1)[-1]}", []).append(span.milliseconds)
    return {
        hop: {"p50": float(np.percentile(ms, 50)), "p99": float(np.percentile(ms, 99)), "calls": len(ms)}
        for hop, ms in hops.items()
        if ms
    }


def one_trace(spans: list[Span]) -> dict[str, Any]:
    """A trace as a waterfall."""
    if not spans:
        return {}
    rows = [
        {
            "service": row.span.service,
            "name": row.span.name,
            "depth": row.depth,
            "offset_ms": row.offset_ms,
            "duration_ms": row.span.milliseconds,
            "failed": row.span.failed,
        }
        for row in waterfall(spans)
    ]
    return {"trace_id": spans[0].trace_id, "spans": rows}


class _Truth:
    """True probabilities of the last day's impressions."""

    def __init__(self, replay: Replay, rows: npt.NDArray[np.int64], table: pa.Table) -> None:
        self.rows = rows
        order = _order(table, replay, rows)
        self.probabilities = {
            name: table[f"truth_{name}"].to_numpy()[order] for name in replay.spec.objectives if f"truth_{name}" in table.column_names
        }

    def slice(self, replay: Replay, surface: str, objective: str) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Rows of a surface that count for an objective, and their outcomes."""
        log, k = replay.impressions, replay.spec.objectives.index(objective)
        known = log.label_ms[self.rows] < 2**63 - 1
        kept = np.ones(len(self.rows), dtype=bool)
        if surface != POOLED:
            kept &= log.surface[self.rows] == replay.spec.surface_index(surface)
        parent = replay.spec.parent_index(k)
        if parent is not None:
            kept &= known[:, parent]
        return kept, known[kept, k]

    def worth(self) -> npt.NDArray[np.float64]:
        """True expected value of each impression."""
        click = self.probabilities["click"]
        later = sum(WORTH[name] * p for name, p in self.probabilities.items() if name != "click")
        return np.asarray(click * (WORTH["click"] + later), dtype=np.float64)


def _truth(replay: Replay, days: Days) -> _Truth | None:
    if "truth_click" not in replay.tables.columns("impressions"):
        return None
    at = replay.read_ms("request")
    rows = np.flatnonzero((at >= days.test_ms) & (at < days.end_ms))
    columns = ["example_id", *(f"truth_{name}" for name in replay.spec.objectives)]
    return _Truth(replay, rows, replay.tables.read("impressions", columns=columns))


def _order(table: pa.Table, replay: Replay, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Table rows of some impressions of the log."""
    place = {name: at for at, name in enumerate(table["example_id"].to_pylist())}
    return np.array([place[bytes(name)] for name in replay.impressions.example_id[rows]], dtype=np.int64)


def _value(replay: Replay, predictions: Predictions) -> npt.NDArray[np.float64]:
    """Expected value that a model gives each row."""
    names, p = replay.spec.objectives, np.asarray(predictions.probabilities_NK, dtype=np.float64)
    click = p[:, names.index("click")]
    later = sum(WORTH.get(name, 0.0) * p[:, k] for k, name in enumerate(names) if name != "click")
    return np.asarray(click * (WORTH["click"] + later), dtype=np.float64)


def _aligned(
    scores: npt.NDArray[np.float64], predictions: Predictions, log: Any, rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Scores in the order of impressions `rows`; a row without a score ranks last."""
    place = {bytes(name): at for at, name in enumerate(predictions.example_id_N)}
    at = np.array([place.get(bytes(name), -1) for name in log.example_id[rows]])
    return np.where(at >= 0, scores[np.maximum(at, 0)], -np.inf)


def _groups(request: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    order = np.argsort(request, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(request[order])) + 1) if len(order) else []


def numbers(measured: SliceMetrics) -> dict[str, Any]:
    """Plain values of a slice; null where undefined."""
    return {
        "ne": _plain(measured.ne),
        "auc": _plain(measured.auc),
        "gauc": _plain(measured.gauc.value),
        "calibration": _plain(measured.calibration),
        "rows": measured.rows,
    }


def _plain(value: float | Undefined) -> float | None:
    return None if isinstance(value, Undefined) else float(value)
