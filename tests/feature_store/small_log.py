"""A small random log with every awkward thing a log can hold: ties, delays, repeats, gaps, versions, strangers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from gem.schema.v1 import dataset_spec_pb2 as pb

from feature_store.asof import Caps
from feature_store.spec import Spec, parse_yaml
from feature_store.tables import ANNOTATIONS, Tables, schema

SPEC = """
name: small
surfaces: [{ name: feed }, { name: reels }]
objectives:
  - { name: click, attribution_window_seconds: 6 }
  - { name: buy, attribution_window_seconds: 20, parent: click }
entities: { user: { id_type: int64 }, ad: { id_type: int64 }, ad_group: { id_type: int64 } }
features:
  - { name: user, owner: user, id: { rows: 64 } }
  - { name: city, owner: user, id: { rows: 64, id_type: int64 } }
  - { name: income, owner: user, dense: {} }
  - { name: hour, owner: request, id: { rows: 64, id_type: int64 } }
  - { name: depth, owner: request, dense: {} }
  - { name: tag, owner: ad, id: { rows: 64, id_type: int64 } }
  - { name: ad, owner: ad, id: { rows: 64 } }
  - { name: ad_group, owner: ad, id: { rows: 64 } }
  - { name: price, owner: ad, dense: {} }
  - { name: born, owner: ad, dense: { age: true } }
  - { name: look, owner: ad, embedding: { dim: 2 } }
event_sources:
  - { name: impression, features: [ad, tag, born], max_length: 3, priority: 1 }
  - { name: search, features: [ad, ad_group, look], max_length: 2, priority: 0 }
  - { name: visit, features: [tag], max_length: 2, priority: 1 }
aggregates:
  - { name: a, by: [user], source: impression, statistic: count }
  - { name: b, by: [ad], source: impression, statistic: count, half_life_seconds: 5 }
  - { name: c, by: [user, tag], objective: click, statistic: rate, prior_strength: 3 }
  - { name: d, by: [ad_group, surface], objective: click, statistic: rate, prior_strength: 2, half_life_seconds: 8 }
  - { name: e, by: [user, surface], objective: buy, statistic: count }
  - { name: f, by: [user], source: search, statistic: recency }
  - { name: g, by: [tag], objective: click, statistic: recency }
"""
SPACE = b"space-01"
DAY_MS = 86_400_000
CAPS = Caps(impressions=2, positives=1, retention_ms=15_000)
Row = dict[str, Any]


def small_spec() -> Spec:
    return Spec(parse_yaml(SPEC, pb.DatasetSpec))


class Log:
    """A small random log, kept as plain rows and written as tables: few users, many ties, delays and gaps."""

    def __init__(self, seed: int) -> None:
        self.spec = small_spec()
        self.random = np.random.default_rng(seed)
        self.catalogue = self._versions("ad", lambda: self._ad_features())
        self.users = self._versions(
            "user", lambda: {"city": self._maybe(self._int(5)), "income": float(self._int(9))}
        )
        self.impressions = [self._impression() for _ in range(12 + self._int(40))]
        self.outcomes = [
            outcome
            for shown in self.impressions
            for name in self.spec.objectives
            for outcome in self._outcomes(shown, name)
        ]
        self.events = [self._event() for _ in range(self._int(40))]
        self.annotations = [
            note for shown in self.impressions for note in self._annotations(shown) if self._int(4)
        ]

    def _int(self, stop: int) -> int:
        return int(self.random.integers(stop))

    def _maybe(self, value: Any) -> Any:
        return value if self._int(5) else None

    def _time(self) -> int:
        return 1_000 + 1_000 * self._int(30)

    def _name(self) -> bytes:
        return self.random.bytes(16)

    def _ad_features(self) -> Row:
        return {
            "tag": self._maybe(self._int(3)),
            "ad_group": self._int(2),
            "price": self._maybe(float(self._int(7))),
            "born": self._maybe(self._time() - 3 * DAY_MS),
            "look": self._maybe([float(self._int(4)), 0.5]),
        }

    def _versions(self, entity: str, features: Callable[[], Row]) -> list[Row]:
        """Of entities 0 to 3, up to three versions each, no two of which begin in the same millisecond."""
        rows = []
        for key in range(4):
            for number in range(self._int(4)):
                since = self._time() + number
                late = since + self._int(2) * 7_000 + 10 * number
                own = {f"{entity}_id": str(key), f"{entity}_key": key, entity: key}
                rows.append({**own, "valid_from_ms": since, "available_ms": late, **features()})
        return rows

    def _impression(self) -> Row:
        user, surface, when = self._int(4), self._int(2), self._time()
        return {
            "example_id": self._name(),
            "request_id": f"{user}-{surface}-{when // 10_000}",
            "user_id": str(user),
            "user_key": user,
            "ad_id": "",
            "ad_key": self._int(6),
            "surface": self.spec.surfaces[surface],
            "event_ms": when,
            "available_ms": when + self._int(2) * self._int(3) * 500,
            "position": 0,
            "hour": self._maybe(self._int(24)),
            "depth": self._maybe(float(self._int(9))),
        }

    def _outcomes(self, shown: Row, objective: str) -> list[Row]:
        """None, one or two of an objective; some of value 0, some too late to count."""
        rows = []
        for _ in range(self._int(3)):
            occurred = shown["event_ms"] + 1_000 * self._int(9)
            rows.append(
                {
                    "example_id": shown["example_id"],
                    "objective": objective,
                    "occurred_ms": occurred,
                    "available_ms": occurred + 700 * self._int(4) + self._int(3),
                    "value": float(self._int(4) > 0),
                }
            )
        return rows

    def _event(self) -> Row:
        when = self._time()
        return {
            "event_id": self._name(),
            "source": self.spec.event_sources[1 + self._int(2)],
            "user_id": "",
            "user_key": self._int(4),
            "ad_key": self._maybe(self._int(6)),
            "surface": self._maybe(self.spec.surfaces[self._int(2)]),
            "event_ms": when,
            "available_ms": when + self._int(2) * 5_000,
        }

    def _annotations(self, shown: Row) -> list[Row]:
        rows = []
        for number in range(1 + self._int(2)):
            rows.append(
                {
                    **{
                        name: shown[name]
                        for name in ("example_id", "request_id", "user_key", "ad_key", "surface")
                    },
                    "event_ms": shown["event_ms"],
                    "self_label_seen": self._int(5) == 0,
                    "space_id": SPACE if self._int(6) else b"another0",
                    "logits": [float(self._int(9)), float(number)],
                    "z_q": self.random.bytes(4),
                    "available_ms": shown["event_ms"] + self._int(4_000) + 10_000 * number,
                }
            )
        return rows

    def write(self, root: Path) -> Tables:
        tables = Tables(root)
        for name in ("catalogue", "users", "impressions", "outcomes", "events"):
            columns = schema(name, self.spec)
            rows = list(getattr(self, name))
            self.random.shuffle(rows)
            if rows or name == "impressions":
                tables.append(name, pa.Table.from_pylist(rows, schema=columns))
        self.random.shuffle(self.annotations)
        tables.append("annotations", pa.Table.from_pylist(self.annotations, schema=ANNOTATIONS))
        return tables
