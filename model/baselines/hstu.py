"""HSTU: pointwise aggregated attention over one stream of context, history and candidates (Zhai et al., arXiv 2402.17152).

Knows equations 1 to 3, the relative bias and the masks of the authors' code. Does not know features.

One sequence a request: context tokens, events oldest first, then all its candidates, which share one pass over the history
(M-FALCON): a candidate sees context, history and itself, and every candidate has the same place and time. An event and the
action on it are one token here, where the paper interleaves two.

R requests, N candidates, S places of the longest sequence, D width, H heads, d width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feature_store.layout import Layout
from model.baselines.frame import Baseline, Counts, FrameConfig, Inputs
from model.nn.jagged import gather, scatter

EPS = 1e-6
"""Of both norms, as in the authors' code: sums divided by the longest length are small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HstuConfig(FrameConfig):
    """Shape of an HSTU."""

    layers: int = 4
    time_buckets: int = 64

    def __post_init__(self) -> None:
        FrameConfig.__post_init__(self)
        self.at_least(1, "layers", "time_buckets")

    @property
    def longest(self) -> int:
        """Context, history and a candidate: what attention is divided by, the same for every request."""
        return self.context_tokens + self.max_events + 1


class Places(NamedTuple):
    """Where tokens lie among the [R, S] places of the sequences, and what they may see."""

    context: Tensor
    """[R · c] flat places of context tokens."""
    events: Tensor
    """[T] of events in the order of the history."""
    candidates: Tensor
    """[N]"""
    position: Tensor
    """[R, S] from the start of the sequence; all candidates have that of the first."""
    visible: Tensor
    """[R, S, S] whether the row sees the column."""


def places(lengths: Tensor, newest_first: tuple[Tensor, Tensor], request_N: Tensor, *, context: int) -> Places:
    """Lays out sequences of `context` tokens, `lengths` [R] events and candidates `request_N` [N], grouped by request.

    `newest_first` are the request and the place of each event. A row sees what comes before its own group and itself;
    context sees all context and history; nothing sees a candidate but itself.
    """
    shown = torch.bincount(request_N, minlength=len(lengths))
    size = context + int((lengths + shown).max()) if len(lengths) else 0
    start = torch.arange(len(lengths), device=lengths.device) * size
    sequence, age = newest_first
    nth = torch.arange(len(request_N), device=lengths.device) - (shown.cumsum(0) - shown)[request_N]
    place = torch.arange(size, device=lengths.device)
    history = (context + lengths)[:, None]
    position = torch.minimum(place, history)
    group = (position - context + 1).clamp_min(0)
    before = group[:, :, None] > group[:, None, :]
    itself = torch.eye(size, dtype=torch.bool, device=lengths.device)
    reads_all = (group == 0)[:, :, None] & (place < history)[:, None, :]
    exists = place < history + shown[:, None]
    return Places(
        context=(start[:, None] + place[:context]).flatten(),
        events=start[sequence] + context + lengths[sequence] - 1 - age,
        candidates=(start + context + lengths)[request_N] + nth,
        position=position,
        visible=(before | itself | reads_all) & exists[:, None, :],
    )


class Relations(NamedTuple):
    """How the row lies to the column for all pairs of places [R, S, S]; the same for every layer."""

    visible: Tensor
    """Whether the row sees the column."""
    apart: Tensor
    """Places from the column to the row, counted from the farthest possible: never negative."""
    bucket: Tensor
    """⌊ln(seconds from the column to the row) / 0.301⌋, as in the authors' code; less than a second counts as one."""


def relations(at: Places, time_ms: Tensor, config: HstuConfig) -> Relations:
    """From places and their times [R, S]."""
    apart = at.position[:, :, None] - at.position[:, None, :] + config.longest - 1
    seconds = (time_ms[:, :, None] - time_ms[:, None, :]).clamp_min(1000).double() / 1000
    return Relations(at.visible, apart, (seconds.log() / 0.301).long().clamp_max(config.time_buckets))


