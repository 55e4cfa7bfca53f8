"""Appends what was written to the `pairs` table, from which a replay reads it as of any instant.

Knows the table's columns. Does not know stores.

Rows are added at least once: a reader takes one row of each (user, ad, space, computed_ms).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from feature_store.ids import ABSENT
from feature_store.tables import PAIRS, Tables
from services.solaris.writer import NewPair


class DeltaChangeLog:
    """The `pairs` table."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def append(self, pairs: Sequence[NewPair]) -> None:
        """Adds rows in one transaction."""
        self._tables.append(
            "pairs", pa.Table.from_pylist([_row(new) for new in pairs], schema=PAIRS)
        )


def _row(new: NewPair) -> dict[str, object]:
    return {
        "user_key": new.user_key,
        "ad_key": new.ad_key,
        "ad_group_key": ABSENT if new.group_key is None else new.group_key,
        "space_id": new.pair.space_id,
        "computed_ms": new.pair.computed_ms,
        "available_ms": new.pair.available_ms,
        "q": new.pair.vector.tobytes(),
        "scale": new.pair.scale,
        "model_version": new.pair.model_version,
    }
