"""InterFormer: interaction and sequence modules that inform each other layer by layer (Zeng et al., arXiv 2411.09852 v4).

Knows sections 4.2 to 4.4 of the paper. Does not know features, nor the paper's MaskNet: all sources are one stream already.

The sequence is encoded anew for every candidate, since the candidate is among the tokens that make its weights.
N candidates, t tokens, m CLS tokens, L events at most, D width, G = m + PMA tokens + recent tokens of a sequence summary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feature_store.layout import Layout
from model.baselines.dcnv2 import LowRankCross, cross_flops, perceptron_flops
from model.baselines.frame import Baseline, Counts, FrameConfig, Inputs, padded
from model.nn.norm import layer_norm
from model.nn.time import rotate, rote_angles, turns

Gate = Literal["identity", "sigmoid", "tanh", "self"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InterFormerConfig(FrameConfig):
    """Shape of an InterFormer; 4 CLS, 2 PMA and 2 recent tokens are the paper's."""

    layers: int = 3
    cls_tokens: int = 4
    """Of the summary of the other tokens, which starts the sequence."""
    pma_tokens: int = 2
    recent_tokens: int = 2
    generator_hidden: int = 32
    """Of f, which makes the PFFN's weights."""
    dot_hidden: int = 64
    cross_rank: int = 32
    mlp_hidden: int = 192
    """Of the MLP after an interaction."""
    gate: Gate = "identity"
    """σ of the printed Gating(X) = σ(X ⊙ MLP(X)), of which the paper names these three; self: σ(MLP(X)) ⊙ X instead."""
    residual: bool = True
    """Adds inputs and normalizes in the sequence arch, which eq. S' = MHA(PFFN(X_sum, S)) leaves unsaid; False is as printed."""

    def __post_init__(self) -> None:
        FrameConfig.__post_init__(self)
        self.at_least(1, "layers", "cls_tokens", "pma_tokens", "generator_hidden", "dot_hidden", "cross_rank", "mlp_hidden")
        self.at_least(0, "recent_tokens")
        if self.gate not in ("identity", "sigmoid", "tanh", "self"):
            raise ValueError(f"gate is {self.gate!r}; it must be identity, sigmoid, tanh or self")

    @property
    def summary_tokens(self) -> int:
        """G."""
        return self.cls_tokens + self.pma_tokens + self.recent_tokens


class Gating(nn.Module):
    """σ(X ⊙ MLP(X)), or σ(MLP(X)) ⊙ X (section 4.4); the MLP is one layer over D."""

    def __init__(self, width: int, gate: Gate) -> None:
        super().__init__()
        self.mlp, self.gate = nn.Linear(width, width), gate

    def forward(self, x: Tensor) -> Tensor:
        """[n, t, D]"""
        if self.gate == "self":
            return self.mlp(x).sigmoid() * x
        gated = x * self.mlp(x)
        return gated if self.gate == "identity" else getattr(gated, self.gate)()


class Pooling(nn.Module):
    """PMA(Q, S) = MHA(Q, S, S) with learned queries Q (section 3.4)."""

    def __init__(self, width: int, *, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Parameter(torch.randn(tokens, width) * width**-0.5)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, s: Tensor, valid: Tensor) -> Tensor:
        """[N, tokens, D] of S [N, m + L, D]."""
        q = self.query(self.queries).unflatten(-1, (self.heads, -1)).transpose(0, 1).expand(len(s), -1, -1, -1)
        k, v = self.key_value(s).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None])
        return self.out(read.transpose(1, 2).flatten(2))


