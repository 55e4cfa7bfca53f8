"""Deep Interest Network: every candidate weighs the events of its history (Zhou et al., KDD 2018, arXiv 1706.06978).

Knows equation 3 and figure 2 of the paper. Does not know features. Events are weighed as tokens, which know their label and
time, where the paper weighs bare embeddings; PReLU stands where the paper also offers Dice.

N candidates, P pairs of a candidate and an event of its request, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from feature_store.layout import Layout
from model.baselines.dcnv2 import perceptron_flops
from model.baselines.frame import Baseline, Counts, FrameConfig, Inputs
from model.nn.jagged import jagged


@dataclass(frozen=True, kw_only=True, slots=True)
class DinConfig(FrameConfig):
    """Shape of a DIN; 36 and (200, 80) are the paper's."""

    attention_hidden: int = 36
    deep: tuple[int, ...] = (200, 80)

    def __post_init__(self) -> None:
        FrameConfig.__post_init__(self)
        self.at_least(1, "attention_hidden", "deep")


class ActivationUnit(nn.Module):
    """a(e, v) = w · PReLU(W [e ‖ v ‖ e ⊙ v ‖ e − v] + b) + c: how much an event says about a candidate (figure 2)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        last = nn.Linear(hidden, 1)
        # Normalized events add up: with weights of the usual size a long history would drown ad and context at first.
        nn.init.normal_(last.weight, std=1e-3)
        nn.init.zeros_(last.bias)
        self.score = nn.Sequential(nn.Linear(4 * width, hidden), nn.PReLU(), last)

    def forward(self, event_PD: Tensor, target_PD: Tensor) -> Tensor:
        """[P, 1], of any sign: no softmax."""
        mixed = [event_PD, target_PD, event_PD * target_PD, event_PD - target_PD]
        return self.score(torch.cat(mixed, dim=1))


class DeepInterestNetwork(Baseline):
    """MLP([context ‖ ad ‖ interest]), interest = Σ_j a(e_j, v) e_j over the events of a candidate's request (eq. 3)."""

    config: DinConfig

    def __init__(self, config: DinConfig, layout: Layout) -> None:
        super().__init__(config, layout, represented=config.deep[-1])
        width = config.width
        self.target = nn.Linear(config.ad_tokens * width, width)
        self.unit = ActivationUnit(width, config.attention_hidden)
        self.sizes = (config.tokens + 1) * width, *config.deep
        steps = [(nn.Linear(before, after), nn.PReLU()) for before, after in pairwise(self.sizes)]
        self.deep = nn.Sequential(*(module for step in steps for module in step))

    def represent(self, inputs: Inputs) -> Tensor:
        """[N, deep]"""
        return self.deep(torch.cat([inputs.candidate_tokens.flatten(1), self.interest(inputs)], dim=1))

    def interest(self, inputs: Inputs) -> Tensor:
        """[N, D]; zeros for an empty history."""
        target, history = self.target(inputs.ads_NaD.flatten(1)), inputs.history.layout
        pairs = jagged(nn.functional.pad(history.lengths[inputs.request_N].cumsum(0), (1, 0)))
        rows = history.offsets[:-1][inputs.request_N][pairs.sequence] + pairs.position
        events = inputs.history.values_TD.index_select(0, rows)
        weighed = self.unit(events, target.index_select(0, pairs.sequence)) * events
        return torch.zeros_like(target).index_add(0, pairs.sequence, weighed)

    def represent_flops(self, counts: Counts) -> int:
        """Every pair, then the deep network."""
        config, rows = self.config, counts.candidates
        pairs = int(counts.lengths @ counts.shown)
        weighed = perceptron_flops(pairs, 4 * config.width, config.attention_hidden, 1)
        target = perceptron_flops(rows, config.ad_tokens * config.width, config.width)
        return weighed + target + perceptron_flops(rows, *self.sizes)
