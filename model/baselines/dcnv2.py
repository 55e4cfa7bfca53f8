"""DCN-V2: explicit crosses of bounded degree beside a deep network (Wang et al., WWW 2021, arXiv 2008.13535).

Knows vectors. Does not know features. A history enters as a bag, for the paper has no sequence module.

n examples, F width of the crossed vector, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from feature_store.layout import Layout
from model.baselines.frame import Baseline, Counts, FrameConfig, Inputs, bag


class LowRankCross(nn.Module):
    """[n, F] → [n, F]: x_{l+1} = x_0 ⊙ (U_l (V_lᵀ x_l) + b_l) + x_l (the cross layer with W_l = U_l V_lᵀ, one expert)."""

    def __init__(self, width: int, *, layers: int, rank: int) -> None:
        super().__init__()
        self.v = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.u = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))

    def forward(self, x0: Tensor) -> Tensor:
        """[n, F]"""
        x = x0
        for v, u in zip(self.v, self.u, strict=True):
            x = x0 * u(v(x)) + x
        return x


class DeepAndCross(nn.Module):
    """[n, F] → [n, F + deep]: the parallel structure, h_{l+1} = ReLU(W_l h_l + b_l) beside the crosses."""

    def __init__(self, width: int, *, layers: int, rank: int, deep: tuple[int, ...]) -> None:
        super().__init__()
        self.cross = LowRankCross(width, layers=layers, rank=rank)
        steps = [(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise((width, *deep))]
        self.deep = nn.Sequential(*(module for step in steps for module in step))

    def forward(self, x0: Tensor) -> Tensor:
        """[n, F + deep]"""
        return torch.cat([self.cross(x0), self.deep(x0)], dim=1)


def cross_flops(rows: int, width: int, *, layers: int, rank: int) -> int:
    """Forward FLOPs of a LowRankCross."""
    return 4 * rows * layers * width * rank


def perceptron_flops(rows: int, *sizes: int) -> int:
    """Forward FLOPs of linear layers of these widths."""
    return 2 * rows * sum(before * after for before, after in pairwise(sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class DcnConfig(FrameConfig):
    """Shape of a DCN-V2."""

    cross_layers: int = 3
    cross_rank: int = 128
    deep: tuple[int, ...] = (1024, 512)

    def __post_init__(self) -> None:
        FrameConfig.__post_init__(self)
        self.at_least(1, "cross_layers", "cross_rank", "deep")


class DeepCrossNetwork(Baseline):
    """x_0 = all tokens and the bag of events side by side, then the parallel DCN-V2."""

    config: DcnConfig

    def __init__(self, config: DcnConfig, layout: Layout) -> None:
        width = (config.tokens + 1) * config.width
        super().__init__(config, layout, represented=width + config.deep[-1])
        self.crossed = width
        self.dcn = DeepAndCross(width, layers=config.cross_layers, rank=config.cross_rank, deep=config.deep)

    def represent(self, inputs: Inputs) -> Tensor:
        """[N, F + deep]"""
        history = bag(inputs.history).index_select(0, inputs.request_N)
        return self.dcn(torch.cat([inputs.candidate_tokens.flatten(1), history], dim=1))

    def represent_flops(self, counts: Counts) -> int:
        """Crosses and the deep network."""
        config, width = self.config, self.crossed
        crossed = cross_flops(counts.candidates, width, layers=config.cross_layers, rank=config.cross_rank)
        return crossed + perceptron_flops(counts.candidates, width, *config.deep)
