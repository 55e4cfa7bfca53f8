"""One Kunlun layer: tokens cross, the sequence is summarized, conditioned and attended.

Knows X, S and their summaries. Does not know features, time or heads.

R requests, N candidates (N = R in candidate mode), T events packed, D width; X [N, t, D] tokens of a candidate,
C [R, c, D] tokens of a request, S [T, D] events of a stream, H [R, K, D] summaries of all streams.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.gem.config import GemConfig
from model.kernels.block_attention import Blocks, block_attention
from model.kernels.pffn_block import pffn_block
from model.nn.interaction import MixtureOfWukongExperts, WeightGen
from model.nn.jagged import Jagged
from model.nn.norm import rms_norm
from model.nn.pooling import HierarchicalSeedPooling
from model.nn.time import rotate


class Sequence(NamedTuple):
    """The events of a batch, newest first, and their index maps."""

    values_TD: Tensor
    layout: Jagged
    blocks: Blocks
    turns: Tensor
    """[T, d_h/2] rotary temporal angles, as complex numbers of length 1."""


class PersonalizedFeedForward(nn.Module):
    """PFFN in its GDPA form: each request's context makes the weights (Kunlun §PFFN; block order as Meta's norm fusion).

    ln = LayerNorm(S); u = GDPA(ln, K(X_sum), V(X_sum)) + ln; S' = RMSNorm(u) + S, norms over all heads together.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)

    def forward(self, s_TD: Tensor, summary_RMD: Tensor, layout: Jagged) -> Tensor:
        """[T, D]"""
        k = rms_norm(self.key(summary_RMD).unflatten(-1, (self.heads, -1)))
        v = self.value(summary_RMD).unflatten(-1, (self.heads, -1))
        return pffn_block(s_TD, k, v, layout)


class BlockSelfAttention(nn.Module):
    """Pre-norm block attention with rotary temporal angles on Q and K (on V too if asked), QK-norm, residual."""

    def __init__(self, width: int, heads: int, *, rotate_values: bool) -> None:
        super().__init__()
        self.heads, self.rotate_values = heads, rotate_values
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, s: Sequence) -> Tensor:
        """[T, D]"""
        qkv = self.qkv(rms_norm(s.values_TD)).unflatten(-1, (3 * self.heads, -1))
        qk, v = qkv.split([2 * self.heads, self.heads], dim=1)
        q, k = rotate(rms_norm(qk), s.turns).chunk(2, dim=1)
        v = rotate(v, s.turns) if self.rotate_values else v
        return s.values_TD + self.out(block_attention(q, k, v, s.blocks).flatten(1))


class StreamLayer(nn.Module):
    """The parts that the schedule gives one layer for one stream of events; what it leaves out passes by unchanged."""

    def __init__(self, config: GemConfig, layer: int) -> None:
        super().__init__()
        parts, width = config.parts(layer), config.width
        self.pffn = PersonalizedFeedForward(width, config.heads) if "pffn" in parts else None
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


class KunlunLayer(nn.Module):
    """Interaction block, then the transformer block of every stream of events.

    The summary that a skipped pooling leaves is the previous one, in the graph: heads and later layers train it.
    """

    def __init__(
        self, config: GemConfig, layer: int, *, tokens: int, context_tokens: int, streams: int
    ) -> None:
        super().__init__()
        parts, width, summaries = config.parts(layer), config.width, streams * config.sequence_tokens
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
        self.streams = nn.ModuleList(StreamLayer(config, layer) for _ in range(streams))
        pooled = streams if "pooling" in parts else 0
        self.poolings = nn.ModuleList(_pooling(config) for _ in range(pooled))
        separate = "pffn" in parts and config.pffn_context == "request"
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
        if self.poolings:
            pairs = zip(self.poolings, streams, strict=True)
            h_RKD = torch.cat([pooling(s.values_TD, s.layout) for pooling, s in pairs], dim=1)
        assert h_RKD is not None, "layer 0 pools"
        summary = self.candidate_summary(x_NtD)
        crossed = self.interaction(torch.cat([summary, h_RKD.index_select(0, request_N)], dim=1))
        context = summary
        if self.context_summary is not None:
            context = self.context_summary(torch.cat([c_RcD, h_RKD], dim=1))
        pairs = zip(self.streams, streams, strict=True)
        return crossed, tuple(layer(s, context) for layer, s in pairs), h_RKD


def _pooling(config: GemConfig) -> HierarchicalSeedPooling:
    return HierarchicalSeedPooling(
        config.width,
        heads=config.heads,
        seeds=config.seeds,
        tokens=config.sequence_tokens,
        terms=config.kron_terms,
    )
