"""The foundation model: features to tokens, Kunlun layers, heads for every objective of every surface.

Knows the mathematics. Does not know training, precision, devices or storage.

R requests, N candidates, T events, D width, d width of a stream of events, K objectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from feature_store.batch import FeatureBatch
from feature_store.ids import ABSENT
from feature_store.layout import Layout
from model.gem.batch import Batch
from model.gem.config import GemConfig
from model.gem.encoder import KunlunLayer, Sequence
from model.gem.events import EventProjection, Happened
from model.gem.heads import ObjectiveHeads
from model.gem.streams import EventStream, event_streams, stream_rows, unmerged
from model.kernels.block_attention import blocks
from model.kernels.jagged_attention import Names, candidate_attention
from model.kernels.norm_matmul import norm_linear
from model.nn.embedding import IdEmbeddings
from model.nn.jagged import Jagged, jagged
from model.nn.norm import rms_norm
from model.nn.numeric import PiecewiseLinear
from model.nn.shape import InputShape, input_shape
from model.nn.time import gap_log, rote_angles, turns

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
        self.config, self.shape, self.streams = config, shape, event_streams(config, shape)
        self.embeddings = IdEmbeddings((*shape.user_ids, *shape.ad_ids, *shape.event_ids), config.id_width)
        self.tokens = Tokenizer(config, shape)
        context = config.user_tokens + 1
        tokens = context + config.ad_tokens
        self.layers = nn.ModuleList()
        for layer in range(config.layers):
            self.layers.append(
                KunlunLayer(config, layer, tokens=tokens, context_tokens=context, streams=self.streams)
            )
            tokens = config.factor_tokens + config.linear_tokens
        self.reads = nn.ModuleList(
            CandidateRead(stream.config, ad_width=config.width, columns=len(shape.shared)) for stream in self.streams
        )
        self.heads = ObjectiveHeads(
            flat_width(config, tokens, self.streams),
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
            shapes = zip(self.streams, streams, strict=True)
            streams = tuple(_repeat(shape, s, request_N) for shape, s in shapes)
            request_N = torch.arange(len(x_NtD), device=x_NtD.device)
        h_RKD: Tensor | None = None
        crossed = []
        for layer in self.layers:
            x_NtD, streams, h_RKD = layer(x_NtD, c_RcD, streams, h_RKD, request_N)
            crossed.append(x_NtD.flatten(1))
        assert h_RKD is not None
        pairs = zip(self.reads, streams, strict=True)
        keys_NC = batch.ad_ids[:, [ad for ad, _ in self.shape.shared]]
        reads = [read(a_NaD.mean(1), keys_NC, s, request_N) for read, s in pairs]
        summary = h_RKD.index_select(0, request_N).flatten(1)
        flat = torch.cat([x_NtD.flatten(1), summary, *reads], dim=1)
        logits, hidden = self.heads(flat, batch.surface.long()[batch.request_of_candidate])
        return FoundationOutput(logits, (crossed[0], crossed[len(crossed) // 2], hidden))


def flat_width(config: GemConfig, tokens: int, streams: tuple[EventStream, ...]) -> int:
    """Of what the heads read: tokens, summaries and, at each stream's own width, the candidate's reads."""
    summaries = sum(stream.summary_tokens for stream in streams)
    return (tokens + summaries) * config.width + sum(stream.config.width for stream in streams)


class Tokenizer(nn.Module):
    """Context tokens C [R, c, D], ad tokens [N, a, D] and the streams of events of a batch."""

    def __init__(self, config: GemConfig, shape: InputShape) -> None:
        super().__init__()
        self.config, self.shape, self.streams = config, shape, event_streams(config, shape)
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
        self._projected_by = [
            "events" if stream.config.width == width else f"events_{index}"
            for index, stream in enumerate(self.streams)
        ]
        for name in dict.fromkeys(self._projected_by):
            pairs = zip(self._projected_by, self.streams, strict=True)
            own = tuple(stream for projected_by, stream in pairs if projected_by == name)
            self.add_module(name, EventProjection(own, shape, self.event_numbers))

    @property
    def projections(self) -> list[EventProjection]:
        """Of all events: one for all streams of the model's width, and one for each of another."""
        return [module for module in self.children() if isinstance(module, EventProjection)]

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
        chosen = [
            stream_rows(batch, stream.sources, stream.config.max_events) for stream in self.streams
        ]
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
        layouts = [jagged(part) for part in offsets]
        event_ms = batch.event_ms[rows]
        request_ms = batch.request_ms[torch.cat([layout.sequence for layout in layouts])]
        source = batch.event_source[rows].long()
        happened = Happened(
            self.event_numbers(batch.event_dense[rows]),
            source,
            batch.event_surface[rows].long(),
            batch.event_labels[rows].long(),
            event_ms,
            request_ms,
            tuple(vectors),
        )
        tau = gap_log(event_ms, request_ms, scale_ms=1000 * self.config.time_scale_seconds)
        sizes = [len(layout.sequence) for layout in layouts]
        keys_TC = batch.event_ids[rows][:, [event for _, event in self.shape.shared]]
        split = (source.split(sizes), keys_TC.split(sizes), tau.split(sizes))
        parts = zip(self.streams, self._projected(happened, sizes), *split, layouts, strict=True)
        return tuple(_tokenized(*part) for part in parts)

    def _projected(self, happened: Happened, sizes: list[int]) -> list[Tensor]:
        """Events [T, d] of every stream; neighbours with one projection go through it at once."""
        made: list[Tensor] = []
        for name, run in groupby(self._projected_by):
            own = sizes[len(made) :][: len(list(run))]
            part = happened.part(sum(map(len, made)), sum(own))
            made.extend(self.get_submodule(name)(part).split(own))
        return made


