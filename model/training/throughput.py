"""Says how fast a run is, against what this machine can do.

Knows clocks, FLOPs and a measured ceiling. Does not know models.

Model FLOPs utilization = model FLOPs / seconds / ceiling: forward FLOPs over actual lengths times three for training, no
recomputation counted. The ceiling is a measured matrix product; the nominal peak is given beside it where it is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

TRAINING_FACTOR = 3.0
"""FLOPs of forward and backward over those of forward."""
NOMINAL_PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100": 989e12, "NVIDIA A100": 312e12, "NVIDIA B200": 2250e12}
"""Dense BF16 FLOP/s by device name, as the vendor states it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """FLOP/s that a machine reaches at best."""

    measured: float
    nominal: float | None
    """None where no vendor states it."""
    precision: str
    threads: int


def measure_ceiling(*, size: int = 768, seconds: float = 0.3, device: str = "cpu") -> Ceiling:
    """Times square matrix products; the fastest one counts."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    a = torch.ones(size, size, dtype=dtype, device=device)
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        a @ a
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return Ceiling(
        measured=2.0 * size**3 / best,
        nominal=_nominal(device),
        precision=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
    )


def measure_bandwidth(*, size: int = 2**27, seconds: float = 0.5, device: str = "cpu") -> float:
    """Bytes a second that a copy of `size` bytes reads and writes, far more than caches hold; the fastest one counts."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, best = torch.zeros_like(source), float("inf")  # written once: its pages are there
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or best == float("inf"):
        start = time.perf_counter()
        target.copy_(source)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size / best


def _nominal(device: str) -> float | None:
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for prefix, peak in NOMINAL_PEAK.items() if name.startswith(prefix)), None)


@dataclass(slots=True)
class Stages:
    """Seconds that each stage of a run took; what is no stage is idle."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the seconds of a block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def effective_share(self) -> float:
        """Share of all seconds in which weights were trained."""
        total = sum(self.seconds.values())
        return self.seconds.get("train", 0.0) / total if total else 0.0
