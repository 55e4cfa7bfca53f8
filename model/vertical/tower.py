"""A surface's small model: own features, own history, and what the foundation model left for it.

Knows the mathematics. Does not know training, stores or transports. A candidate's score does not depend on the others.

R requests, N candidates, T own events, M entries of the LoopFM window, D width, K objectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feature_store.batch import DEFAULT_LEVEL, FeatureBatch
from feature_store.layout import Layout
from model.gem.batch import Batch
from model.kernels.jagged_attention import candidate_attention
from model.loopfm.compressor import dequantize_int4
from model.nn.embedding import IdEmbeddings
from model.nn.interaction import Wukong
from model.nn.jagged import jagged, newest, only
from model.nn.norm import layer_norm, rms_norm
from model.nn.numeric import PiecewiseLinear
from model.nn.shape import input_shape
from model.nn.time import LogBuckets
from model.training.loss import scale_gradient
from model.vertical.config import VerticalConfig

_LEVELS = 5


class VerticalOutput(NamedTuple):
    """What a vertical model says of N candidates."""

    logits_NK: Tensor
    """What is served."""
    kd_logits_NK: Tensor | None
    """The auxiliary head's, in training with the KD channel on; never served."""


class VerticalTower(nn.Module):
    """One surface's model over a dataset spec."""

    def __init__(self, config: VerticalConfig, layout: Layout) -> None:
        super().__init__()
        shape = input_shape(layout)
        self.config, self.shape = config, shape
        self.num_objectives = len(shape.objectives)
        self._surface = layout.spec.surface_index(config.surface)
        width, e = config.width, config.id_width
        self.embeddings = IdEmbeddings((*shape.user_ids, *shape.ad_ids, *shape.event_ids), e)
        self.user_numbers = PiecewiseLinear(shape.user_dense, num_bins=config.bins)
        self.ad_numbers = PiecewiseLinear(shape.ad_dense, num_bins=config.bins)
        self.user = nn.Linear(len(shape.user_ids) * e + self.user_numbers.out_width, 2 * width)
        self.ad = nn.Linear(len(shape.ad_ids) * e + self.ad_numbers.out_width, 2 * width)
        self.history = HistoryRead(config, ids=len(shape.event_ids) * e, objectives=self.num_objectives)
        self.memory = MemoryRead(config, len(shape.surfaces), self.num_objectives) if config.loopfm else None
        self.pair = PairRead(config) if config.solaris else None
        tokens = 5 + (2 if config.loopfm else 0) + (1 if config.solaris else 0)
        self.cross = Wukong(tokens, width, factors=4, linear=4, rank=4, hidden=config.hidden)
        self.backbone = nn.Linear(8 * width + tokens * width, config.hidden)
        self.serving = nn.Sequential(
            nn.Linear(config.hidden, config.hidden), nn.GELU(approximate="tanh"), nn.Linear(config.hidden, self.num_objectives)
        )
        self.auxiliary = nn.Linear(config.hidden, self.num_objectives) if config.kd else None

    def fit_statistics(self, batches: Iterable[FeatureBatch]) -> None:
        """Sets quantile edges and vocabularies from batches of training rows."""
        kept = list(batches)
        self.user_numbers.fit(np.concatenate([batch.user_dense for batch in kept]))
        self.ad_numbers.fit(np.concatenate([batch.ad_dense for batch in kept]))
        counts: dict[str, Counter[int]] = {}
        for name in ("user", "ad", "event"):
            for at, column in enumerate(getattr(self.shape, f"{name}_ids")):
                if column.min_count:
                    for batch in kept:
                        counts.setdefault(column.table, Counter()).update(getattr(batch, f"{name}_ids")[:, at].tolist())
        self.embeddings.fit(counts)

    @torch.no_grad()
    def start_at(self, logits_SK: Tensor) -> None:
        """Starts from its surface's base rates, in logits: rows of a small surface need not teach them."""
        for head in (self.serving[-1], self.auxiliary):
            if isinstance(head, nn.Linear):
                head.bias.copy_(logits_SK[self._surface])

    def forward(self, batch: Batch) -> VerticalOutput:
        """Logits of every candidate; user-side work is done once a request."""
        request_N = batch.request_of_candidate
        users, ads, (events, offsets, rows) = self._vectors(batch)
        user_R2 = self.user(torch.cat([*users, self.user_numbers(batch.user_dense)], dim=1))
        ad_N2 = self.ad(torch.cat([*ads, self.ad_numbers(batch.ad_dense)], dim=1))
        user_RtD, ad_NtD = (rms_norm(x.unflatten(1, (2, -1))) for x in (user_R2, ad_N2))
        query_ND = ad_NtD.mean(1) + user_RtD.mean(1).index_select(0, request_N)
        parts = [user_RtD.index_select(0, request_N), ad_NtD]
        parts.append(self.history(query_ND, batch, rows, offsets, events, request_N)[:, None])
        if self.memory is not None:
            parts.append(self.memory(query_ND, batch, request_N))
        if self.pair is not None:
            parts.append(self.pair(batch)[:, None])
        x_NtD = torch.cat(parts, dim=1)
        crossed = torch.cat([self.cross(x_NtD).flatten(1), x_NtD.flatten(1)], dim=1)
        hidden = F.gelu(self.backbone(layer_norm(crossed)), approximate="tanh")
        taught = None
        if self.auxiliary is not None and self.training:
            taught = self.auxiliary(scale_gradient(hidden, self.config.kd_gradient_scale))
        return VerticalOutput(self.serving(hidden), taught)

    def _vectors(self, batch: Batch) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, Tensor, Tensor]]:
        shape = self.shape
        rows, offsets = self._own_events(batch)
        keys = [batch.user_ids, batch.ad_ids, batch.event_ids[rows]]
        columns = (*shape.user_ids, *shape.ad_ids, *shape.event_ids)
        drop = self.config.id_dropout if self.training else 0.0
        found = self.embeddings(columns, [column for part in keys for column in part.unbind(1)], drop=drop)
        users, ads = len(shape.user_ids), len(shape.ad_ids)
        events = torch.cat([batch.user_dense.new_zeros(len(rows), 0), *found[users + ads :]], dim=1)
        return found[:users], found[users : users + ads], (events, offsets, rows)

    def _own_events(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Rows of the surface's newest events, and their offsets."""
        own = batch.event_surface == self._surface
        rows, offsets = only(own, batch.event_offsets)
        kept, offsets = newest(offsets, self.config.history_events)
        return rows[kept], offsets


class HistoryRead(nn.Module):
    """[N, D]: the candidate's attention over the surface's own events."""

    def __init__(self, config: VerticalConfig, *, ids: int, objectives: int) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.event = nn.Linear(ids, width)
        self.label = nn.Parameter(torch.randn(objectives, width) * 0.02)
        self.time = LogBuckets(width)
        self.query, self.key_value = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)

    def forward(
        self, query_ND: Tensor, batch: Batch, rows: Tensor, offsets: Tensor, events: Tensor, request_N: Tensor
    ) -> Tensor:
        """Zeros for an empty history."""
        layout = jagged(offsets)
        bits = _bits(batch.event_labels[rows], self.label)
        gap = self.time(batch.event_ms[rows], batch.request_ms[layout.sequence])
        tokens = rms_norm(self.event(events) + bits @ self.label + gap)
        k, v = self.key_value(tokens).unflatten(-1, (2 * self.heads, -1)).chunk(2, dim=1)
        q = rms_norm(self.query(query_ND).unflatten(-1, (self.heads, -1)))
        return candidate_attention(q, rms_norm(k), v, layout, request_N).flatten(1)


