"""One Kunlun layer: tokens cross, the sequence is summarized, conditioned and attended.

Knows X, S and their summaries. Does not know features, time or heads.

R requests, N candidates (N = R in candidate mode), T events packed, D width, d width of a stream (D unless it has one of its
own); X [N, t, D] tokens of a candidate, C [R, c, D] tokens of a request, S [T, d] events of a stream, H [R, K, D] summaries
of all streams. A stream of another width has no projections besides: K, V of its PFFN read D and its pooling writes D.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.gem.config import GemConfig
from model.gem.streams import EventStream, Member
from model.kernels.block_attention import Blocks, block_attention
from model.kernels.norm_matmul import norm_linear
from model.kernels.pffn_block import pffn_block
from model.nn.interaction import MixtureOfWukongExperts, WeightGen
from model.nn.jagged import Jagged, gather
from model.nn.norm import rms_norm
from model.nn.pooling import HierarchicalSeedPooling


class Sequence(NamedTuple):
    """The events of a batch, newest first, and their index maps."""

    values_TD: Tensor
    layout: Jagged
    blocks: Blocks
    turns: Tensor
    """[T, d_h/2] rotary temporal angles, as complex numbers of length 1."""
    source_T: Tensor
    """Source of every event."""
    keys_TC: Tensor
    """Ids of the columns that a candidate has too: what the candidate's read compares."""
    members: tuple[Member, ...]
    """Its sources, where each is summarized by itself; else none."""

    def summarized(self) -> tuple[tuple[Tensor, Jagged], ...]:
        """Events of every sequence that has a summary of its own."""
        if not self.members:
            return ((self.values_TD, self.layout),)
        return tuple((gather(self.values_TD, member.rows), member.layout) for member in self.members)


class PersonalizedFeedForward(nn.Module):
    """PFFN in its GDPA form: each request's context makes the weights (Kunlun §PFFN; block order as Meta's norm fusion).

    ln = LayerNorm(S); u = GDPA(ln, K(X_sum), V(X_sum)) + ln; S' = RMSNorm(u) + S, norms over all heads together.
    GDPA is β · act(α · Q Kᵀ) · V, with QK-norm unless that is switched off.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        context_width: int | None = None,
        activations: tuple[str, ...] = ("gelu",),
        alpha: float | None = None,
        beta: float = 1.0,
        qk_norm: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.activations, self.alpha, self.beta, self.qk_norm = heads, activations, alpha, beta, qk_norm
        self.key = nn.Linear(context_width or width, width, bias=False)
        self.value = nn.Linear(context_width or width, width, bias=False)

    def forward(self, s_TD: Tensor, summary_RMD: Tensor, layout: Jagged) -> Tensor:
        """[T, d]"""
        k = self.key(summary_RMD).unflatten(-1, (self.heads, -1))
        k = rms_norm(k) if self.qk_norm else k
        v = self.value(summary_RMD).unflatten(-1, (self.heads, -1))
        return pffn_block(
            s_TD, k, v, layout, activation=self.activations, alpha=self.alpha, beta=self.beta, normalize=self.qk_norm
        )


class BlockSelfAttention(nn.Module):
    """Pre-norm block attention with rotary temporal angles on Q and K (on V too if asked), QK-norm, residual."""

    def __init__(self, width: int, heads: int, *, rotate_values: bool) -> None:
        super().__init__()
        self.heads, self.rotate_values = heads, rotate_values
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, s: Sequence) -> Tensor:
        """[T, D]"""
        attend = partial(block_attention, maps=s.blocks, turns=s.turns, rotate_values=self.rotate_values)
        return self.around(attend, s.values_TD)

    def around(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], s_TD: Tensor) -> Tensor:
        """[T, D] the block around any attention of q, k and v [T, H, d]."""
        qkv = norm_linear(s_TD, self.qkv).unflatten(-1, (3 * self.heads, -1))
        qk, v = qkv.split([2 * self.heads, self.heads], dim=1)
        q, k = rms_norm(qk).chunk(2, dim=1)
        return s_TD + self.out(attend(q, k, v).flatten(1))


class StreamLayer(nn.Module):
    """The parts that the schedule gives one layer for one stream of events; what it leaves out passes by unchanged."""

    def __init__(self, config: GemConfig, layer: int, *, context_width: int) -> None:
        super().__init__()
        parts, width = config.parts(layer), config.width
        self.pffn = _feed_forward(config, context_width) if "pffn" in parts else None
        self.attention = (
            BlockSelfAttention(width, config.heads, rotate_values=config.rotate_values)
            if "attention" in parts
            else None
        )

    def forward(self, s: Sequence, context_RMD: Tensor) -> Sequence:
        """S', given the summary of its context."""
        if self.pffn is not None and len(s.values_TD):
            s = s._replace(values_TD=self.pffn(s.values_TD, context_RMD, s.layout))
        if self.attention is not None and len(s.values_TD):
            s = s._replace(values_TD=self.attention(s))
        return s


