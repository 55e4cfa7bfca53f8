"""The embedding of a (user, ad) pair that Solaris computes ahead: the compressor's z, in int8.

Knows vectors. Does not know stores, levels or time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from model.loopfm.compressor import Compressor

MAX_STEPS = 127
"""int8 codes −127 … 127; −128 is never used, so that a vector and its negative have equal codes."""


def pair_embeddings(compressor: Compressor, taps: Sequence[Tensor]) -> Tensor:
    """[N, Z] float32 from the taps of one forward: the same z that LoopFM stores, before int4."""
    with torch.no_grad():
        return compressor(taps)


def quantize_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """[N, Z] → (int8 [N, Z], scale [N]): symmetric, one scale a vector; zeros have scale 0.

    Raises:
        ValueError: a value is not finite.
    """
    if not torch.isfinite(values).all():
        raise ValueError("a pair embedding holds NaN or infinity; do not store it, look at the snapshot")
    scale = values.abs().amax(dim=1) / MAX_STEPS
    steps = torch.where(scale[:, None] > 0, values / scale[:, None].clamp_min(1e-30), 0.0)
    return steps.round().clamp(-MAX_STEPS, MAX_STEPS).to(torch.int8), scale


def pair_space_id(loopfm_space: bytes) -> bytes:
    """8 bytes: the same coordinates as a LoopFM space in another code."""
    return hashlib.sha256(loopfm_space + b"int8/scaled").digest()[:8]
