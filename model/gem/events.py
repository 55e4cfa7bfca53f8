"""Turns what is known of events into vectors, before a stream encodes them.

Knows columns, sources and marks. Does not know histories, nor what attends to what.

T events, d width of the streams that share a projection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.gem.streams import EventStream
from model.nn.jagged import scatter
from model.nn.norm import rms_norm
from model.nn.numeric import PiecewiseLinear
from model.nn.shape import InputShape
from model.nn.time import LogBuckets


class Happened(NamedTuple):
    """What is known of T events."""

    numbers: Tensor
    """Codes of dense columns."""
    source: Tensor
    surface: Tensor
    """-1: none."""
    labels: Tensor
    """Bits."""
    event_ms: Tensor
    request_ms: Tensor
    vectors: tuple[Tensor, ...]
    """One an id column."""

    def part(self, first: int, count: int) -> Happened:
        """Some events that lie side by side."""
        rows = slice(first, first + count)
        return Happened(
            self.numbers[rows],
            self.source[rows],
            self.surface[rows],
            self.labels[rows],
            self.event_ms[rows],
            self.request_ms[rows],
            tuple(vector[rows] for vector in self.vectors),
        )


class EventProjection(nn.Module):
    """Events [T, d]: every source has a projection of its own over the columns it fills, then all share one width (OneSeq)."""

    def __init__(
        self, streams: tuple[EventStream, ...], shape: InputShape, numbers: PiecewiseLinear
    ) -> None:
        super().__init__()
        config = streams[0].config
        self.width, width = config.width, config.width
        self._columns = {
            index: (source.id_columns, numbers.codes_of(source.dense_columns))
            for index, source in enumerate(shape.sources)
            if any(index in stream.sources for stream in streams)
        }
        self.in_widths = {
            index: max(1, len(ids) * config.id_width + len(codes))
            for index, (ids, codes) in self._columns.items()
        }
        self.sources = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))
            for size in self.in_widths.values()
        )
        self.kind = nn.Embedding(max(1, len(shape.sources)), width)
        self.surface = nn.Embedding(len(shape.surfaces) + 1, width)
        self.label = nn.Parameter(torch.randn(len(shape.objectives), width) * 0.02)
        self.no_label = nn.Parameter(torch.zeros(width))
        self.time = LogBuckets(width)
        for table in (self.kind, self.surface):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, events: Happened) -> Tensor:
        """[T, d]"""
        source, labels = events.source, events.labels
        parts, order = [events.numbers.new_zeros(0, self.width)], [source[:0]]
        for index, project in zip(self._columns, self.sources, strict=True):
            rows = torch.nonzero(source == index).flatten()
            parts.append(project(self._features(index, rows, events)))
            order.append(rows)
        out = scatter(torch.cat(parts), torch.cat(order), len(source))
        bits = (labels[:, None] >> torch.arange(len(self.label), device=labels.device)) & 1
        marked = bits.to(out.dtype) @ self.label + (labels == 0).to(out.dtype)[:, None] * self.no_label
        kind, surface = self.kind(source), self.surface(events.surface + 1)
        return rms_norm(out + kind + surface + marked + self.time(events.event_ms, events.request_ms))

    def _features(self, index: int, rows: Tensor, events: Happened) -> Tensor:
        """Columns of a source at some rows; a source without columns has one of ones, so that a bias is all it learns."""
        ids, codes = self._columns[index]
        if not ids and not codes:
            return events.numbers.new_ones(len(rows), 1)
        chosen = [events.vectors[column].index_select(0, rows) for column in ids]
        return torch.cat([*chosen, events.numbers.index_select(0, rows)[:, codes]], dim=1)
