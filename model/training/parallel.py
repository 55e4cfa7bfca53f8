"""Lets several processes train one model: each takes a share of every batch, sums are taken over all.

Knows ranks and collectives. Does not know models, losses or where processes run.

Every process holds the whole model (data parallelism), but for what `model.training.shards` names. All processes make the
same collectives in the same order, with or without rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.nn import Parameter

from feature_store.errors import FailedPrecondition, InvalidInput
from model.training.state import Rows, dealt

PATIENCE_SECONDS = 600.0
"""Longest that a process waits for the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """One process among those that train together."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    """In which they reach each other; None is the one that all have joined."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not below world_size {self.world_size}")

    @property
    def leads(self) -> bool:
        """It writes what is written once."""
        return self.rank == 0

    def share(self, rows: Rows, work: Callable[[Rows], Rows]) -> Rows:
        """The process's rows of a batch, in order; possibly none. Shares are disjoint and cover the batch.

        Each process finds by itself who has what, from how much work each row is.
        """
        return rows if self.world_size == 1 else rows[dealt(work(rows), self.world_size) == self.rank]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over processes; the same bits on each."""
        if self.world_size == 1:
            return values
        summed = values.detach().clone()
        dist.all_reduce(summed, group=self.group)
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
                parameter.grad = _summed_rows(parameter.grad, self)
        if not dense:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in dense])
        dist.all_reduce(flat, group=self.group)
        for gradient, summed in zip(dense, torch.split(flat, [g.numel() for g in dense]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites tensors by those of rank 0."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), group=self.group, group_src=0)

    def barrier(self) -> None:
        """Waits until every process is here."""
        if self.world_size > 1:
            dist.barrier(group=self.group)

    def split(self, size: int) -> tuple[Processes, Processes]:
        """(The team of `size` neighbours that this process is in, the processes that have its place in every team).

        All processes must split at once.

        Raises:
            InvalidInput: teams of that size do not take in all processes.
        """
        if size < 1 or self.world_size % size:
            raise InvalidInput(f"{self.world_size} processes make no teams of {size}; choose a divisor of their number")
        if size == 1:
            return Processes(), self
        ranks, patience = np.arange(self.world_size).reshape(-1, size), timedelta(seconds=PATIENCE_SECONDS)
        team, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=patience)
        place, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=patience)
        return (
            Processes(rank=self.rank % size, world_size=size, group=team),
            Processes(rank=self.rank // size, world_size=self.world_size // size, group=place),
        )

    def gather(self, own: Tensor) -> list[Tensor]:
        """What each process gives, by rank; all give one shape and dtype."""
        if self.world_size == 1:
            return [own]
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(gathered, own.contiguous(), group=self.group)
        return gathered

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """`received[i]` rows from each process i, in the order of ranks; of `rows`, `sent[i]` go to it, one after the other.

        The gradient goes back the same way: what process i sent gets the gradient of what was received of it.
        """
        # The functional one: `torch.distributed.nn`'s, public and differentiable too, is deprecated in its favour.
        group = self.group or dist.group.WORLD
        assert group is not None, "processes exchange rows only when they have joined"
        return functional.all_to_all_single_autograd(rows.contiguous(), list(received), list(sent), group)


@contextmanager
def joined(processes: Processes, init_method: str, *, timeout_seconds: float = PATIENCE_SECONDS) -> Iterator[Processes]:
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


def _summed_rows(gradient: Tensor, processes: Processes) -> Tensor:
    """Sum of sparse gradients [rows, D] that touch different rows in each process."""
    own = gradient.coalesce()
    kept = [int(count.item()) for count in processes.gather(torch.tensor([own.indices().shape[1]]))]
    longest = max(kept)
    indices = torch.zeros(longest, dtype=torch.int64)
    values = torch.zeros(longest, gradient.shape[1], dtype=gradient.dtype)
    indices[: own.indices().shape[1]] = own.indices()[0]
    values[: len(own.values())] = own.values()
    rows = torch.cat([each[:n] for each, n in zip(processes.gather(indices), kept, strict=True)])
    parts = torch.cat([each[:n] for each, n in zip(processes.gather(values), kept, strict=True)])
    return torch.sparse_coo_tensor(rows[None], parts, gradient.shape, check_invariants=False).coalesce()
