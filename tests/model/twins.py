"""What tests of an op and its plain twin share: jagged layouts, numbers by seed, and what "equal" means."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from model.nn.jagged import Jagged, jagged


def layout_of(lengths: list[int]) -> Jagged:
    return jagged(torch.tensor([0, *np.cumsum(lengths)]))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


double = partial(normal, dtype=torch.float64)


def assert_equal(
    fast: Tensor, plain: Tensor, *inputs: Tensor, rtol: float | None = None, atol: float | None = None, slack: float = 1
) -> None:
    """Values and gradients agree; gradients to `slack` times the tolerance. What reaches no input has a gradient of zeros:
    an op that lost its graph differs from a twin that has one."""
    torch.testing.assert_close(fast, plain, rtol=rtol, atol=atol)
    upstream = torch.randn_like(plain)
    for a, b in zip(_gradients(fast, inputs, upstream), _gradients(plain, inputs, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=None if atol is None else slack * atol)


def _gradients(out: Tensor, inputs: tuple[Tensor, ...], upstream: Tensor) -> tuple[Tensor, ...]:
    if not out.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad(out, inputs, upstream, allow_unused=True, materialize_grads=True)
