"""Lets several processes train one model: each takes a share of every batch, sums are taken over all.

Knows ranks and collectives. Does not know models, losses or where processes run.

Every process holds the whole model (data parallelism). All processes make the same collectives in the same order, with or
without rows of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from feature_store.errors import FailedPrecondition


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """One process among those that train together."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not below world_size {self.world_size}")

    @property
    def leads(self) -> bool:
        """It writes what is written once."""
        return self.rank == 0

    def share(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The process's rows of a batch: every world_size-th; possibly none. Shares are disjoint and cover the batch."""
        return rows[self.rank :: self.world_size]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over processes; the same bits on each."""
        if self.world_size == 1:
            return values
        summed = values.detach().clone()
        dist.all_reduce(summed)
        return summed

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Replaces each gradient by its sum over processes; one that is missing counts as zeros, unless it is frozen."""
        for parameter in parameters:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        if self.world_size == 1:
            return
        dense = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = _summed_rows(parameter.grad, self.world_size)
        if not dense:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in dense])
        dist.all_reduce(flat)
        for gradient, summed in zip(dense, torch.split(flat, [g.numel() for g in dense]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites tensors by those of rank 0."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def barrier(self) -> None:
        """Waits until every process is here."""
        if self.world_size > 1:
            dist.barrier()


@contextmanager
def joined(processes: Processes, init_method: str, *, timeout_seconds: float = 600.0) -> Iterator[Processes]:
    """Processes that can reach each other by gloo, until the block ends.

    Raises:
        FailedPrecondition: another number of processes came than was expected.
    """
    if processes.world_size == 1:
        yield processes
        return
    dist.init_process_group(
        "gloo", init_method=init_method, rank=processes.rank, world_size=processes.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )  # fmt: skip
    try:
        present = int(processes.sum(torch.ones(1)).item())
        if present != processes.world_size:
            raise FailedPrecondition(
                f"{present} processes came, {processes.world_size} were expected; start them by torchrun"
            )
        yield processes
    finally:
        dist.destroy_process_group()


def _summed_rows(gradient: Tensor, world_size: int) -> Tensor:
    """Sum of sparse gradients [rows, D] that touch different rows in each process."""
    own = gradient.coalesce()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(counts, torch.tensor([own.indices().shape[1]]))
    longest = int(max(count.item() for count in counts))
    indices = torch.zeros(longest, dtype=torch.int64)
    values = torch.zeros(longest, gradient.shape[1], dtype=gradient.dtype)
    indices[: own.indices().shape[1]] = own.indices()[0]
    values[: len(own.values())] = own.values()
    all_indices = [torch.empty_like(indices) for _ in range(world_size)]
    all_values = [torch.empty_like(values) for _ in range(world_size)]
    dist.all_gather(all_indices, indices)
    dist.all_gather(all_values, values)
    kept = [int(count.item()) for count in counts]
    rows = torch.cat([each[:n] for each, n in zip(all_indices, kept, strict=True)])
    parts = torch.cat([each[:n] for each, n in zip(all_values, kept, strict=True)])
    return torch.sparse_coo_tensor(rows[None], parts, gradient.shape, check_invariants=False).coalesce()
