"""Crosses tokens with each other: Wukong's interaction, a mixture of such experts, and the context summary.

Knows tokens. Does not know users, ads or sequences.

n examples, t tokens in, D width, F = factorization tokens out, L = linear tokens out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.nn.norm import layer_norm, rms_norm


def factorization_machine(x: Tensor, y: Tensor) -> Tensor:
    """X (Xᵀ Y) [n, t, k]: pairwise products of tokens, compressed to k columns by Y [t, k] in O(t·k·D) (Wukong eq. 4)."""
    return x @ (x.transpose(1, 2) @ y)


def machines(x: Tensor, ys: Sequence[Tensor]) -> list[Tensor]:
    """The factorization machine of every Y [t, k]; few tokens are multiplied with each other once, for all of them."""
    if not gram_is_cheaper(*x.shape[1:], rank=ys[0].shape[1], count=len(ys)):
        return [factorization_machine(x, y) for y in ys]
    gram = x @ x.transpose(1, 2)
    return [gram @ y for y in ys]


def machines_reference(x: Tensor, ys: Sequence[Tensor]) -> list[Tensor]:
    """The definition, one at a time."""
    return [factorization_machine(x, y) for y in ys]


def gram_is_cheaper(tokens: int, width: int, *, rank: int, count: int) -> bool:
    """Whether (X Xᵀ) Y takes fewer products than X (Xᵀ Y) for `count` matrices Y of `rank` columns."""
    return tokens * (width + rank * count) < 2 * width * rank * count


def machine_flops(rows: int, tokens: int, width: int, *, rank: int, count: int) -> int:
    """Forward FLOPs of `machines`."""
    if gram_is_cheaper(tokens, width, rank=rank, count=count):
        return 2 * rows * tokens * tokens * (width + rank * count)
    return 4 * rows * tokens * width * rank * count


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
        return torch.cat([self.factorized(factorization_machine(x, self.y)), self.compress @ x], dim=1)

    def factorized(self, machine: Tensor) -> Tensor:
        """Factorization tokens [n, F, D] from a factorization machine [n, t, k]."""
        return self.mlp(layer_norm(machine.flatten(1))).unflatten(1, (self.factors, -1))


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
        return layer_norm(self.crossed(x, self.shortcut))

    def crossed(self, x: Tensor, shortcut: Tensor) -> Tensor:
        """Σ_m g_m ⊙ Wukong_m(X) + shortcut(X) [n, F + L, D], not yet normalized: all that is linear in X is one product."""
        out = self._linear(shortcut).expand(len(x), -1, -1) @ x
        crossed = machines(x, [expert.y for _, expert, _ in self._members()])
        for (gate, expert, first), machine in zip(self._members(), crossed, strict=True):
            out[:, first : first + expert.factors] += gate * expert.factorized(machine)
        return out

    def forward_reference(self, x: Tensor) -> Tensor:
        """The definition, an expert at a time."""
        out = [gate * expert(x) for gate, expert in zip(self.gate, self.experts, strict=True)]
        mixed = torch.stack(out).sum(0) if self.combine == "sum" else torch.cat(out, dim=1)
        return layer_norm(mixed + self.shortcut @ x)

    def _members(self) -> Iterator[tuple[Tensor, Wukong, int]]:
        """(gate, expert, token at which its output starts)."""
        step = 0 if self.combine == "sum" else len(self.shortcut) // len(self.experts)
        for number, expert in enumerate(self.experts):
            yield self.gate[number], cast(Wukong, expert), step * number

    def _linear(self, shortcut: Tensor) -> Tensor:
        """[F + L, t]: shortcut and gated compressions, each in its expert's rows."""
        total = shortcut
        for gate, expert, first in self._members():
            before = first + expert.factors
            after = len(total) - before - len(expert.compress)
            total = total + gate * F.pad(expert.compress, (0, 0, before, after))
        return total


class WeightGen(nn.Module):
    """Summarizes context tokens: compression over tokens, then a gated MLP over width (Kunlun §WeightGen)."""

    def __init__(self, tokens: int, summary: int, width: int) -> None:
        super().__init__()
        self.compress = nn.Parameter(torch.randn(summary, tokens) * tokens**-0.5)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(approximate="tanh"), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[n, summary, D]"""
        summary = self.compress.expand(len(x), -1, -1) @ x  # one small product an example: nothing is transposed
        return rms_norm(summary + self.mlp(rms_norm(summary)))
