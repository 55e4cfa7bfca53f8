"""Activations of attention without softmax: their values, their slopes, and both in a Triton kernel.

Knows functions of one number. Does not know what a score is of. Every one maps 0 to 0: a place without a token, and a
pair outside a window, then score 0 and add nothing, so that no kernel masks what it adds.

The family is that of Meta's released GDPA kernels; `gelu` is its tanh form. A name stands for all heads, or there is
one a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels.gpu import jit, tl

LEAK = 0.01
"""Slope of `leaky_relu` below 0."""
POLYNOMIAL_BOUND = 1.25
"""Largest |x| that `gelu_polynomial` takes: it errs by 6.1e-3 there, by 0.22 at 2 and by 28 at 4."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of numbers and its slope.

    Raises:
        ValueError: it does not map 0 to 0.
    """

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    """Gradient of x, from (gradient of value(x), x)."""

    def __post_init__(self) -> None:
        if at_zero := float(self.value(torch.zeros(()))):
            raise ValueError(
                f"the activation is {at_zero:g} at 0; it must be 0 there, since places without a token score 0 and would "
                "add to sums: subtract the constant, or mask and normalize as softmax attention does"
            )


def gelu_polynomial(x: Tensor) -> Tensor:
    """x/2 + x²(c₂ + x²(c₄ + x²c₆)), the Taylor series of erf's GELU; no exponential.

    Raises:
        ValueError: |x| exceeds POLYNOMIAL_BOUND anywhere; the kernel, which cannot raise, gives NaN there.
    """
    largest = float(x.detach().abs().max()) if x.numel() else 0.0
    if not largest <= POLYNOMIAL_BOUND:
        raise ValueError(
            f"gelu_polynomial got a score of magnitude {largest:g}; it is GELU only up to {POLYNOMIAL_BOUND}: normalize "
            "queries and keys and choose alpha ≤ 1/d, or take gelu"
        )
    square = x * x
    return 0.5 * x + square * (0.39894228 + square * (-0.06649038 + square * 0.00997356))


def _gelu_polynomial_slope(gradient: Tensor, x: Tensor) -> Tensor:
    square = x * x
    return gradient * (0.5 + x * (0.79788456 + square * (-0.26596152 + square * 0.05984136)))


_ATEN = torch.ops.aten
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": Activation(
        lambda x: F.gelu(x, approximate="tanh"), lambda g, x: _ATEN.gelu_backward(g, x, approximate="tanh")
    ),
    "gelu_polynomial": Activation(gelu_polynomial, _gelu_polynomial_slope),
    "silu": Activation(F.silu, _ATEN.silu_backward),
    "relu": Activation(F.relu, lambda g, x: _ATEN.threshold_backward(g, x, 0)),
    "squared_relu": Activation(lambda x: F.relu(x).square(), lambda g, x: g * (2 * F.relu(x))),
    "leaky_relu": Activation(
        lambda x: F.leaky_relu(x, LEAK), lambda g, x: _ATEN.leaky_relu_backward(g, x, LEAK, False)
    ),
    "hardswish": Activation(F.hardswish, _ATEN.hardswish_backward),
    "identity": Activation(lambda x: x, lambda g, x: g),
}


def per_head(activation: str | Sequence[str], heads: int) -> tuple[str, ...]:
    """The activation of each head.

    Raises:
        ValueError: a name is unknown, or there are neither one nor `heads` of them.
    """
    names = (activation,) if isinstance(activation, str) else tuple(activation)
    if unknown := sorted(set(names) - set(ACTIVATIONS)):
        known = ", ".join(sorted(ACTIVATIONS))
        raise ValueError(f"no activation is called {', '.join(unknown)}; choose of {known}, all of which map 0 to 0")
    if len(names) not in (1, heads):
        raise ValueError(f"{len(names)} activations for {heads} heads; give one for all or one for each")
    return names * heads if len(names) == 1 else names


def runs(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """(activation, first head, heads) of neighbouring heads that share one: a launch of a kernel each."""
    out, first = [], 0
    for name, group in groupby(names):
        out.append((name, first, count := len(list(group))))
        first += count
    return out


def launches(activation: str, heads: int) -> list[tuple[str, int, int]]:
    """`runs` of activations as an operator is given them, side by side with commas: a kernel is compiled for one."""
    return runs(per_head(activation.split(","), heads))


def inner_scale(alpha: float | None, width: int) -> float:
    """α, by default 1/√d."""
    return width**-0.5 if alpha is None else alpha


def activated(x: Tensor, names: Sequence[str], *, axis: int) -> Tensor:
    """What each head's activation makes of its share of x, heads along `axis`."""
    parts = [ACTIVATIONS[name].value(x.narrow(axis, first, count)) for name, first, count in runs(names)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


@jit
def curve(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """(act(x), act′(x)); GELU in its tanh form is x·σ(2z), z = √(2/π)(x + 0.044715 x³)."""
    if ACTIVATION == "gelu":
        gate = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        return x * gate, gate + x * gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    if ACTIVATION == "gelu_polynomial":
        square = tl.where(tl.abs(x) <= 1.25, x * x, float("nan"))  # POLYNOMIAL_BOUND
        value = 0.5 * x + square * (0.39894228 + square * (-0.06649038 + square * 0.00997356))
        return value, 0.5 + x * (0.79788456 + square * (-0.26596152 + square * 0.05984136))
    if ACTIVATION == "silu":
        gate = tl.sigmoid(x)
        return x * gate, gate + x * gate * (1.0 - gate)
    if ACTIVATION == "relu":
        return tl.maximum(x, 0.0), tl.where(x > 0.0, 1.0, 0.0)
    if ACTIVATION == "squared_relu":
        above = tl.maximum(x, 0.0)
        return above * above, 2.0 * above
    if ACTIVATION == "leaky_relu":
        slope = tl.where(x > 0.0, 1.0, 0.01)  # LEAK
        return x * slope, slope
    if ACTIVATION == "hardswish":
        gate = tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0
        inside = tl.where(x >= 3.0, 1.0, x / 3.0 + 0.5)
        return x * gate, tl.where(x <= -3.0, 0.0, inside)
    return x, tl.full(x.shape, 1.0, tl.float32)