class MemoryRead(nn.Module):
    """[N, 2, D]: the LoopFM window as the candidate's attention over it, and its sum; a learned token where it is empty.

    x_i = LN(W z_i) + E_surface + E_label + E_Δt.
    """

    def __init__(self, config: VerticalConfig, surfaces: int, objectives: int) -> None:
        super().__init__()
        width = config.width
        self.config, self.heads = config, config.heads
        self.project = nn.Linear(config.loopfm_dim, width)
        self.surface = nn.Embedding(surfaces, width)
        self.label = nn.Parameter(torch.randn(objectives, width) * 0.02)
        self.time = LogBuckets(width)
        self.empty = nn.Parameter(torch.randn(2, width) * 0.02)
        self.query, self.key_value = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        nn.init.normal_(self.surface.weight, std=0.02)

    def forward(self, query_ND: Tensor, batch: Batch, request_N: Tensor) -> Tensor:
        """Tokens and keys once a request; only the query is the candidate's."""
        layout = jagged(batch.memory_offsets)
        tokens = self._tokens(batch, layout.sequence)
        total = tokens.new_zeros(layout.num_sequences, tokens.shape[1]).index_add(0, layout.sequence, tokens)
        count = layout.lengths.clamp_min(1)[:, None]
        # A sum grows with the window; unnormalized, it would drown every other token of users with long ones.
        pooled = total / count if self.config.loopfm_encoder == "mean" else rms_norm(total)
        if self.config.loopfm_encoder == "attention":
            k, v = self.key_value(rms_norm(tokens)).unflatten(-1, (2 * self.heads, -1)).chunk(2, dim=1)
            q = rms_norm(self.query(query_ND).unflatten(-1, (self.heads, -1)))
            read = candidate_attention(q, rms_norm(k), v, layout, request_N).flatten(1)
        else:
            read = pooled[request_N]
        hidden = (layout.lengths == 0)[request_N] | self._dropped(layout.lengths)[request_N]
        return torch.where(hidden[:, None, None], self.empty, torch.stack([read, pooled[request_N]], dim=1))

    def _tokens(self, batch: Batch, sequence: Tensor) -> Tensor:
        tokens = layer_norm(self.project(dequantize_int4(batch.memory_q)))
        tokens = tokens + self.surface(batch.memory_surface.long()) + self.time(batch.memory_ms, batch.request_ms[sequence])
        if self.config.loopfm_labels:
            tokens = tokens + _bits(batch.memory_labels, self.label) @ self.label
        return tokens

    def _dropped(self, lengths: Tensor) -> Tensor:
        if not self.training:
            return torch.zeros_like(lengths, dtype=torch.bool)
        return torch.rand(len(lengths), device=lengths.device) < self.config.memory_dropout


