"""The report page stands alone and tells what the report says."""

from __future__ import annotations

import re
from typing import Any

from services.demo.page import render


def _report() -> dict[str, Any]:
    arms = {
        arm: {"ne": 0.9 - 0.01 * i, "auc": 0.7 + 0.01 * i, "rows": 1234}
        for i, arm in enumerate(("A0", "A3", "FM"))
    }
    return {
        "dataset": "a <b>world</b>",
        "note": "made for a test",
        "evaluation": {
            "feed": {"click": arms, "conversion": {"A0": {"ne": None, "auc": None, "rows": 3}}}
        },
        "against_control": {"click": {"A3": {"difference": -0.0051, "low": -0.0092, "high": -0.0011}}, "conversion": {}},
        "bayes": {"feed": {"click": {"ne": 0.81}}},
        "coverage": {
            "exact": 0.4,
            "ad_group": 0.3,
            "similar_users": 0.0,
            "user": 0.2,
            "default": 0.1,
        },
        "latency_ms": {"rank": {"p50": 3.25, "p99": 9.5}},
        "flops_per_example": 31_000_000.0,
        "mfu": 0.31,
        "stage_seconds": {"train": 61.0},
        "trace": {
            "trace_id": "abcd",
            "spans": [
                {
                    "service": "router",
                    "name": "Rank",
                    "depth": 0,
                    "offset_ms": 0.0,
                    "duration_ms": 3.2,
                }
            ],
        },
    }


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = render(_report())
    assert re.findall(r"(?:src|href)=[\"']?(?!#)([^\"' >]+)", page) == []
    assert page.count("<svg") == 3


def test_the_page_shows_the_numbers_and_escapes_names() -> None:
    page = render(_report())
    assert "a &lt;b&gt;world&lt;/b&gt;" in page
    for text in ("0.8800", "0.8100", "0.7200", "9.50", "31,000,000", "router · Rank", "1234"):
        assert text in page


def test_what_an_arm_adds_is_shown_with_its_bounds() -> None:
    assert "-0.0051 (-0.0092 … -0.0011)" in render(_report())
    assert "There is no A0" in render({**_report(), "against_control": {}})


def test_an_undefined_metric_is_a_dash_and_not_a_number() -> None:
    page = render(_report())
    row = page[page.index("<td>feed · conversion") :]
    assert row[: row.index("</table>")].count("<td>–") == 11
