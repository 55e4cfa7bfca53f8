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

_DIGEST_BYTES = 32
_PULL = 1e-3
"""Of the mean square of the hidden layer: how strongly an encoder that is realigned is held where it is."""
STEPS = 8
"""int4 codes −8 … 7 stand for −1 … 7/8; the quotient is exact in float32, bfloat16 and float16."""


class Compressor(nn.Module):
    """z = tanh(Enc(sg e)), e the RMS-normalized taps side by side; a decoder for every Matryoshka prefix.

    Loss Σ_d ‖e − Dec_d(z_1:d)‖² (LoopFM, arXiv 2605.29280; layer choice and widths are ours).
    """

    minted: Tensor
    """Digest of the weights when the space was named; zeros before."""

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
        self.register_buffer("minted", torch.zeros(_DIGEST_BYTES, dtype=torch.uint8))

    def mint(self) -> None:
        """Freezes the weights and names the space after them; from here on they move only to stay in that space (`realign`)."""
        self.requires_grad_(False)
        self.minted.copy_(torch.frombuffer(bytearray(_digest(self)), dtype=torch.uint8))

    def target(self, taps: Sequence[Tensor]) -> Tensor:
        """e [N, ·]: each tap detached, normalized, and projected by a fixed orthogonal map, so that none dominates."""
        parts = [project(rms_norm(tap.detach())) for project, tap in zip(self.project, taps, strict=True)]
        return torch.cat([rms_norm(part) for part in parts], dim=1)

    def forward(self, taps: Sequence[Tensor]) -> Tensor:
        """z [N, Z] in (−1, 1)."""
        return torch.tanh(self.preactivation(taps))

    def preactivation(self, taps: Sequence[Tensor]) -> Tensor:
        """Enc(e) [N, Z]: z before its tanh."""
        encoded: Tensor = self.encoder(self.target(taps))
        return encoded

    @torch.no_grad()
    def realign(self, taps: Sequence[Tensor], wanted_NZ: Tensor) -> float:
        """Moves the encoder's last layer so that rows keep their representation after the foundation model has moved.

        Least squares from today's hidden layer to the pre-activations that the same rows had, with a pull towards the
        weights as they are: rows that are few, or alike, change little. The published form is an orthogonal map of the
        representation; a map of the hidden layer holds it as a special case.

        Args:
            taps: of probe rows, from the foundation model as it is now.
            wanted_NZ: `preactivation` of the same rows before it moved.

        Returns:
            Mean cosine of z then and now.
        """
        last = self.encoder[2]
        assert isinstance(last, nn.Linear)
        hidden = self.encoder[:2](self.target(taps)).double()
        known = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1)
        weight = torch.cat([last.weight, last.bias[:, None]], dim=1).double().T
        gram = known.T @ known
        pull = _PULL * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        moved = weight + torch.linalg.solve(gram + pull, known.T @ (wanted_NZ.double() - known @ weight))
        last.weight.copy_(moved[:-1].T)
        last.bias.copy_(moved[-1])
        return float(torch.cosine_similarity(self(taps), torch.tanh(wanted_NZ), dim=1).mean())

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
    """8 bytes that name a coordinate system: model family, taps, the encoder's weights when it was minted, quantizer."""
    named = hashlib.sha256(repr((family, sorted(asdict(compressor.config).items()), "int4/8")).encode())
    minted = compressor.minted.cpu().numpy().tobytes()
    named.update(minted if any(minted) else _digest(compressor))
    return named.digest()[:8]


def _digest(compressor: Compressor) -> bytes:
    """Of all weights as they are."""
    digest = hashlib.sha256()
    for name, tensor in sorted(compressor.named_parameters()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()
