"""Turns what the layers say of a candidate into one logit an objective, aware of the surface.

Knows surfaces and objectives as numbers. Does not know features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.nn.norm import rms_norm


class ObjectiveHeads(nn.Module):
    """A shared hidden layer with the surface's vector, then a small head of its own for every objective.

    logit_k = w_kᵀ GELU(W_k h + …) + b[surface, k]. N candidates, K objectives.
    """

    def __init__(self, width: int, *, surfaces: int, objectives: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        own = max(8, hidden // 4)
        self.surface = nn.Embedding(surfaces, hidden)
        self.trunk = nn.Linear(width, hidden)
        self.own = nn.Parameter(torch.randn(objectives, hidden, own) * hidden**-0.5)
        self.out = nn.Parameter(torch.zeros(objectives, own))
        self.bias = nn.Embedding(surfaces, objectives)
        self.dropout = dropout
        nn.init.normal_(self.surface.weight, std=0.02)
        nn.init.zeros_(self.bias.weight)

    @torch.no_grad()
    def start_at(self, logits_SK: Tensor) -> None:
        """Lets an untrained model say the base rate of each surface and objective: `out` is zero, the bias is all it says."""
        self.bias.weight.copy_(logits_SK)

    def forward(self, x: Tensor, surface_N: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [N, K], the shared hidden layer [N, hidden])."""
        x = F.dropout(x, self.dropout, self.training)
        hidden = F.gelu(self.trunk(rms_norm(x)) + self.surface(surface_N), approximate="tanh")
        own = F.gelu(torch.einsum("nh,kho->nko", hidden, self.own), approximate="tanh")
        return torch.einsum("nko,ko->nk", own, self.out) + self.bias(surface_N), hidden
