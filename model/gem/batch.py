"""The feature batch as tensors.

Knows dtypes. Does not know models.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from feature_store.batch import Array, FeatureBatch


class Batch(NamedTuple):
    """The fields of `feature_store.batch.FeatureBatch`, as tensors of the same shapes."""

    user_key: Tensor
    surface: Tensor
    request_ms: Tensor
    user_ids: Tensor
    user_dense: Tensor
    event_offsets: Tensor
    event_ms: Tensor
    event_source: Tensor
    event_surface: Tensor
    event_labels: Tensor
    event_ids: Tensor
    event_dense: Tensor
    candidate_offsets: Tensor
    ad_ids: Tensor
    ad_dense: Tensor
    memory_offsets: Tensor
    memory_ms: Tensor
    memory_surface: Tensor
    memory_labels: Tensor
    memory_q: Tensor
    pair_q: Tensor
    pair_scale: Tensor
    pair_level: Tensor
    pair_meta: Tensor

    @staticmethod
    def from_numpy(batch: FeatureBatch) -> Batch:
        """Tensors that share memory with the arrays where these are writable and contiguous."""
        return Batch(*(_tensor(getattr(batch, name)) for name in Batch._fields))

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        return Batch(*(tensor.to(device) for tensor in self))

    @property
    def request_of_candidate(self) -> Tensor:
        """[N] request of each candidate."""
        lengths = self.candidate_offsets.diff()
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
