"""A trace that services wrote becomes a waterfall that a person can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from feature_store.errors import NotFound
from services.cli.traces import draw, find_trace, waterfall

MS = 1_000_000
TRACE = "ab" * 16


def _span(span_id: str, parent: str, name: str, start: int, end: int, **extra: Any) -> dict[str, Any]:
    return {
        "traceId": TRACE,
        "spanId": span_id,
        "parentSpanId": parent,
        "name": name,
        "startTimeUnixNano": str(start * MS),
        "endTimeUnixNano": str(end * MS),
        **extra,
    }


def _write(path: Path, service: str, *spans: dict[str, Any]) -> None:
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]}
    line = {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": list(spans)}]}]}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _write(tmp_path / "sequence.jsonl", "sequence", _span("02", "01", "GetUserState", 1, 5))
    _write(tmp_path / "router.jsonl", "router", _span("01", "", "Rank", 0, 10))
    _write(tmp_path / "vertical.jsonl", "vertical", _span("03", "01", "ModelInfer", 5, 9, status={"code": 2}))
    with (tmp_path / "router.jsonl").open("a") as file:
        file.write('{"resourceSpans": [{"torn')
    return tmp_path


def test_spans_of_all_services_form_one_tree_in_time_order(folder: Path) -> None:
    rows = waterfall(find_trace(folder, TRACE))
    assert [(row.span.service, row.depth, row.offset_ms) for row in rows] == [
        ("router", 0, 0.0),
        ("sequence", 1, 1.0),
        ("vertical", 1, 5.0),
    ]
    assert [row.span.failed for row in rows] == [False, False, True]


def test_the_drawing_has_a_line_a_span_and_shows_where_time_went(folder: Path) -> None:
    lines = draw(waterfall(find_trace(folder, TRACE)), width=10)
    assert [line.split()[0] for line in lines] == ["router", "sequence", "vertical"]
    assert [line.count("█") for line in lines] == [10, 4, 0]
    assert lines[2].count("▒") == 4


def test_the_beginning_of_an_id_is_enough_if_it_is_the_only_one(folder: Path) -> None:
    assert len(find_trace(folder, "abab")) == 3
    with pytest.raises(NotFound, match="no trace begins with 'ff'"):
        find_trace(folder, "ff")


def test_a_span_whose_parent_is_lost_is_shown_as_a_root(tmp_path: Path) -> None:
    _write(tmp_path / "sequence.jsonl", "sequence", _span("02", "99", "GetUserState", 1, 5))
    assert [row.depth for row in waterfall(find_trace(tmp_path, TRACE))] == [0]