class RelativeBias(nn.Module):
    """rab^{p,t} [R, S, S] = w_p[apart] + w_t[bucket], one for all heads."""

    def __init__(self, longest: int, buckets: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(2 * longest - 1) * 0.02)
        self.time = nn.Parameter(torch.randn(buckets + 1) * 0.02)

    def forward(self, related: Relations) -> Tensor:
        """[R, S, S]"""
        return look_up(self.position, related.apart) + look_up(self.time, related.bucket)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """`look_up_reference` with a histogram as its gradient: torch adds to a small table one number at a time."""
    found: Tensor = _LookUp.apply(table, index)
    return found


def look_up_reference(table: Tensor, index: Tensor) -> Tensor:
    """The definition: numbers of a table [n] at many places [R, S, S]."""
    return table[index]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = len(table)
        return table[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        summed = torch.bincount(index.flatten(), weights=gradient.flatten().double(), minlength=ctx.size)
        return summed.to(gradient.dtype), None


class HstuLayer(nn.Module):
    """X + f_2(Norm(A V) ⊙ U), A = SiLU(Q Kᵀ + rab) / longest where visible, U, V, Q, K = SiLU(f_1(Norm X)) (eq. 1–3)."""

    def __init__(self, config: HstuConfig) -> None:
        super().__init__()
        self.heads, self.longest = config.heads, config.longest
        self.uvqk = nn.Linear(config.width, 4 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.bias = RelativeBias(config.longest, config.time_buckets)

    def forward(self, x: Tensor, related: Relations) -> Tensor:
        """[R, S, D]"""
        mixed = F.silu(self.uvqk(F.layer_norm(x, x.shape[-1:], eps=EPS)))
        u, v, q, k = mixed.chunk(4, dim=-1)
        v, q, k = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (v, q, k))
        score = q @ k.transpose(2, 3) + self.bias(related)[:, None]
        attention = F.silu(score) * (related.visible.to(x.dtype) / self.longest)[:, None]
        read = (attention @ v).transpose(1, 2).flatten(2)
        return x + self.out(F.layer_norm(read, read.shape[-1:], eps=EPS) * u)


class HstuNetwork(Baseline):
    """The candidates' rows after all layers."""

    config: HstuConfig
    pads = True

    def __init__(self, config: HstuConfig, layout: Layout) -> None:
        super().__init__(config, layout, represented=config.width)
        self.target = nn.Linear(config.ad_tokens * config.width, config.width)
        self.layers = nn.ModuleList(HstuLayer(config) for _ in range(config.layers))

    def represent(self, inputs: Inputs) -> Tensor:
        """[N, D]"""
        layout, request_ms = inputs.history.layout, inputs.request_ms
        order = layout.sequence, layout.position
        at = places(layout.lengths, order, inputs.request_N, context=self.config.context_tokens)
        rows, size = at.position.shape
        values = [inputs.context_RcD.flatten(0, 1), inputs.history.values_TD, self.target(inputs.ads_NaD.flatten(1))]
        where = torch.cat([at.context, at.events, at.candidates])
        x = scatter(torch.cat(values), where, rows * size).view(rows, size, self.config.width)
        time_ms = request_ms[:, None].repeat(1, size).flatten().index_copy(0, at.events, inputs.history.event_ms).view(rows, size)
        related = relations(at, time_ms, self.config)
        for layer in self.layers:
            x = layer(x, related)
        return gather(x.flatten(0, 1), at.candidates)

    def represent_flops(self, counts: Counts) -> int:
        """Of all pairs of a sequence, also those that a mask hides."""
        width, length = self.config.width, counts.lengths + counts.shown + self.config.context_tokens
        tokens, pairs = int(length.sum()), int((length**2).sum())
        target = 2 * counts.candidates * self.config.ad_tokens * width**2
        return self.config.layers * (10 * tokens * width**2 + 4 * pairs * width) + target
