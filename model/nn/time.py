"""Encodes when events happened relative to the request: rotary angles and log buckets.

Knows integer milliseconds. Does not know events. Differences are taken in int64; no absolute time is ever a float.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MINUTE_MS = 60_000


def gap_log(event_ms: Tensor, request_ms: Tensor, *, scale_ms: int) -> Tensor:
    """τ = log(1 + Δt / scale), Δt = request − event ≥ 0."""
    gap = (request_ms - event_ms).clamp_min(0)
    return torch.log1p(gap.double() / scale_ms).float()


def rote_angles(position: Tensor, tau: Tensor, width: int, *, base: float = 10_000.0) -> Tensor:
    """Rotary temporal angles [T, width/2]: position · θ_i + τ · φ_i.

    Two frequency families: θ geometric from 1 to 1/base over the head, φ from 1 to 1/32 (Kunlun's ROTE; the reference
    of Δt and the scales are our choice).
    """
    index = torch.arange(width // 2, device=tau.device, dtype=torch.float32) / max(1, width // 2)
    theta, phi = base**-index, 32.0**-index
    return position.float()[:, None] * theta + tau[:, None] * phi


def turns(angles: Tensor) -> Tensor:
    """e^{i·angle} [T, d_h/2], computed once for all that turns by these angles."""
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotates interleaved pairs of x [T, H, d_h], as complex numbers, by turns [T, d_h/2]; norms stay."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)


class LogBuckets(nn.Module):
    """A learned vector a log-spaced bucket of the gap to the request (minutes), added to the event."""

    def __init__(self, width: int, *, num_buckets: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(num_buckets, width)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, event_ms: Tensor, request_ms: Tensor) -> Tensor:
        """[T, width]"""
        gap = (request_ms - event_ms).clamp_min(0).double() / MINUTE_MS
        bucket = (torch.log1p(gap) * 4).long().clamp(max=self.table.num_embeddings - 1)
        return self.table(bucket)