class CandidateRead(nn.Module):
    """A candidate's own look at the final history: softmax attention of its tokens over the request's events.

    Scores are q·k/√d + Σ_c w_c [the event's id in column c is the candidate's]. Where a head prefers an ad's own past, what it
    reads of marks is that ad's rate of clicks with this user, shrunk towards the user's: (m·e^w·p_same + (T − m)·p) / (m·e^w +
    T − m) for m of T events. Without w a model must first learn that an ad is itself, from products of two projections of
    vectors that start small: on 100,000 candidates of the generated world it did not begin to.
    """

    def __init__(self, config: GemConfig, *, ad_width: int | None = None, columns: int = 0) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.query = nn.Linear(ad_width or width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        turns = torch.arange(columns) % config.heads == torch.arange(config.heads)[:, None]
        self.same_id = nn.Parameter(config.same_id_score * turns.float())
        """[H, C]: columns are dealt to heads in turn."""

    def forward(self, ad_ND: Tensor, keys_NC: Tensor, s: Sequence, request_N: Tensor) -> Tensor:
        """[N, d]; zeros for an empty history."""
        q = rms_norm(self.query(ad_ND).unflatten(-1, (self.heads, -1)))
        k, v = norm_linear(s.values_TD, self.key_value).unflatten(-1, (2 * self.heads, -1)).chunk(2, dim=1)
        names = Names(keys_NC, s.keys_TC, ABSENT, self.same_id)
        return candidate_attention(q, rms_norm(k), v, s.layout, request_N, names).flatten(1)


def _split(values: list[Tensor], sizes: list[int]) -> list[list[Tensor]]:
    parts, at = [], 0
    for size in sizes:
        parts.append(values[at : at + size])
        at += size
    return parts


def _tokenized(
    stream: EventStream, values_Td: Tensor, source_T: Tensor, keys_TC: Tensor, tau_T: Tensor, layout: Jagged
) -> Sequence:
    angles = rote_angles(layout.position, tau_T, stream.config.width // stream.config.heads)
    return _laid_out(stream, values_Td, source_T, keys_TC, turns(angles), layout)


def _repeat(stream: EventStream, s: Sequence, request_N: Tensor) -> Sequence:
    """Every candidate gets a copy of its request's events."""
    lengths = s.layout.lengths[request_N]
    offsets = torch.zeros(len(request_N) + 1, dtype=torch.int64, device=lengths.device)
    offsets[1:] = lengths.cumsum(0)
    layout = jagged(offsets)
    rows = s.layout.offsets[:-1][request_N][layout.sequence] + layout.position
    values = s.values_TD.index_select(0, rows)
    return _laid_out(stream, values, s.source_T[rows], s.keys_TC[rows], s.turns[rows], layout)


def _laid_out(
    stream: EventStream, values_Td: Tensor, source_T: Tensor, keys_TC: Tensor, turns: Tensor, layout: Jagged
) -> Sequence:
    config = stream.config
    maps = blocks(layout, block=config.block, radius=config.radius, causal=config.causal_blocks)
    members = unmerged(source_T, layout, stream.sources) if stream.pooled > 1 else ()
    return Sequence(values_Td, layout, maps, turns, source_T, keys_TC, members)
