"""Sizes of the LoopFM compressor.

Knows what fits together. Does not know the foundation model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorConfig:
    """Shape of the autoencoder that makes an event's representation from taps of the foundation model."""

    dim: int = 64
    """Width of the representation."""
    prefixes: tuple[int, ...] = (8, 16, 32, 64)
    """Matryoshka: every prefix of these widths can be decoded on its own."""
    tap_width: int = 64
    """Each tap is projected to this before they are joined."""
    hidden: int = 128

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"dim {self.dim} must be even: two int4 values share a byte")
        if not self.prefixes or self.prefixes[-1] != self.dim or list(self.prefixes) != sorted(set(self.prefixes)):
            raise ValueError(f"prefixes {self.prefixes} must grow and end with dim {self.dim}")
