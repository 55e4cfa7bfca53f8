"""Moves weights: Adam for dense ones, row-wise Adagrad for embedding tables, and no step at all on a gradient that is not finite.

Knows parameters by name and gradients. Does not know losses or batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torchrec.modules.embedding_modules import EmbeddingCollection

from feature_store.errors import FailedPrecondition, InvalidInput
from model.training.shards import WHOLE, Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Rates and bounds of a run."""

    dense_rate: float = 2e-3
    table_rate: float = 0.1
    """Of row-wise Adagrad."""
    betas: tuple[float, float] = (0.9, 0.98)
    clip_norm: float = 1.0
    """Longest gradient over all weights; longer ones are shortened to it."""
    warmup_steps: int = 50
    """Steps over which rates rise from 0; at most a tenth of the run."""
    final_share: float = 0.1
    """Share of the rates that is left at the last step; they fall linearly after the warm-up. 1 keeps them."""

    def __post_init__(self) -> None:
        for name in ("dense_rate", "table_rate", "clip_norm"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be positive and finite")
        if self.warmup_steps < 0 or not 0.0 <= self.final_share <= 1.0:
            raise InvalidInput(
                f"warmup_steps {self.warmup_steps} must not be negative, final_share {self.final_share} be in 0…1"
            )

    def share(self, step: int, num_steps: int) -> float:
        """Share of the full rates at a step, counted from 0."""
        warmup = min(self.warmup_steps, num_steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, num_steps - warmup)
        return 1.0 - (1.0 - self.final_share) * min(1.0, progress)


class RowwiseAdagrad:
    """Adagrad with one accumulator a row: rows that rarely occur keep a large rate."""

    def __init__(self, tables: Mapping[str, Parameter], *, eps: float = 1e-8) -> None:
        self.tables = dict(tables)
        self.square_sums = {name: torch.zeros(len(table)) for name, table in tables.items()}
        self._eps = eps

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Moves the rows that have a gradient."""
        for name, table in self.tables.items():
            if table.grad is not None:
                self._move(self.square_sums[name], table, table.grad, rate)

    def _move(self, sums: Tensor, table: Parameter, gradient: Tensor, rate: float) -> None:
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
        else:
            rows = gradient.abs().amax(dim=1).nonzero()[:, 0]
            values = gradient[rows]
        sums[rows] += values.square().mean(dim=1)
        table[rows] -= rate * values / (sums[rows].sqrt() + self._eps)[:, None]


class Optimizer:
    """Both optimizers over one model."""

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, *, clip_apart: Sequence[str] = (), shard: Shard = WHOLE
    ) -> None:
        """`clip_apart` names submodules whose gradients are clipped by themselves, so that they shorten no other's.

        Of a shard's parameters each process moves its own; gradients are clipped as if it held all.
        """
        self._config, self._shard = config, shard
        tables = table_parameters(model)
        learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._dense = {name: p for name, p in learned.items() if name not in tables}
        self._tables = RowwiseAdagrad({name: p for name, p in tables.items() if name in learned})
        self._adam = _adam(list(self._dense.values()), config) if self._dense else None
        self.parameters = learned
        """By name, in one order on every process."""
        self._clipped = _groups(learned, clip_apart)

    def clear(self) -> None:
        """Forgets gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self, step: int, num_steps: int) -> tuple[float, bool]:
        """Clips and moves; returns the gradient's norm and whether weights moved.

        A norm that is not finite moves nothing. Gradients must already be summed over processes, so that all decide alike.
        """
        norms = [self._shard.norm(gradient_norms(group)) for group in self._clipped]
        norm = math.hypot(*norms)
        if not math.isfinite(norm):
            return norm, False
        for group, own in zip(self._clipped, norms, strict=True):
            _shorten(group, min(1.0, self._config.clip_norm / max(own, 1e-12)))
        share = self._config.share(step, num_steps)
        if self._adam is not None:
            self._adam.param_groups[0]["lr"] = share * self._config.dense_rate
            self._adam.step()
        self._tables.step(share * self._config.table_rate)
        return norm, True

    def start_tables_over(self, model: nn.Module) -> None:
        """Draws the model's embedding tables as they were drawn when it was made; rows move at their full rate again."""
        draw_tables(model)
        for sums in self._tables.square_sums.values():
            sums.zero_()

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, by parameter name."""
        found = {f"adagrad/{name}": sums for name, sums in self._tables.square_sums.items()}
        for name, parameter in self._dense.items():
            for key, value in (self._adam.state[parameter] if self._adam else {}).items():
                found[f"adam/{key}/{name}"] = value
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes up a state.

        Raises:
            FailedPrecondition: it belongs to other parameters.
        """
        expected = {f"adagrad/{name}": sums.shape for name, sums in self._tables.square_sums.items()}
        found = {name: value.shape for name, value in state.items() if name.startswith("adagrad/")}
        if expected != found:
            raise FailedPrecondition(f"optimizer state holds tables {sorted(found)}, the model {sorted(expected)}; start anew")
        for name, sums in self._tables.square_sums.items():
            sums.copy_(state[f"adagrad/{name}"])
        for name, parameter in self._dense.items():
            own = {key: state[f"adam/{key}/{name}"].clone() for key in _ADAM if f"adam/{key}/{name}" in state}
            if self._adam is not None and own:
                self._adam.state[parameter] = own


_ADAM = ("step", "exp_avg", "exp_avg_sq")


def _adam(parameters: list[Parameter], config: OptimizerConfig) -> torch.optim.Adam:
    """Fused: one pass over all weights, several times faster than one a weight on small models."""
    return torch.optim.Adam(parameters, lr=config.dense_rate, betas=config.betas, fused=True)


def _groups(learned: Mapping[str, Parameter], apart: Sequence[str]) -> list[dict[str, Parameter]]:
    own = [{name: p for name, p in learned.items() if name.startswith(f"{prefix}.")} for prefix in apart]
    rest = {name: p for name, p in learned.items() if not any(name.startswith(f"{prefix}.") for prefix in apart)}
    return [rest, *own]


def _shorten(parameters: Mapping[str, Parameter], factor: float) -> None:
    if factor < 1.0:
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def gradient_norms(parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Euclidean length of each gradient; NaN or Inf if any number of it is."""
    return {name: _values(p.grad).norm() for name, p in parameters.items() if p.grad is not None}


def table_parameters(model: nn.Module) -> dict[str, Parameter]:
    """Embedding tables of id features: the parameters of torchrec's collections, by name."""
    collections = [
        name for name, module in model.named_modules() if isinstance(module, EmbeddingCollection)
    ]
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if any(name.startswith(f"{prefix}.") if prefix else True for prefix in collections) and parameter.dim() == 2
    }


@torch.no_grad()
def draw_tables(model: nn.Module) -> None:
    """Draws every embedding table that learns by its own initial distribution."""
    for module in model.modules():
        if isinstance(module, EmbeddingCollection):
            for table in module.embedding_configs():
                weight = module.embeddings[table.name].weight
                if table.init_fn is not None and weight.requires_grad:
                    table.init_fn(weight)


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
