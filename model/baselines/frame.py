"""What every baseline shares with the foundation model: features, heads, statistics; only what lies between them differs.

Knows the tokenizer and the heads of the foundation model. Does not know any baseline.

R requests, N candidates, T events, L longest history of a batch, D width, c context and a ad tokens, K objectives.
All event sources are one stream here, whatever their merge groups.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feature_store.batch import FeatureBatch
from feature_store.layout import Layout
from model.gem.batch import Batch
from model.gem.config import GemConfig
from model.gem.flops import Ints, token_flops
from model.gem.foundation import Tokenizer
from model.gem.heads import ObjectiveHeads
from model.gem.streams import stream_rows
from model.nn.embedding import IdEmbeddings
from model.nn.jagged import Jagged, jagged, scatter
from model.nn.shape import InputShape, input_shape


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameConfig:
    """Sizes of the shared parts; names and meanings as in `GemConfig`."""

    width: int = 64
    heads: int = 4
    id_width: int = 16
    bins: int = 16
    user_tokens: int = 4
    ad_tokens: int = 4
    max_events: int = 256
    hidden: int = 256
    """Of the objectives' heads."""
    id_dropout: float = 0.1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self.tokenizer()  # refuses what does not fit together
        self.at_least(1, "id_width", "user_tokens", "ad_tokens", "hidden")

    @property
    def context_tokens(self) -> int:
        """Of the user, and one of time and place."""
        return self.user_tokens + 1

    @property
    def tokens(self) -> int:
        """Of context and ad."""
        return self.context_tokens + self.ad_tokens

    def tokenizer(self) -> GemConfig:
        """The foundation model's configuration with these features."""
        return GemConfig(
            width=self.width, heads=self.heads, id_width=self.id_width, bins=self.bins, user_tokens=self.user_tokens,
            ad_tokens=self.ad_tokens, max_events=self.max_events, hidden=self.hidden, id_dropout=self.id_dropout,
            dropout=self.dropout,
        )  # fmt: skip

    def at_least(self, least: int, *names: str) -> None:
        """Refuses sizes below `least`; a tuple has one or more sizes.

        Raises:
            ValueError: one of them is, or a tuple is empty.
        """
        for name in names:
            value = getattr(self, name)
            if min(value if isinstance(value, tuple) else (value,), default=least - 1) < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")


class History(NamedTuple):
    """Events of every request, newest first."""

    values_TD: Tensor
    layout: Jagged
    event_ms: Tensor

    def of(self, requests: Tensor) -> History:
        """The events of some requests."""
        lengths = self.layout.lengths[requests]
        layout = jagged(F.pad(lengths.cumsum(0), (1, 0)))
        rows = self.layout.offsets[requests][layout.sequence] + layout.position
        return History(self.values_TD.index_select(0, rows), layout, self.event_ms[rows])


class Inputs(NamedTuple):
    """A batch as tokens."""

    context_RcD: Tensor
    ads_NaD: Tensor
    history: History
    request_ms: Tensor
    request_N: Tensor
    """Request of each candidate."""

    @property
    def candidate_tokens(self) -> Tensor:
        """[N, c + a, D] context and ad tokens of every candidate."""
        return torch.cat([self.context_RcD.index_select(0, self.request_N), self.ads_NaD], dim=1)

    def by_length(self) -> list[tuple[Inputs, Tensor]]:
        """Parts whose requests have histories of similar length, and the candidates of each."""
        layout, parts = self.history.layout, []
        groups = [torch.nonzero(layout.lengths == 0).flatten(), *(bucket.rows for bucket in layout.buckets)]
        for requests in [group for group in groups if len(group)] or groups[:1]:
            place = torch.full_like(layout.lengths, -1)
            place[requests] = torch.arange(len(requests), device=place.device)
            candidates = torch.nonzero(place[self.request_N] >= 0).flatten()
            own = Inputs(
                self.context_RcD.index_select(0, requests), self.ads_NaD.index_select(0, candidates),
                self.history.of(requests), self.request_ms[requests], place[self.request_N[candidates]],
            )  # fmt: skip
            parts.append((own, candidates))
        return parts


@dataclass(frozen=True, slots=True)
class Counts:
    """How much there is to do in a batch."""

    requests: int
    candidates: int
    lengths: Ints
    """[R] events kept of each request."""
    shown: Ints
    """[R] candidates of each request."""


