"""Compresses what the foundation model thought of an impression into 64 numbers of four bits.

Knows taps. Does not know where they come from, nor who reads the result. Gradients never reach the foundation model.

N rows, Z width of the representation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from model.loopfm.config import CompressorConfig
from model.nn.norm import rms_norm

STEPS = 8
"""int4 codes −8 … 7 stand for −1 … 7/8; the quotient is exact in float32, bfloat16 and float16."""


class Compressor(nn.Module):
    """z = tanh(Enc(sg e)), e the RMS-normalized taps side by side; a decoder for every Matryoshka prefix.

    Loss Σ_d ‖e − Dec_d(z_1:d)‖² (LoopFM, arXiv 2605.29280; layer choice and widths are ours).
    """

    def __init__(self, config: CompressorConfig, tap_widths: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        total = config.tap_width * len(tap_widths)
        self.project = nn.ModuleList(nn.Linear(width, config.tap_width, bias=False) for width in tap_widths)
        for projection in self.project:
            assert isinstance(projection, nn.Linear)
            nn.init.orthogonal_(projection.weight)
            projection.weight.requires_grad_(False)
        self.encoder = nn.Sequential(
            nn.Linear(total, config.hidden), nn.GELU(approximate="tanh"), nn.Linear(config.hidden, config.dim)
        )
        self.decoders = nn.ModuleList(nn.Linear(width, total) for width in config.prefixes)

    def target(self, taps: Sequence[Tensor]) -> Tensor:
        """e [N, ·]: each tap detached, normalized, and projected by a fixed orthogonal map, so that none dominates."""
        parts = [project(rms_norm(tap.detach())) for project, tap in zip(self.project, taps, strict=True)]
        return torch.cat([rms_norm(part) for part in parts], dim=1)

    def forward(self, taps: Sequence[Tensor]) -> Tensor:
        """z [N, Z] in (−1, 1)."""
        return torch.tanh(self.encoder(self.target(taps)))

    def reconstruction_loss(self, taps: Sequence[Tensor]) -> Tensor:
        """Mean squared error of every prefix, added; 0 for no rows."""
        target = self.target(taps)
        z = torch.tanh(self.encoder(target))
        losses = [
            (decoder(z[:, :width]) - target).square().sum() / max(1, target.numel())
            for width, decoder in zip(self.config.prefixes, self.decoders, strict=True)
        ]
        return torch.stack(losses).sum()


def quantize_int4(z: Tensor) -> Tensor:
    """[N, Z] → uint8 [N, Z/2]: clamp(round half to even(8 z), −8, 7), two a byte, low nibble first.

    Raises:
        ValueError: a value is not finite.
    """
    if not torch.isfinite(z).all():
        raise ValueError("a representation holds NaN or infinity; do not store it, look at the snapshot")
    codes = (STEPS * z).round().clamp(-STEPS, STEPS - 1).to(torch.int16) & 15
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)


def dequantize_int4(packed: Tensor) -> Tensor:
    """uint8 [N, Z/2] → float32 [N, Z], each value a multiple of 1/8, exactly."""
    both = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).to(torch.int16)
    signed = torch.where(both >= STEPS, both - 2 * STEPS, both)
    return signed.float() / STEPS


def space_id(compressor: Compressor, family: str) -> bytes:
    """8 bytes that name a coordinate system: model family, taps, encoder weights and quantizer."""
    digest = hashlib.sha256()
    digest.update(repr((family, sorted(asdict(compressor.config).items()), "int4/8")).encode())
    for name, tensor in sorted(compressor.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()[:8]
