"""Takes one training step: losses of this process's rows, gradients of everyone's, one move of the weights.

Knows terms of a loss, processes and the optimizer. Does not know what the model is, nor where rows come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from feature_store.batch import FeatureBatch, Targets
from model.training.checkpoint import load_state
from model.training.loss import Sums, total
from model.training.optimizers import Optimizer, OptimizerConfig
from model.training.parallel import Processes
from model.training.shards import WHOLE, Shard


class Criterion(Protocol):
    """What a model is trained to make small: Σ over terms and columns of w·Σδℓ/Σδ."""

    @property
    def weights(self) -> Mapping[str, tuple[float, ...]]:
        """Terms by name, with the weight of each of their columns; the same for every batch."""

    def __call__(self, batch: FeatureBatch, targets: Targets) -> Mapping[str, Sums]:
        """The terms for a batch that has rows; it may have none where processes share out parts of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLog:
    """What a step did, over all processes."""

    step: int
    loss: float
    terms: Mapping[str, tuple[float, ...]]
    """Mean of each column of each term; 0 where nothing was settled."""
    weights: Mapping[str, tuple[float, ...]]
    """Settled rows of each column."""
    gradient_norm: float
    moved: bool
    """False: the gradient was not finite, weights are as before."""


class Learner:
    """A model in training."""

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        config: OptimizerConfig,
        processes: Processes,
        *,
        seed: int = 0,
        clip_apart: Sequence[str] = (),
        shard: Shard = WHOLE,
    ) -> None:
        self.model, self.criterion, self.processes, self.shard = model, criterion, processes, shard
        self.optimizer = Optimizer(model, config, clip_apart=clip_apart, shard=shard)
        self.skipped = 0
        """Steps whose gradient was not finite."""
        self._seed = seed
        shard.copy_from_first(processes, {**dict(model.named_parameters()), **dict(model.named_buffers())})

    def step(self, step: int, num_steps: int, batch: FeatureBatch, targets: Targets) -> StepLog:
        """One step on this process's share of a batch, which may be empty."""
        self.model.train()
        # Dropout of a step follows from its number, so that a resumed run draws what it would have drawn.
        torch.manual_seed(((self._seed * 1_000_003 + step) * 1_009 + self.processes.rank) % 2**31)
        self.optimizer.clear()
        # A process without rows that holds parts of the model alone still has to work on the rows of others.
        terms = self.criterion(batch, targets) if len(targets.labels) or self.shard.parts else {}
        totals = self._totals(terms)
        if terms:
            torch.autograd.backward(self._loss(terms, totals))
        self.shard.sum_gradients(self.processes, self.optimizer.parameters)
        norm, moved = self.optimizer.step(step, num_steps)
        self.skipped += not moved
        return self._log(step, totals, norm, moved)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(Model, optimizer) by name, whole; all processes must ask."""
        return self.shard.gathered(self.model.state_dict()), self.shard.gathered(self.optimizer.state())

    def load(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Takes up a whole state.

        Raises:
            CorruptArtefact: names or shapes of parameters are not the model's.
            FailedPrecondition: the optimizer's state belongs to other parameters.
        """
        load_state(self.model, self.shard.own(model))
        self.optimizer.load(self.shard.own(optimizer))

    def start_tables_over(self, step: int) -> None:
        """Draws embedding tables anew before `step`, and forgets how far they had moved; the same on every process."""
        torch.manual_seed((self._seed * 1_000_003 + step) * 1_009 % 2**31)
        self.optimizer.start_tables_over(self.model)

    def _totals(self, terms: Mapping[str, Sums]) -> Mapping[str, Sums]:
        """Sums over all processes, in one collective."""
        widths = {name: len(weights) for name, weights in self.criterion.weights.items()}
        own = [
            torch.stack([terms[name].loss_K.detach(), terms[name].weight_K]).double()
            if name in terms
            else torch.zeros(2, width, dtype=torch.float64)
            for name, width in widths.items()
        ]
        summed = self.processes.sum(torch.cat(own, dim=1))
        parts = torch.split(summed, list(widths.values()), dim=1)
        return {name: Sums(part[0], part[1]) for name, part in zip(widths, parts, strict=True)}

    def _loss(self, terms: Mapping[str, Sums], totals: Mapping[str, Sums]) -> Tensor:
        parts = [
            total(sums, totals[name].weight_K.to(sums.loss_K.dtype), self.criterion.weights[name])
            for name, sums in terms.items()
        ]
        return torch.stack(parts).sum()

    def _log(self, step: int, totals: Mapping[str, Sums], norm: float, moved: bool) -> StepLog:
        means = {name: tuple(sums.means().tolist()) for name, sums in totals.items()}
        return StepLog(
            step=step,
            loss=sum(
                weight * mean
                for name, weights in self.criterion.weights.items()
                for weight, mean in zip(weights, means[name], strict=True)
            ),
            terms=means,
            weights={name: tuple(sums.weight_K.tolist()) for name, sums in totals.items()},
            gradient_norm=norm,
            moved=moved,
        )
