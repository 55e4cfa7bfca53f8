"""A plain transformer over the history, then DCN-V2: what a sequence module and a cross network give side by side.

Knows the encoder of Vaswani et al. 2017 (arXiv 1706.03762). Does not know features.

The candidate is the first token of the sequence, as in BST (Chen et al. 2019, arXiv 1905.06874), and its time to each event
is in the event's token; of the encoder the candidate's output is read, where BST flattens all. Every candidate has a
sequence of its own. N candidates, L longest history, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feature_store.layout import Layout
from model.baselines.dcnv2 import DeepAndCross, cross_flops, perceptron_flops
from model.baselines.frame import Baseline, Counts, FrameConfig, Inputs, padded
from model.nn.norm import layer_norm


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig(FrameConfig):
    """Shape of a transformer + DCN-V2."""

    layers: int = 2
    feed_forward: int = 256
    cross_layers: int = 3
    cross_rank: int = 128
    deep: tuple[int, ...] = (1024, 512)

    def __post_init__(self) -> None:
        FrameConfig.__post_init__(self)
        self.at_least(1, "layers", "feed_forward", "cross_layers", "cross_rank", "deep")


class EncoderLayer(nn.Module):
    """X ← LN(X + MHA(X)); X ← LN(X + W_2 ReLU(W_1 X)) (section 3.1, post-norm; softmax(QKᵀ/√d_h) V is its eq. 1)."""

    def __init__(self, width: int, *, heads: int, feed_forward: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, feed_forward), nn.ReLU(), nn.Linear(feed_forward, width))

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """[N, L, D]; only valid [N, L] tokens are attended."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None])
        x = layer_norm(x + self.out(read.transpose(1, 2).flatten(2)))
        return layer_norm(x + self.feed_forward(x))


class TransformerNetwork(Baseline):
    """[context ‖ ad ‖ the candidate's output of the encoder], crossed."""

    config: TransformerConfig
    pads = True

    def __init__(self, config: TransformerConfig, layout: Layout) -> None:
        crossed = (config.tokens + 1) * config.width
        super().__init__(config, layout, represented=crossed + config.deep[-1])
        self.crossed = crossed
        self.target = nn.Linear(config.ad_tokens * config.width, config.width)
        self.layers = nn.ModuleList(
            EncoderLayer(config.width, heads=config.heads, feed_forward=config.feed_forward) for _ in range(config.layers)
        )
        self.dcn = DeepAndCross(crossed, layers=config.cross_layers, rank=config.cross_rank, deep=config.deep)

    def represent(self, inputs: Inputs) -> Tensor:
        """[N, F + deep]"""
        events, valid = (x.index_select(0, inputs.request_N) for x in padded(inputs.history))
        target = self.target(inputs.ads_NaD.flatten(1))[:, None]
        x, valid = torch.cat([target, events], dim=1), F.pad(valid, (1, 0), value=True)
        for layer in self.layers:
            x = layer(x, valid)
        return self.dcn(torch.cat([inputs.candidate_tokens.flatten(1), x[:, 0]], dim=1))

    def represent_flops(self, counts: Counts) -> int:
        """Every candidate's own sequence, then crosses and the deep network."""
        config, crossed = self.config, self.crossed
        width, length = config.width, np.repeat(counts.lengths, counts.shown) + 1
        tokens, pairs = int(length.sum()), int((length**2).sum())
        layer = tokens * (8 * width**2 + 4 * width * config.feed_forward) + 4 * pairs * width
        target = 2 * counts.candidates * config.ad_tokens * width**2
        crosses = cross_flops(counts.candidates, crossed, layers=config.cross_layers, rank=config.cross_rank)
        return config.layers * layer + target + crosses + perceptron_flops(counts.candidates, crossed, *config.deep)
