"""Whole configurations by name: `python -m services.trainer model.gem.presets:tiny`.

Knows sizes that were tried. Does not know data.
"""

from __future__ import annotations

from model.gem.config import GemConfig


def tiny() -> GemConfig:
    """For tests and small machines: 2 layers of width 32."""
    return GemConfig()


def public_s() -> GemConfig:
    """For public logs with histories of about 100 events."""
    return GemConfig(
        width=64,
        heads=4,
        layers=4,
        summary_tokens=8,
        seeds=32,
        sequence_tokens=8,
        kron_terms=4,
        block=16,
        radius=1,
        experts=2,
        factor_tokens=8,
        linear_tokens=8,
        rank=16,
        hidden=256,
        id_width=16,
        user_tokens=4,
        ad_tokens=4,
    )


def public_m() -> GemConfig:
    """For histories of 500 to 1000 events."""
    return GemConfig(
        width=128,
        heads=4,
        layers=4,
        summary_tokens=16,
        seeds=64,
        sequence_tokens=16,
        kron_terms=8,
        block=64,
        radius=1,
        experts=2,
        factor_tokens=16,
        linear_tokens=16,
        rank=24,
        hidden=512,
        id_width=32,
        user_tokens=6,
        ad_tokens=6,
        max_events=1024,
    )


def gpu_l() -> GemConfig:
    """For one GPU and histories of 1000 to 4000 events: about 0.64 billion dense weights."""
    return GemConfig(
        width=384,
        heads=3,
        layers=6,
        summary_tokens=128,
        seeds=256,
        sequence_tokens=32,
        kron_terms=8,
        block=64,
        experts=4,
        factor_tokens=20,
        linear_tokens=20,
        rank=24,
        hidden=2048,
        id_width=64,
        user_tokens=8,
        ad_tokens=8,
        max_events=4096,
    )


def gpu_xl() -> GemConfig:
    """The upper end of a scaling sweep: about 8.2 billion dense weights, for several GPUs."""
    return GemConfig(
        width=512,
        heads=4,
        layers=8,
        summary_tokens=256,
        seeds=256,
        sequence_tokens=32,
        kron_terms=8,
        block=64,
        experts=8,
        factor_tokens=32,
        linear_tokens=32,
        rank=48,
        hidden=4096,
        id_width=64,
        user_tokens=8,
        ad_tokens=8,
        max_events=4096,
    )
