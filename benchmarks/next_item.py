"""Predicts the item after every place of a sequence from those up to it: causal stacks in one frame, their loss and their ranks.

Knows items 0 … I−1 and their order. Does not know data, times, nor how a run goes on.

What differs between rivals is a layer: `kunlun` is the foundation model's, `hstu` and `sasrec` are the published ones. Item
table, positions, dropout, loss and ranks are the frame's, as facebookresearch/generative-recommenders has them for its public
experiments: x = √D · item + position, output and items of unit length, cosine over a temperature. Sequences are packed, so
there is no padding item: nothing but items can be ranked or drawn. Only attention is laid out in buckets of similar length.

R sequences, T items packed oldest first, D width, H heads, d width of a head, I items, L longest sequence, S places of a bucket.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.baselines.hstu import HstuConfig, HstuLayer, Relations
from model.gem.encoder import BlockSelfAttention, PersonalizedFeedForward
from model.nn.jagged import Jagged, jagged, pad, unpad
from model.nn.norm import layer_norm
from model.nn.time import rotate, rote_angles, turns

EPS = 1e-6
"""Of unit lengths."""
HIDDEN = -5e4
"""Logit of a drawn item that is the wanted one."""
GROUP = 64
"""Places that share drawn items."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NextItemConfig:
    """Shape of a rival; the sizes are those of the published configurations for MovieLens-1M."""

    stack: str = "kunlun"
    width: int = 50
    heads: int = 1
    layers: int = 2
    longest: int = 200
    dropout: float = 0.2
    context_tokens: int = 50
    """Learned tokens that make keys and values of a PFFN (`kunlun`): its hidden units a head."""
    positions: bool = True
    """Whether a learned vector a place is added to its item."""

    def __post_init__(self) -> None:
        if self.stack not in LAYERS:
            raise ValueError(f"stack is {self.stack!r}; choose of {', '.join(LAYERS)}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is not divisible by 2 · heads = {2 * self.heads}; rotary pairs need even heads")
        if min(self.layers, self.longest, self.context_tokens) < 1 or not 0 <= self.dropout < 1:
            raise ValueError("layers, longest and context_tokens must be at least 1, dropout must lie in [0, 1)")


class Places(NamedTuple):
    """Index maps of a batch, computed once."""

    layout: Jagged
    """Of its sequences."""
    whole: Jagged
    """Of all tokens as one sequence: what they share, they share."""
    turns: Tensor
    """[T, d/2] rotary angles of positions, as complex numbers; time has no part in them."""


def places(layout: Jagged, config: NextItemConfig) -> Places:
    """Index maps of sequences that lie oldest first."""
    position, head = layout.position, config.width // config.heads
    angles = rote_angles(position, torch.zeros(len(position), device=position.device), head)
    return Places(layout, jagged(layout.offsets[[0, -1]]), turns(angles))


class NextItem(nn.Module):
    """The frame around a stack."""

    def __init__(self, config: NextItemConfig, items: int) -> None:
        super().__init__()
        self.config = config
        self.item = nn.Embedding(items, config.width)
        nn.init.trunc_normal_(self.item.weight, std=0.02, a=-0.04, b=0.04)
        scale = config.width**-0.5
        self.position = nn.Parameter(torch.empty(config.longest, config.width)) if config.positions else None
        if self.position is not None:
            nn.init.trunc_normal_(self.position, std=scale, a=-2 * scale, b=2 * scale)
        self.layers = nn.ModuleList(LAYERS[config.stack](config) for _ in range(config.layers))

    def forward(self, item_T: Tensor, layout: Jagged) -> Tensor:
        """[T, D] of unit length; a place reads its own item and those before it."""
        x = self.item(item_T) * math.sqrt(self.config.width)
        if self.position is not None:
            x = x + F.embedding(layout.position, self.position)
        x, at = F.dropout(x, self.config.dropout, self.training), places(layout, self.config)
        for layer in self.layers:
            x = layer(x, at)
        return F.normalize(x, dim=-1, eps=EPS)

    def table(self) -> Tensor:
        """[I, D] items of unit length."""
        return F.normalize(self.item.weight, dim=-1, eps=EPS)