class Baseline(nn.Module):
    """Features → `represent` → heads; a subclass says the middle, and how wide it comes out."""

    pads = False
    """Whether `represent` pads histories to the longest, and had better get similar ones together."""

    def __init__(self, config: FrameConfig, layout: Layout, *, represented: int) -> None:
        super().__init__()
        shape = one_stream(input_shape(layout))
        self.config, self.shape = config, shape
        self.embeddings = IdEmbeddings((*shape.user_ids, *shape.ad_ids, *shape.event_ids), config.id_width)
        self.tokens = Tokenizer(config.tokenizer(), shape)
        surfaces, objectives = len(shape.surfaces), len(shape.objectives)
        self.heads = ObjectiveHeads(
            represented, surfaces=surfaces, objectives=objectives, hidden=config.hidden, dropout=config.dropout
        )

    @abstractmethod
    def represent(self, inputs: Inputs) -> Tensor:
        """[N, represented]; what it says of a candidate does not depend on the others."""

    @abstractmethod
    def represent_flops(self, counts: Counts) -> int:
        """Forward FLOPs of `represent`."""

    def fit_statistics(self, batches: Iterable[FeatureBatch]) -> None:
        """Sets quantile edges and vocabularies from batches of training rows, and of nothing later."""
        self.tokens.fit(list(batches), self.embeddings)

    def start_at(self, logits_SK: Tensor) -> None:
        """Starts from the training rows' base rates [S, K], in logits."""
        self.heads.start_at(logits_SK)

    def inputs(self, batch: Batch) -> Inputs:
        """Tokens of a batch."""
        context, ads, (stream,) = self.tokens(batch, self.embeddings)
        rows, _ = stream_rows(batch, self.shape.streams[0], self.config.max_events)
        history = History(stream.values_TD, stream.layout, batch.event_ms[rows])
        return Inputs(context, ads, history, batch.request_ms, batch.request_of_candidate)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [N, K]."""
        inputs = self.inputs(batch)
        if self.pads:
            parts, candidates = zip(*inputs.by_length(), strict=True)
            said = scatter(torch.cat([*map(self.represent, parts)]), torch.cat(candidates), len(inputs.request_N))
        else:
            said = self.represent(inputs)
        logits: Tensor = self.heads(said, batch.surface.long()[inputs.request_N])[0]
        return logits


def one_stream(shape: InputShape) -> InputShape:
    """The shape with all sources in one merge group."""
    sources = tuple(dataclasses.replace(source, merge_group="default") for source in shape.sources)
    return dataclasses.replace(shape, sources=sources)


def padded(s: History) -> tuple[Tensor, Tensor]:
    """(events [R, L, D] newest first with zeros behind the last, [R, L] whether there is one)."""
    lengths, requests = s.layout.lengths, s.layout.num_sequences
    longest = int(lengths.max()) if requests else 0
    place = s.layout.sequence * longest + s.layout.position
    values = scatter(s.values_TD, place, requests * longest)
    valid = torch.arange(longest, device=lengths.device) < lengths[:, None]
    return values.view(requests, longest, s.values_TD.shape[1]), valid


def bag(s: History) -> Tensor:
    """Mean [R, D] of a request's events, as models without a sequence module read multi-valued features; zeros for none."""
    total = s.values_TD.new_zeros(s.layout.num_sequences, s.values_TD.shape[1])
    return total.index_add(0, s.layout.sequence, s.values_TD) / s.layout.lengths.clamp_min(1)[:, None]


def forward_flops(model: Baseline, batch: FeatureBatch) -> float:
    """Model FLOPs of one forward over actual lengths, counted as `model.gem.flops` does."""
    rows, offsets = stream_rows(Batch.from_numpy(batch), model.shape.streams[0], model.config.max_events)
    events = np.bincount(batch.event_source[rows.numpy()], minlength=len(model.shape.sources))
    counts = Counts(batch.num_requests, batch.num_candidates, offsets.diff().numpy(), np.diff(batch.candidate_offsets))
    trunk, own = model.heads.trunk, model.heads.own
    head = trunk.in_features * trunk.out_features + own.numel() + model.heads.out.numel()
    tokens = token_flops(model.tokens, requests=counts.requests, candidates=counts.candidates, events=events)
    return float(tokens + model.represent_flops(counts) + 2 * counts.candidates * head)
