"""Crosses tokens with each other: Wukong's interaction, a mixture of such experts, and the context summary.

Knows tokens. Does not know users, ads or sequences.

n examples, t tokens in, D width, F = factorization tokens out, L = linear tokens out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.nn.norm import layer_norm, rms_norm


def factorization_machine(x: Tensor, y: Tensor) -> Tensor:
    """X (Xᵀ Y) [n, t, k]: pairwise products of tokens, compressed to k columns by Y [t, k] in O(t·k·D) (Wukong eq. 4)."""
    return x @ (x.transpose(1, 2) @ y)


class Wukong(nn.Module):
    """[n, t, D] → [n, F + L, D]: factorization machine block beside linear compression (Zhang et al. 2024)."""

    def __init__(self, tokens: int, width: int, *, factors: int, linear: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.randn(tokens, rank) * tokens**-0.5)
        self.mlp = nn.Sequential(nn.Linear(tokens * rank, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, factors * width))
        self.compress = nn.Parameter(torch.randn(linear, tokens) * tokens**-0.5)
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        """[n, F + L, D]"""
        crossed = layer_norm(factorization_machine(x, self.y).flatten(1))
        return torch.cat([self.mlp(crossed).unflatten(1, (self.factors, -1)), self.compress @ x], dim=1)


class MixtureOfWukongExperts(nn.Module):
    """Every expert sees every example; gated outputs add up, or their tokens stand side by side (Kunlun §GlobalInteraction).

    X' = LN(Σ_m g_m ⊙ Wukong_m(X) + shortcut(X)). `concat` splits F and L among the experts.
    """

    def __init__(
        self,
        tokens: int,
        width: int,
        *,
        experts: int,
        factors: int,
        linear: int,
        rank: int,
        hidden: int,
        combine: str = "sum",
    ) -> None:
        super().__init__()
        if combine not in ("sum", "concat"):
            raise ValueError(f"combine is {combine!r}; it must be sum or concat")
        if combine == "concat" and (factors % experts or linear % experts):
            raise ValueError(f"{experts} experts cannot share {factors} and {linear} tokens; make both divisible")
        share = experts if combine == "concat" else 1
        self.combine = combine
        self.experts = nn.ModuleList(
            Wukong(tokens, width, factors=factors // share, linear=linear // share, rank=rank, hidden=hidden)
            for _ in range(experts)
        )
        self.gate = nn.Parameter(torch.full((experts,), 1.0 / (experts if combine == "sum" else 1)))
        self.shortcut = nn.Parameter(torch.randn(factors + linear, tokens) * tokens**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[n, F + L, D]"""
        out = [gate * expert(x) for gate, expert in zip(self.gate, self.experts, strict=True)]
        mixed = torch.stack(out).sum(0) if self.combine == "sum" else torch.cat(out, dim=1)
        return layer_norm(mixed + self.shortcut @ x)


class WeightGen(nn.Module):
    """Summarizes context tokens: compression over tokens, then a gated MLP over width (Kunlun §WeightGen)."""

    def __init__(self, tokens: int, summary: int, width: int) -> None:
        super().__init__()
        self.compress = nn.Parameter(torch.randn(summary, tokens) * tokens**-0.5)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(approximate="tanh"), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[n, summary, D]"""
        summary = self.compress @ x
        return rms_norm(summary + self.mlp(rms_norm(summary)))
