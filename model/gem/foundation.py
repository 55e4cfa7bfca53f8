"""The foundation model: features to tokens, Kunlun layers, heads for every objective of every surface.

Knows the mathematics. Does not know training, precision, devices or storage.

R requests, N candidates, T events, D width, K objectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from feature_store.batch import FeatureBatch
from feature_store.layout import Layout
from model.gem.batch import Batch
from model.gem.config import GemConfig
from model.gem.encoder import KunlunLayer, Sequence
from model.gem.heads import ObjectiveHeads
from model.kernels.block_attention import blocks
from model.kernels.jagged_attention import candidate_attention
from model.nn.embedding import IdEmbeddings
from model.nn.jagged import Jagged, jagged, newest, only, reverse, scatter
from model.nn.norm import rms_norm
from model.nn.numeric import PiecewiseLinear
from model.nn.shape import InputShape, input_shape
from model.nn.time import LogBuckets, gap_log, rote_angles, turns

DAY_MS, HOUR_MS = 86_400_000, 3_600_000


class FoundationOutput(NamedTuple):
    """What one forward says of N candidates."""

    logits_NK: Tensor
    taps: tuple[Tensor, ...]
    """Hidden states [N, ·] that LoopFM compresses: first interaction, middle interaction, hidden layer of the heads."""


class FoundationModel(nn.Module):
    """Kunlun over the features of a dataset spec."""

    def __init__(self, config: GemConfig, layout: Layout) -> None:
        super().__init__()
        shape = input_shape(layout)
        self.config, self.shape = config, shape
        self.embeddings = IdEmbeddings((*shape.user_ids, *shape.ad_ids, *shape.event_ids), config.id_width)
        self.tokens = Tokenizer(config, shape)
        context = config.user_tokens + 1
        tokens, streams = context + config.ad_tokens, len(shape.streams)
        self.layers = nn.ModuleList()
        for layer in range(config.layers):
            self.layers.append(
                KunlunLayer(config, layer, tokens=tokens, context_tokens=context, streams=streams)
            )
            tokens = config.factor_tokens + config.linear_tokens
        self.reads = nn.ModuleList(CandidateRead(config) for _ in range(streams))
        flat = (tokens + streams * (config.sequence_tokens + 1)) * config.width
        self.heads = ObjectiveHeads(
            flat,
            surfaces=len(shape.surfaces),
            objectives=len(shape.objectives),
            hidden=config.hidden,
            dropout=config.dropout,
        )

    @property
    def tap_widths(self) -> tuple[int, ...]:
        """Width of each tap."""
        tokens = (self.config.factor_tokens + self.config.linear_tokens) * self.config.width
        return (tokens, tokens, self.config.hidden)

    def fit_statistics(self, batches: Iterable[FeatureBatch]) -> None:
        """Sets quantile edges and vocabularies from batches of training rows, and of nothing later."""
        self.tokens.fit(list(batches), self.embeddings)

    def start_at(self, logits_SK: Tensor) -> None:
        """Starts from the training rows' base rates [S, K], in logits: the first steps then learn what differs from them."""
        self.heads.start_at(logits_SK)

    def forward(self, batch: Batch) -> FoundationOutput:
        """Logits and taps of every candidate; a candidate's do not depend on the others."""
        request_N = batch.request_of_candidate
        c_RcD, a_NaD, streams = self.tokens(batch, self.embeddings)
        x_NtD = torch.cat([c_RcD.index_select(0, request_N), a_NaD], dim=1)
        if self.config.pffn_context == "candidate":
            streams = tuple(_repeat(s, request_N, self.config) for s in streams)
            request_N = torch.arange(len(x_NtD), device=x_NtD.device)
        h_RKD: Tensor | None = None
        crossed = []
        for layer in self.layers:
            x_NtD, streams, h_RKD = layer(x_NtD, c_RcD, streams, h_RKD, request_N)
            crossed.append(x_NtD.flatten(1))
        assert h_RKD is not None
        pairs = zip(self.reads, streams, strict=True)
        reads = [read(a_NaD.mean(1), s, request_N) for read, s in pairs]
        summary = h_RKD.index_select(0, request_N).flatten(1)
        flat = torch.cat([x_NtD.flatten(1), summary, *reads], dim=1)
        logits, hidden = self.heads(flat, batch.surface.long()[batch.request_of_candidate])
        return FoundationOutput(logits, (crossed[0], crossed[len(crossed) // 2], hidden))


class Tokenizer(nn.Module):
    """Context tokens C [R, c, D], ad tokens [N, a, D] and the streams of events of a batch."""

    def __init__(self, config: GemConfig, shape: InputShape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.user_numbers = PiecewiseLinear(shape.user_dense, num_bins=config.bins)
        self.ad_numbers = PiecewiseLinear(shape.ad_dense, num_bins=config.bins)
        self.event_numbers = PiecewiseLinear(shape.event_dense, num_bins=config.bins)
        width, e = config.width, config.id_width
        self.user = nn.Linear(len(shape.user_ids) * e + self.user_numbers.out_width, config.user_tokens * width)
        self.ad = nn.Linear(len(shape.ad_ids) * e + self.ad_numbers.out_width, config.ad_tokens * width)
        self.surface = nn.Embedding(len(shape.surfaces), width)
        self.hour, self.weekday = nn.Embedding(24, width), nn.Embedding(7, width)
        for table in (self.surface, self.hour, self.weekday):
            nn.init.normal_(table.weight, std=0.02)
        self.events = EventProjection(config, shape, self.event_numbers)

    def fit(self, batches: list[FeatureBatch], embeddings: IdEmbeddings) -> None:
        """Quantile edges and vocabularies from training batches."""
        for name, numbers in (("user", self.user_numbers), ("ad", self.ad_numbers), ("event", self.event_numbers)):
            numbers.fit(np.concatenate([getattr(batch, f"{name}_dense") for batch in batches]))
        counts: dict[str, Counter[int]] = {}
        for name in ("user", "ad", "event"):
            for at, column in enumerate(getattr(self.shape, f"{name}_ids")):
                if column.min_count:
                    for batch in batches:
                        counts.setdefault(column.table, Counter()).update(getattr(batch, f"{name}_ids")[:, at].tolist())
        embeddings.fit(counts)

    def forward(
        self, batch: Batch, embeddings: IdEmbeddings
    ) -> tuple[Tensor, Tensor, tuple[Sequence, ...]]:
        """(C, ad tokens, streams with their events newest first)."""
        shape, config = self.shape, self.config
        chosen = [stream_rows(batch, stream, config.max_events) for stream in shape.streams]
        rows = torch.cat([rows for rows, _ in chosen])
        keys = [batch.user_ids, batch.ad_ids, batch.event_ids[rows]]
        columns = (*shape.user_ids, *shape.ad_ids, *shape.event_ids)
        drop = config.id_dropout if self.training else 0.0
        vectors = embeddings(columns, [column for part in keys for column in part.unbind(1)], drop=drop)
        users, ads, events = _split(vectors, [len(shape.user_ids), len(shape.ad_ids), len(shape.event_ids)])
        user = self.user(torch.cat([*users, self.user_numbers(batch.user_dense)], dim=1))
        ad = self.ad(torch.cat([*ads, self.ad_numbers(batch.ad_dense)], dim=1))
        context = torch.cat(
            [user.unflatten(1, (-1, config.width)), self._when_and_where(batch)[:, None]], dim=1
        )
        streams = self._streams(batch, rows, [offsets for _, offsets in chosen], events)
        return rms_norm(context), rms_norm(ad.unflatten(1, (-1, config.width))), streams

    def _when_and_where(self, batch: Batch) -> Tensor:
        hour = (batch.request_ms // HOUR_MS) % 24
        weekday = (batch.request_ms // DAY_MS + 3) % 7
        return self.surface(batch.surface.long()) + self.hour(hour) + self.weekday(weekday)

    def _streams(
        self, batch: Batch, rows: Tensor, offsets: list[Tensor], vectors: list[Tensor]
    ) -> tuple[Sequence, ...]:
        config, layouts = self.config, [jagged(part) for part in offsets]
        event_ms = batch.event_ms[rows]
        request_ms = batch.request_ms[torch.cat([layout.sequence for layout in layouts])]
        values = self.events(
            vectors,
            self.event_numbers(batch.event_dense[rows]),
            source=batch.event_source[rows].long(),
            surface=batch.event_surface[rows].long(),
            labels=batch.event_labels[rows].long(),
            gap=(event_ms, request_ms),
        )
        tau = gap_log(event_ms, request_ms, scale_ms=1000 * config.time_scale_seconds)
        sizes = [len(layout.sequence) for layout in layouts]
        parts = zip(values.split(sizes), tau.split(sizes), layouts, strict=True)
        return tuple(self._stream(*part) for part in parts)

    def _stream(self, values: Tensor, tau: Tensor, layout: Jagged) -> Sequence:
        config = self.config
        angles = rote_angles(layout.position, tau, config.width // config.heads)
        maps = blocks(layout, block=config.block, radius=config.radius)
        return Sequence(values, layout, maps, turns(angles))


def stream_rows(batch: Batch, sources: tuple[int, ...], limit: int) -> tuple[Tensor, Tensor]:
    """Rows of the newest `limit` events of these sources a request, newest first, and their offsets.

    Events of a batch lie in the order of time, so what is taken out of it is merged already.
    """
    members = torch.tensor(sources, dtype=torch.int64, device=batch.event_ms.device)
    own, offsets = only(torch.isin(batch.event_source.long(), members), batch.event_offsets)
    kept, offsets = newest(offsets, limit)
    return own[kept][reverse(offsets)], offsets


class EventProjection(nn.Module):
    """Events [T, D]: every source has a projection of its own over the columns it fills, then all share one width (OneSeq)."""

    def __init__(self, config: GemConfig, shape: InputShape, numbers: PiecewiseLinear) -> None:
        super().__init__()
        width = config.width
        self._columns = [
            (source.id_columns, numbers.codes_of(source.dense_columns)) for source in shape.sources
        ]
        self.in_widths = [max(1, len(ids) * config.id_width + len(codes)) for ids, codes in self._columns]
        self.sources = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))
            for size in self.in_widths
        )
        self.kind = nn.Embedding(max(1, len(shape.sources)), width)
        self.surface = nn.Embedding(len(shape.surfaces) + 1, width)
        self.label = nn.Parameter(torch.randn(len(shape.objectives), width) * 0.02)
        self.no_label = nn.Parameter(torch.zeros(width))
        self.time = LogBuckets(width)
        for table in (self.kind, self.surface):
            nn.init.normal_(table.weight, std=0.02)

    def forward(
        self,
        vectors: list[Tensor],
        numbers: Tensor,
        *,
        source: Tensor,
        surface: Tensor,
        labels: Tensor,
        gap: tuple[Tensor, Tensor],
    ) -> Tensor:
        """[T, D] from id vectors, codes of numbers, source, surface (-1: none), label bits and (event, request) times."""
        parts, order = [numbers.new_zeros(0, len(self.no_label))], [source[:0]]
        for index, project in enumerate(self.sources):
            rows = torch.nonzero(source == index).flatten()
            parts.append(project(self._features(index, rows, vectors, numbers)))
            order.append(rows)
        out = scatter(torch.cat(parts), torch.cat(order), len(source))
        bits = (labels[:, None] >> torch.arange(len(self.label), device=labels.device)) & 1
        marked = bits.to(out.dtype) @ self.label + (labels == 0).to(out.dtype)[:, None] * self.no_label
        return rms_norm(out + self.kind(source) + self.surface(surface + 1) + marked + self.time(*gap))

    def _features(self, index: int, rows: Tensor, vectors: list[Tensor], numbers: Tensor) -> Tensor:
        """Columns of a source at some rows; a source without columns has one of ones, so that a bias is all it learns."""
        ids, codes = self._columns[index]
        if not ids and not codes:
            return numbers.new_ones(len(rows), 1)
        chosen = [vectors[column].index_select(0, rows) for column in ids]
        return torch.cat([*chosen, numbers.index_select(0, rows)[:, codes]], dim=1)


class CandidateRead(nn.Module):
    """A candidate's own look at the final history: softmax attention of its tokens over the request's events."""

    def __init__(self, config: GemConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)

    def forward(self, ad_ND: Tensor, s: Sequence, request_N: Tensor) -> Tensor:
        """[N, D]; zeros for an empty history."""
        q = rms_norm(self.query(ad_ND).unflatten(-1, (self.heads, -1)))
        k, v = self.key_value(rms_norm(s.values_TD)).unflatten(-1, (2 * self.heads, -1)).chunk(2, dim=1)
        return candidate_attention(q, rms_norm(k), v, s.layout, request_N).flatten(1)


def _split(values: list[Tensor], sizes: list[int]) -> list[list[Tensor]]:
    parts, at = [], 0
    for size in sizes:
        parts.append(values[at : at + size])
        at += size
    return parts


def _repeat(s: Sequence, request_N: Tensor, config: GemConfig) -> Sequence:
    """Every candidate gets a copy of its request's events."""
    lengths = s.layout.lengths[request_N]
    offsets = torch.zeros(len(request_N) + 1, dtype=torch.int64, device=lengths.device)
    offsets[1:] = lengths.cumsum(0)
    layout = jagged(offsets)
    rows = s.layout.offsets[:-1][request_N][layout.sequence] + layout.position
    maps = blocks(layout, block=config.block, radius=config.radius)
    return Sequence(s.values_TD.index_select(0, rows), layout, maps, s.turns[rows])