class KunlunLayer(nn.Module):
    """PFFN and self-attention of the foundation model, each with its own residual.

    Ids are all there is, so the tokens that make the PFFN's keys and values are learned: the same for every sequence, where
    the foundation model takes them from the request. Attention reads a token at a time on its older side instead of blocks.
    Pooling has no causal form and has no part here, nor has the interaction that would read it.
    """

    def __init__(self, config: NextItemConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.context = nn.Parameter(torch.randn(config.context_tokens, config.width))
        self.pffn = PersonalizedFeedForward(config.width, config.heads)
        self.attention = BlockSelfAttention(config.width, config.heads, rotate_values=False)
        drops_inputs(self.attention.out, config.dropout)

    def forward(self, x_TD: Tensor, at: Places) -> Tensor:
        """[T, D]"""
        fed = self.pffn(x_TD, self.context[None], at.whole)
        x_TD = x_TD + F.dropout(fed - x_TD, self.dropout, self.training)
        return self.attention.around(partial(causal_attention, layout=at.layout, turns=at.turns), x_TD)


class HstuBlock(nn.Module):
    """A layer of HSTU on buckets. Its time bias is one number: the file has an order and no times."""

    def __init__(self, config: NextItemConfig) -> None:
        super().__init__()
        sizes = HstuConfig(width=config.width, heads=config.heads, user_tokens=1, max_events=config.longest, time_buckets=1)
        self.layer = HstuLayer(sizes)
        drops_inputs(self.layer.out, config.dropout)

    def forward(self, x_TD: Tensor, at: Places) -> Tensor:
        """[T, D]"""
        parts = pad(x_TD, at.layout)
        return unpad([self.layer(part, _earlier(part.shape[1], self.layer.longest, part.device)) for part in parts], at.layout)


def _earlier(size: int, longest: int, device: torch.device) -> Relations:
    """That a row sees itself and what lies before it, the same for all sequences of `size` places."""
    place = torch.arange(size, device=device)
    apart = place[None, :, None] - place[None, None, :]
    return Relations(apart >= 0, apart + longest - 1, torch.zeros_like(apart))


class SasrecLayer(nn.Module):
    """Q = LN(X); Y = LN(Q + MHA(Q, X, X)); Y + W_2 ReLU(W_1 Y) (Kang and McAuley 2018, arXiv 1808.09781, section 3.2)."""

    def __init__(self, config: NextItemConfig) -> None:
        super().__init__()
        width, drop = config.width, nn.Dropout(config.dropout)
        self.heads, self.dropout = config.heads, config.dropout
        self.query, self.key_value, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.ReLU(), drop, nn.Linear(width, width), drop)

    def forward(self, x_TD: Tensor, at: Places) -> Tensor:
        """[T, D]"""
        normal = layer_norm(x_TD)
        q = self.query(normal).unflatten(-1, (self.heads, -1))
        k, v = self.key_value(x_TD).unflatten(-1, (2 * self.heads, -1)).chunk(2, dim=1)
        read = causal_attention(q, k, v, at.layout, dropout=self.dropout if self.training else 0.0)
        y = layer_norm(normal + self.out(read.flatten(1)))
        fed: Tensor = self.feed_forward(y)
        return y + fed


LAYERS: dict[str, type[KunlunLayer | HstuBlock | SasrecLayer]] = {"kunlun": KunlunLayer, "hstu": HstuBlock, "sasrec": SasrecLayer}


def drops_inputs(linear: nn.Linear, share: float) -> None:
    """From now on a layer in training drops a share of its inputs, where HSTU's code does: before the output projection."""
    linear.register_forward_pre_hook(lambda layer, inputs: (F.dropout(inputs[0], share, layer.training),))


def causal_attention(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, layout: Jagged, *, turns: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """[T, H, d] of sequences oldest first: `block_attention` of blocks of one token, causal, that reach over the whole sequence.

    That kernel computes a window of keys a query; where the window is the sequence, a dense product a bucket is less.
    """
    if turns is not None:
        q_THd, k_THd = rotate(q_THd, turns), rotate(k_THd, turns)
    parts = [part.transpose(1, 3).unbind(2) for part in pad(torch.stack([q_THd, k_THd, v_THd], dim=1), layout)]
    read = [F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True) for q, k, v in parts]
    return unpad([part.transpose(1, 2) for part in read], layout)


def sampled_softmax(
    out_TD: Tensor, target_T: Tensor, table_ID: Tensor, *, negatives: int, temperature: float, random: torch.Generator
) -> Tensor:
    """Mean cross entropy of the wanted item among itself and `negatives` others, drawn of all items alike.

    The authors draw for every place by itself. Here `GROUP` places, taken at random from the batch, share what is drawn for
    them: every place has the same distribution of items and so the same expected loss; only the noise of places that share
    goes together, and a batch fetches few rows, which otherwise take longer than the model.
    """
    count = -(-len(target_T) // GROUP)
    place = torch.arange(count * GROUP)
    chosen = torch.randperm(len(target_T), generator=random)[place % len(target_T)].to(target_T.device)
    drawn = torch.randint(len(table_ID), (count, negatives), generator=random).to(target_T.device)
    target = target_T[chosen].view(count, GROUP)
    out = out_TD.index_select(0, chosen).view(count, GROUP, -1) / temperature
    logits = (out @ F.embedding(drawn, table_ID).transpose(1, 2)).masked_fill(drawn[:, None] == target[:, :, None], HIDDEN)
    wanted = (out * F.embedding(target, table_ID)).sum(-1, keepdim=True)
    first = torch.zeros(count * GROUP, dtype=torch.int64, device=target.device)
    surprise: Tensor = F.cross_entropy(torch.cat([wanted, logits], dim=-1).flatten(0, 1), first, reduction="none")
    return surprise[: len(target_T)].mean()


def ranks(scores_RI: Tensor, target_R: Tensor, seen: tuple[Tensor, Tensor]) -> Tensor:
    """[R] place of each target among the items that are not seen, from 1; items with the target's score come before it.

    Args:
        scores_RI: of every item.
        target_R: items that are asked for; never removed.
        seen: rows and items that are removed.
    """
    own = scores_RI.gather(1, target_R[:, None])
    left = scores_RI.index_put(seen, scores_RI.new_tensor(-torch.inf)).scatter(1, target_R[:, None], own)
    return (left >= own).sum(1)


def rank_metrics(rank_R: Tensor) -> dict[str, float]:
    """Means over rows: hit rates, NDCG of one relevant item (1 / log2(1 + rank)) and reciprocal rank."""
    rank = rank_R.double()
    gain = torch.where(rank <= 10, 1 / torch.log2(1 + rank), 0.0)
    values = {"hr@10": rank <= 10, "ndcg@10": gain, "hr@50": rank <= 50, "mrr": 1 / rank}
    return {name: float(value.double().mean()) for name, value in values.items()}