def _feed_forward(config: GemConfig, context_width: int) -> PersonalizedFeedForward:
    return PersonalizedFeedForward(
        config.width,
        config.heads,
        context_width=context_width,
        activations=config.pffn_activations,
        alpha=config.pffn_alpha,
        beta=config.pffn_beta,
        qk_norm=config.pffn_qk_norm,
    )


class KunlunLayer(nn.Module):
    """Interaction block, then the transformer block of every stream of events.

    The summary that a skipped pooling leaves is the previous one, in the graph: heads and later layers train it. A stream
    whose own stack has ended passes by and keeps its last summary, too.
    """

    def __init__(
        self,
        config: GemConfig,
        layer: int,
        *,
        tokens: int,
        context_tokens: int,
        streams: tuple[EventStream, ...],
    ) -> None:
        super().__init__()
        width, parts = config.width, [stream.config.parts(layer) for stream in streams]
        self._summary_tokens = [stream.summary_tokens for stream in streams]
        self._pools = ["pooling" in own for own in parts]
        summaries = sum(self._summary_tokens)
        self.candidate_summary = WeightGen(tokens, config.summary_tokens, width)
        self.interaction = MixtureOfWukongExperts(
            config.summary_tokens + summaries,
            width,
            experts=config.experts,
            factors=config.factor_tokens,
            linear=config.linear_tokens,
            rank=config.rank,
            hidden=config.hidden,
            combine=config.combine,
        )
        self.streams = nn.ModuleList(
            StreamLayer(stream.config, layer, context_width=width) for stream in streams
        )
        self.poolings = nn.ModuleList(
            _pooling(stream.config, width)
            for stream, pools in zip(streams, self._pools, strict=True)
            for _ in range(stream.pooled * pools)
        )
        separate = any("pffn" in own for own in parts) and config.pffn_context == "request"
        self.context_summary = (
            WeightGen(context_tokens + summaries, config.summary_tokens, width) if separate else None
        )

    def forward(
        self,
        x_NtD: Tensor,
        c_RcD: Tensor,
        streams: tuple[Sequence, ...],
        h_RKD: Tensor | None,
        request_N: Tensor,
    ) -> tuple[Tensor, tuple[Sequence, ...], Tensor]:
        """(X', S' of every stream, H of all streams side by side): both blocks read the inputs of the layer."""
        h_RKD = self._summaries(streams, h_RKD)
        summary = self.candidate_summary(x_NtD)
        crossed = self.interaction(torch.cat([summary, h_RKD.index_select(0, request_N)], dim=1))
        context = summary
        if self.context_summary is not None:
            context = self.context_summary(torch.cat([c_RcD, h_RKD], dim=1))
        pairs = zip(self.streams, streams, strict=True)
        return crossed, tuple(layer(s, context) for layer, s in pairs), h_RKD

    def _summaries(self, streams: tuple[Sequence, ...], h_RKD: Tensor | None) -> Tensor:
        """H: fresh where a stream pools in this layer, the previous one elsewhere; layer 0 pools all."""
        if h_RKD is not None and not self.poolings:
            return h_RKD
        held = () if h_RKD is None else h_RKD.split(self._summary_tokens, dim=1)
        poolings, summaries = iter(self.poolings), []
        for index, (s, pools) in enumerate(zip(streams, self._pools, strict=True)):
            fresh = [next(poolings)(*sequence) for sequence in s.summarized()] if pools else [held[index]]
            summaries.extend(fresh)
        return torch.cat(summaries, dim=1)


def _pooling(config: GemConfig, out_width: int) -> HierarchicalSeedPooling:
    return HierarchicalSeedPooling(
        config.width,
        heads=config.heads,
        seeds=config.seeds,
        tokens=config.sequence_tokens,
        terms=config.kron_terms,
        out_width=out_width,
    )
