"""What a model says of one request's candidates, made safe to serve.

Knows probabilities and what stands in for one that is not finite. Does not know protocols, nor how a tower computes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Scores(NamedTuple):
    """Probabilities of N candidates for K objectives."""

    objectives: tuple[str, ...]
    probabilities_NK: npt.NDArray[np.float32]
    """All finite."""
    fallback_N: npt.NDArray[np.bool_]
    """The model gave no finite score for the candidate; its probabilities are the base rates."""


def finite(
    objectives: tuple[str, ...],
    probabilities_NK: npt.NDArray[np.float32],
    base_rates_K: npt.NDArray[np.float32],
) -> Scores:
    """Scores in which a candidate with any non-finite probability has the base rate for every objective, and says so."""
    broken_N = ~np.asarray(np.isfinite(probabilities_NK).all(axis=1))
    safe_NK = np.where(broken_N[:, None], base_rates_K[None, :], probabilities_NK)
    return Scores(objectives, np.ascontiguousarray(safe_NK, dtype=np.float32), broken_N)