class CrossArch(nn.Module):
    """X_sum = Gating(MLP(X)), S_sum = Gating([S_CLS ‖ S_PMA ‖ S_recent]) (section 4.4); this MLP maps t tokens to m."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Parameter(torch.randn(config.cls_tokens, config.tokens) * config.tokens**-0.5)
        self.pooling = Pooling(config.width, heads=config.heads, tokens=config.pma_tokens)
        self.gate_x, self.gate_s = Gating(config.width, config.gate), Gating(config.width, config.gate)

    def of_tokens(self, x: Tensor) -> Tensor:
        """X_sum [N, m, D]."""
        return self.gate_x(self.tokens @ x)

    def of_sequence(self, s: Tensor, valid: Tensor) -> Tensor:
        """S_sum [N, G, D]; recent events that there are not are zeros."""
        recent = self.config.recent_tokens
        kept = F.pad(s * valid[..., None], (0, 0, 0, recent))
        cls, newest = kept[:, : self.config.cls_tokens], kept[:, self.config.cls_tokens :][:, :recent]
        return self.gate_s(torch.cat([cls, self.pooling(s, valid), newest], dim=1))

    def flops(self, rows: int, tokens: int) -> int:
        """Forward FLOPs over `tokens` of `rows` sequences."""
        config, width = self.config, self.config.width
        read = 2 * config.pma_tokens * width**2 + 4 * tokens * width**2 + 4 * tokens * config.pma_tokens * width
        mixed = config.cls_tokens * config.tokens * width
        gates = (config.cls_tokens + config.summary_tokens + config.pma_tokens) * width**2
        return read + 2 * rows * (mixed + gates)


class InteractionArch(nn.Module):
    """X' = MLP(Interaction([X ‖ S_sum])) (eq. 7) with a DHEN layer, as in the paper's experiments.

    Interaction(Z) = LN(MLP(⟨z_i, z_j⟩ i<j) + cross(Z) + Z): dot products and one low-rank DCN-V2 cross, and a shortcut.
    """

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        tokens = config.tokens + config.summary_tokens
        flat = tokens * config.width
        pairs = torch.triu_indices(tokens, tokens, offset=1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.dot = nn.Sequential(nn.Linear(pairs.shape[1], config.dot_hidden), nn.SiLU(), nn.Linear(config.dot_hidden, flat))
        self.cross = LowRankCross(flat, layers=1, rank=config.cross_rank)
        out = config.tokens * config.width
        self.mlp = nn.Sequential(nn.Linear(flat, config.mlp_hidden), nn.SiLU(), nn.Linear(config.mlp_hidden, out))
        self.config = config

    def forward(self, x: Tensor, s_sum: Tensor) -> Tensor:
        """[N, t, D]"""
        z = torch.cat([x, s_sum], dim=1)
        first, second = self.pairs.unbind()  # type: ignore[operator]
        dots = (z @ z.transpose(1, 2))[:, first, second]
        crossed = (self.dot(dots) + self.cross(z.flatten(1))).view_as(z) + z
        return self.mlp(layer_norm(crossed).flatten(1)).unflatten(1, x.shape[1:])

    def flops(self, rows: int) -> int:
        """Forward FLOPs."""
        config, tokens = self.config, self.config.tokens + self.config.summary_tokens
        flat = tokens * config.width
        dots = 2 * rows * tokens * flat + perceptron_flops(rows, tokens * (tokens - 1) // 2, config.dot_hidden, flat)
        crossed = cross_flops(rows, flat, layers=1, rank=config.cross_rank)
        return dots + crossed + perceptron_flops(rows, flat, config.mlp_hidden, config.tokens * config.width)


class SequenceArch(nn.Module):
    """S' = MHA(PFFN(X_sum, S)), PFFN(X_sum, S) = f(X_sum) S: f makes a D × D matrix a candidate (section 4.3), rotary places.

    With `residual`: P = S + PFFN(X_sum, LN(S)), S' = P + MHA(LN(P)).
    """

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.residual, self.config = config.heads, config.residual, config
        sizes = config.cls_tokens * width, config.generator_hidden, width**2
        self.generator = nn.Sequential(nn.Linear(*sizes[:2]), nn.SiLU(), nn.Linear(*sizes[1:]))
        nn.init.normal_(self.generator[2].bias, std=width**-0.5)  # type: ignore[arg-type]  # so that PFFN keeps the scale of S
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_sum: Tensor, s: Tensor, valid: Tensor) -> Tensor:
        """[N, m + L, D]"""
        weight = self.generator(x_sum.flatten(1)).unflatten(1, (s.shape[-1], s.shape[-1]))
        if not self.residual:
            return self.attend(s @ weight.transpose(1, 2), valid)
        s = s + layer_norm(s) @ weight.transpose(1, 2)
        return s + self.attend(layer_norm(s), valid)

    def attend(self, s: Tensor, valid: Tensor) -> Tensor:
        """MHA(S) [N, m + L, D]."""
        q, k, v = self.qkv(s).unflatten(-1, (3, self.heads, -1)).unbind(2)
        place = torch.arange(s.shape[1], device=s.device)
        turn = turns(rote_angles(place, torch.zeros_like(place, dtype=s.dtype), q.shape[-1]))
        q, k, v = (part.transpose(1, 2) for part in (rotate(q, turn), rotate(k, turn), v))
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None])
        return self.out(read.transpose(1, 2).flatten(2))

    def flops(self, rows: int, tokens: int, pairs: int) -> int:
        """Forward FLOPs over `tokens` of `rows` sequences with `pairs` of them."""
        width, config = self.config.width, self.config
        made = perceptron_flops(rows, config.cls_tokens * width, config.generator_hidden, width**2)
        return made + 10 * tokens * width**2 + 4 * pairs * width


class InterFormerNetwork(Baseline):
    """L layers, both arches reading each other's summary of the layer before; then [X_sum ‖ S_sum] of the last."""

    config: InterFormerConfig
    pads = True

    def __init__(self, config: InterFormerConfig, layout: Layout) -> None:
        out = (config.cls_tokens + config.summary_tokens) * config.width
        super().__init__(config, layout, represented=out)
        self.crosses = nn.ModuleList(CrossArch(config) for _ in range(config.layers + 1))
        self.interactions = nn.ModuleList(InteractionArch(config) for _ in range(config.layers))
        self.sequences = nn.ModuleList(SequenceArch(config) for _ in range(config.layers))

    def represent(self, inputs: Inputs) -> Tensor:
        """[N, (m + G) · D]"""
        x = inputs.candidate_tokens
        events, valid = (part.index_select(0, inputs.request_N) for part in padded(inputs.history))
        x_sum = self.crosses[0].of_tokens(x)  # type: ignore[operator]
        s, valid = torch.cat([x_sum, events], dim=1), F.pad(valid, (self.config.cls_tokens, 0), value=True)
        for interact, attend, before, after in zip(
            self.interactions, self.sequences, self.crosses, self.crosses[1:], strict=False
        ):
            x, s = interact(x, before.of_sequence(s, valid)), attend(x_sum, s, valid)  # type: ignore[operator]
            x_sum = after.of_tokens(x)  # type: ignore[operator]
        s_sum = self.crosses[-1].of_sequence(s, valid)  # type: ignore[operator]
        return torch.cat([x_sum, s_sum], dim=1).flatten(1)

    def represent_flops(self, counts: Counts) -> int:
        """Every candidate's own sequence."""
        length, rows = np.repeat(counts.lengths, counts.shown) + self.config.cls_tokens, counts.candidates
        tokens, pairs = int(length.sum()), int((length**2).sum())
        total = sum(cross.flops(rows, tokens) for cross in self.crosses)  # type: ignore[operator]
        total += sum(interact.flops(rows) for interact in self.interactions)  # type: ignore[operator]
        return total + sum(attend.flops(rows, tokens, pairs) for attend in self.sequences)  # type: ignore[operator]
