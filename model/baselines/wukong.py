"""Wukong: stacked factorization machines (Zhang et al., ICML 2024, arXiv 2403.02545).

Knows tokens. Does not know features. A history enters as a bag, for the paper has no sequence module; Y is a parameter, the
optional attentive Y is left out.

n examples, t tokens, F factorization and L linear tokens out, D width, k rank of the compressed machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from feature_store.layout import Layout
from model.baselines.frame import Baseline, Counts, FrameConfig, Inputs, bag
from model.nn.interaction import Wukong
from model.nn.norm import layer_norm


@dataclass(frozen=True, kw_only=True, slots=True)
class WukongConfig(FrameConfig):
    """Shape of a Wukong."""

    layers: int = 4
    factor_tokens: int = 8
    linear_tokens: int = 8
    rank: int = 16
    mlp_hidden: int = 640
    """Of the factorization machine blocks."""

    def __post_init__(self) -> None:
        FrameConfig.__post_init__(self)
        self.at_least(1, "layers", "factor_tokens", "linear_tokens", "rank", "mlp_hidden")


class WukongLayer(nn.Module):
    """[n, t, D] → [n, F + L, D]: X_{i+1} = LN([FMB(X_i) ‖ LCB(X_i)] + X_i).

    FMB(X) = reshape(MLP(LN(flatten(X Xᵀ Y)))), LCB(X) = W_L X. Where the number of tokens changes, the shortcut maps X_i
    linearly over tokens.
    """

    def __init__(self, tokens: int, config: WukongConfig) -> None:
        super().__init__()
        self.config = config
        factors, linear = config.factor_tokens, config.linear_tokens
        self.blocks = Wukong(
            tokens, config.width, factors=factors, linear=linear, rank=config.rank, hidden=config.mlp_hidden
        )
        same = tokens == factors + linear
        self.shortcut = None if same else nn.Parameter(torch.randn(factors + linear, tokens) * tokens**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[n, F + L, D]"""
        residual = x if self.shortcut is None else self.shortcut @ x
        return layer_norm(self.blocks(x) + residual)

    def flops(self, rows: int) -> int:
        """Forward FLOPs."""
        config, (tokens, rank) = self.config, self.blocks.y.shape
        width, factors, linear = config.width, config.factor_tokens, config.linear_tokens
        machine = 2 * tokens * rank * width
        mlp = tokens * rank * config.mlp_hidden + config.mlp_hidden * factors * width
        shortcut = 0 if self.shortcut is None else (factors + linear) * tokens * width
        return 2 * rows * (machine + mlp + linear * tokens * width + shortcut)


class WukongNetwork(Baseline):
    """All tokens and the bag of events, l layers (interactions up to order 2^l), flattened."""

    def __init__(self, config: WukongConfig, layout: Layout) -> None:
        out = config.factor_tokens + config.linear_tokens
        super().__init__(config, layout, represented=out * config.width)
        counts = [config.tokens + 1, *[out] * (config.layers - 1)]
        self.layers = nn.ModuleList(WukongLayer(tokens, config) for tokens in counts)

    def represent(self, inputs: Inputs) -> Tensor:
        """[N, (F + L) · D]"""
        history = bag(inputs.history).index_select(0, inputs.request_N)
        x = torch.cat([inputs.candidate_tokens, history[:, None]], dim=1)
        for layer in self.layers:
            x = layer(x)
        return x.flatten(1)

    def represent_flops(self, counts: Counts) -> int:
        """All layers."""
        return sum(layer.flops(counts.candidates) for layer in self.layers)  # type: ignore[operator]
