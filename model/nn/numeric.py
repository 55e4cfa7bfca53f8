"""Encodes numbers of any scale piecewise linearly between quantiles of the training data.

Knows columns of numbers. Does not know what they measure.

After Gorishniy et al. 2022, "On Embeddings for Numerical Features": bin b of a value x is (x − edge_b) / (edge_b+1 − edge_b),
cut to 0 … 1. A missing value (NaN) is all zeros and a flag. n rows, C columns, B bins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from model.nn.shape import DenseColumn


class PiecewiseLinear(nn.Module):
    """Dense columns [n, ΣC widths] → codes [n, out_width]; embeddings pass through."""

    edges: Tensor

    def __init__(self, columns: tuple[DenseColumn, ...], *, num_bins: int = 16) -> None:
        super().__init__()
        starts = np.cumsum([0, *(column.width for column in columns)])[:-1]
        plain = [int(s) for s, column in zip(starts, columns, strict=True) if not column.is_embedding]
        vectors = [
            int(s) + offset
            for s, column in zip(starts, columns, strict=True)
            if column.is_embedding
            for offset in range(column.width)
        ]
        self._starts, self._widths = [int(s) for s in starts], [column.width for column in columns]
        self._plain, self._vectors, self.num_bins = plain, vectors, num_bins
        self.register_buffer("edges", torch.linspace(-1, 1, num_bins + 1).repeat(len(plain), 1))

    @property
    def out_width(self) -> int:
        """C · (B + 1) for numbers, and the widths of embeddings."""
        return len(self._plain) * (self.num_bins + 1) + len(self._vectors)

    def codes_of(self, columns: Sequence[int]) -> list[int]:
        """Which of the codes [out_width] belong to some of the columns."""
        plain, vectors, found = len(self._plain), len(self._vectors), []
        for column in columns:
            for value in range(self._starts[column], self._starts[column] + self._widths[column]):
                if value in self._plain:
                    at = self._plain.index(value)
                    found += [*range(at * self.num_bins, (at + 1) * self.num_bins), plain * self.num_bins + at]
                else:
                    found.append(self.out_width - vectors + self._vectors.index(value))
        return sorted(found)

    def fit(self, values: npt.NDArray[np.float32]) -> None:
        """Sets edges to quantiles of training rows [n, ΣC widths]; a constant column keeps bins of width 1."""
        for at, column in enumerate(self._plain):
            finite = values[:, column][np.isfinite(values[:, column])]
            if not len(finite):
                continue
            quantiles = np.quantile(finite.astype(np.float64), np.linspace(0, 1, self.num_bins + 1))
            self.edges[at] = torch.from_numpy(quantiles.astype(np.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Codes [n, out_width]."""
        numbers = x[:, self._plain]
        missing = numbers.isnan()
        low, high = self.edges[:, :-1], self.edges[:, 1:]
        width = (high - low).clamp_min(1e-9)
        codes = ((torch.nan_to_num(numbers)[:, :, None] - low) / width).clamp(0, 1)
        codes = torch.where(missing[:, :, None], 0.0, codes).flatten(1)
        return torch.cat([codes, missing.to(x.dtype), torch.nan_to_num(x[:, self._vectors])], dim=1)
