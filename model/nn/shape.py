"""Says what a model takes in: columns, tables, sources; made from a layout, kept in an artefact.

Knows names and counts. Does not know the spec's other rules, nor what a model does with a column.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from feature_store.layout import Column, Layout

DEFAULT_GROUP = "default"
"""Merge group of sources that name none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdColumn:
    """A column of keys and the embedding table it reads."""

    name: str
    table: str
    rows: int
    """Rows of the table, the absent and the unknown row included."""
    min_count: int = 0
    """Keys seen at least this often in training have rows of their own; 0 hashes instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseColumn:
    """A dense feature: one number, or an embedding of `width` numbers."""

    name: str
    width: int = 1
    is_embedding: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShape:
    """An event source and the event columns it fills."""

    name: str
    id_columns: tuple[int, ...]
    dense_columns: tuple[int, ...]
    merge_group: str = DEFAULT_GROUP


@dataclass(frozen=True, kw_only=True, slots=True)
class InputShape:
    """Everything a model must know of its inputs to be built."""

    surfaces: tuple[str, ...]
    objectives: tuple[str, ...]
    user_ids: tuple[IdColumn, ...]
    user_dense: tuple[DenseColumn, ...]
    ad_ids: tuple[IdColumn, ...]
    ad_dense: tuple[DenseColumn, ...]
    event_ids: tuple[IdColumn, ...]
    event_dense: tuple[DenseColumn, ...]
    sources: tuple[SourceShape, ...]

    @property
    def streams(self) -> tuple[tuple[int, ...], ...]:
        """Sources that share a merge group, as indices: each group is one stream of events in the order of time."""
        return tuple(
            tuple(index for index, source in enumerate(self.sources) if source.merge_group == group)
            for group in self.merge_groups
        )

    @property
    def merge_groups(self) -> tuple[str, ...]:
        """The group of every stream, in the order in which sources name them."""
        return tuple(dict.fromkeys(source.merge_group for source in self.sources)) or (DEFAULT_GROUP,)

    @property
    def shared(self) -> tuple[tuple[int, int], ...]:
        """(Column of the ad, column of the event) of every pair that reads one table: equal keys name the same thing."""
        return tuple(
            (ad, event)
            for ad, own in enumerate(self.ad_ids)
            for event, other in enumerate(self.event_ids)
            if own.table == other.table
        )

    @property
    def tables(self) -> dict[str, IdColumn]:
        """Embedding tables by name, each described by one of its columns."""
        return {column.table: column for column in (*self.user_ids, *self.ad_ids, *self.event_ids)}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> InputShape:
        """What `as_dict` wrote."""
        kinds: dict[str, type[Any]] = {
            "user_ids": IdColumn,
            "ad_ids": IdColumn,
            "event_ids": IdColumn,
            "user_dense": DenseColumn,
            "ad_dense": DenseColumn,
            "event_dense": DenseColumn,
            "sources": SourceShape,
        }
        made: dict[str, Any] = {}
        for name, value in values.items():
            kind = kinds.get(name)
            made[name] = tuple(kind(**_tuples(item)) if kind else item for item in value)
        return InputShape(**made)


def input_shape(layout: Layout) -> InputShape:
    """The shape of a layout's batches."""
    message = layout.spec.message
    id_names = [column.name for column in layout.event_ids]
    dense_names = [column.name for column in layout.event_dense]
    return InputShape(
        surfaces=layout.spec.surfaces,
        objectives=layout.spec.objectives,
        user_ids=_ids(layout.user_ids),
        user_dense=_dense(layout.user_dense),
        ad_ids=_ids(layout.ad_ids),
        ad_dense=_dense(layout.ad_dense),
        event_ids=_ids(layout.event_ids),
        event_dense=_dense(layout.event_dense),
        sources=tuple(
            SourceShape(
                name=source.name,
                id_columns=tuple(id_names.index(name) for name in source.features if name in id_names),
                dense_columns=tuple(dense_names.index(name) for name in source.features if name in dense_names),
                merge_group=source.merge_group or DEFAULT_GROUP,
            )
            for source in message.event_sources
        ),
    )


def _ids(columns: tuple[Column, ...]) -> tuple[IdColumn, ...]:
    made = []
    for column in columns:
        assert column.feature is not None
        feature = column.feature.id
        made.append(
            IdColumn(
                name=column.name,
                table=feature.table or column.name,
                rows=feature.rows,
                min_count=feature.vocabulary_min_count,
            )
        )
    return tuple(made)


def _dense(columns: tuple[Column, ...]) -> tuple[DenseColumn, ...]:
    return tuple(
        DenseColumn(name=column.name, width=column.width, is_embedding=column.is_embedding) for column in columns
    )


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
