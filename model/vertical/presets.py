"""The four standard arms, as configurations.

Knows channels. Does not know routes.
"""

from __future__ import annotations

from collections.abc import Mapping

from model.vertical.config import VerticalConfig

ARMS: Mapping[str, tuple[bool, bool, bool]] = {
    "A0": (False, False, False),
    "A1": (True, False, False),
    "A2": (True, True, False),
    "A3": (True, True, True),
}
"""Arm → channels (KD, LoopFM, Solaris)."""


def arm(name: str, surface: str) -> VerticalConfig:
    """The configuration of a standard arm of a surface.

    Raises:
        ValueError: there is no such arm.
    """
    if name not in ARMS:
        raise ValueError(f"arm {name!r} is not known; use one of {sorted(ARMS)}")
    kd, loopfm, solaris = ARMS[name]
    return VerticalConfig(surface=surface, kd=kd, loopfm=loopfm, solaris=solaris)