class PairRead(nn.Module):
    """[N, D]: Linear(Drop(LN(e))) + E_level + f(log age, log count, similarity); a learned vector at the default level."""

    def __init__(self, config: VerticalConfig) -> None:
        super().__init__()
        self.config = config
        self.project = nn.Linear(config.solaris_dim, config.width)
        self.level = nn.Embedding(_LEVELS, config.width)
        self.meta = nn.Linear(3, config.width, bias=False)
        nn.init.normal_(self.level.weight, std=0.02)

    def forward(self, batch: Batch) -> Tensor:
        """Pairs demoted in training look as if nothing had been known of them."""
        level = batch.pair_level.long()
        if self.training:
            demoted = torch.rand(len(level), device=level.device) < self.config.level_dropout
            level = torch.where(demoted, DEFAULT_LEVEL, level)
        vector = layer_norm(batch.pair_q.float() * batch.pair_scale[:, None])
        read = self.project(F.dropout(vector, self.config.pair_dropout, self.training))
        if self.config.solaris_meta:
            age, count, similarity = batch.pair_meta.unbind(1)
            read = read + self.meta(torch.stack([age.clamp_min(0).log1p() / 10, count.log1p(), similarity], dim=1))
        return torch.where((level == DEFAULT_LEVEL)[:, None], 0.0, read) + self.level(level)


def _bits(labels: Tensor, like: Tensor) -> Tensor:
    return ((labels.long()[:, None] >> torch.arange(len(like), device=labels.device)) & 1).to(like.dtype)

