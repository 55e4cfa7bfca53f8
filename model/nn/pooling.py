"""Summarizes a sequence into a few tokens: Hierarchical Seed Pooling.

Knows seeds and Kronecker sums. Does not know what is summarized.

R sequences, T tokens packed, D width, E width of the summary, S seeds, K summary tokens, k Kronecker terms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.kernels.jagged_attention import jagged_attention
from model.kernels.norm_matmul import norm_linear
from model.nn.jagged import Jagged
from model.nn.norm import rms_norm


class SumKronLinear(nn.Module):
    """Y = Σ_i Z_iᵀ X W_i, X [R, S, D] → Y [R, K, E]: k (S·K + D·E) parameters (Kunlun §HSP, stage 3; there E = D).

    Z is applied first: the same result as W first, at a fraction of the products.
    """

    def __init__(self, seeds: int, tokens: int, width: int, terms: int, out_width: int | None = None) -> None:
        super().__init__()
        self.z = nn.Parameter(nn.init.trunc_normal_(torch.empty(terms, seeds, tokens), std=seeds**-0.5))
        self.w = nn.Parameter(nn.init.trunc_normal_(torch.empty(terms, width, out_width or width), std=(terms * width) ** -0.5))

    def forward(self, x: Tensor) -> Tensor:
        """[R, K, E]: one product over seeds with the terms folded in, one over width."""
        terms, seeds, tokens = self.z.shape
        pooled = self.z.permute(0, 2, 1).reshape(terms * tokens, seeds) @ x
        mixed = pooled.unflatten(1, (terms, tokens)).permute(0, 2, 1, 3).flatten(2)
        return mixed @ self.w.flatten(0, 1)


def sum_kron_reference(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """The definition, W first."""
    return torch.stack([z[i].T @ (x @ w[i]) for i in range(len(z))]).sum(0)


class HierarchicalSeedPooling(nn.Module):
    """Learned seeds attend the sequence, more of them than needed; a Kronecker sum compresses them (Kunlun §HSP).

    A summary of another width, `out_width`, is the Kronecker sum's: its W_i are D × E then, and no projection follows.

    Raises:
        ValueError: there are not more seeds than summary tokens.
    """

    def __init__(
        self, width: int, *, heads: int, seeds: int, tokens: int, terms: int, out_width: int | None = None
    ) -> None:
        super().__init__()
        if seeds <= tokens:
            raise ValueError(f"{seeds} seeds must exceed {tokens} summary tokens; pooling is over-complete by design")
        self.heads, self.tokens = heads, tokens
        self.seeds = nn.Parameter(torch.randn(seeds, width) * width**-0.5)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.compress = SumKronLinear(seeds, tokens, width, terms, out_width)

    def forward(self, s_TD: Tensor, layout: Jagged) -> Tensor:
        """[R, K, E]; a constant for an empty sequence."""
        seeds = self.query(rms_norm(self.seeds)).unflatten(-1, (self.heads, -1))[None]
        k, v = norm_linear(s_TD, self.key_value).unflatten(-1, (2 * self.heads, -1)).chunk(2, dim=1)
        read = jagged_attention(seeds, k, v, layout).flatten(2)
        return rms_norm(self.compress(self.out(read) + self.seeds))


