"""Says which parameters a process holds alone, so that gradients, norms and saved states come out as if it held all.

Knows names of parameters, and processes. Does not know models, nor why parameters are shared out.

Processes form teams of neighbours. What a team shares out lies once in each team: a process holds its part with the
processes that have the same place in the other teams, its replicas, and with no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from model.training.parallel import Processes

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What one process holds of the parameters that its team shares out; it holds all others, as every process does."""

    names: tuple[tuple[str, ...], ...] = ((),)
    """Of every process of the team, by rank, in the model's order; the n-th names of all have one shape."""
    team: Processes = field(default_factory=Processes)
    replicas: Processes = field(default_factory=Processes)

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the parameters that no other process of the team holds."""
        return self.names[self.team.rank]

    def copy_from_first(self, processes: Processes, named: Mapping[str, Tensor]) -> None:
        """Overwrites tensors by those of rank 0; those held alone, by those of the first replica."""
        alone, common = self._parted(named.items())
        processes.copy_from_first(common)
        self.replicas.copy_from_first(alone)

    def sum_gradients(self, processes: Processes, named: Mapping[str, Parameter]) -> None:
        """Replaces each gradient by its sum over processes; over replicas where it is already the team's."""
        alone, common = self._parted(named.items())
        processes.sum_gradients(common)
        self.replicas.sum_gradients(alone)

    def norm(self, norms: Mapping[str, Tensor]) -> float:
        """Euclidean length of tensors of these lengths, and of those that the rest of the team holds; alike on each.

        All of a team must ask.
        """
        alone, common = self._parted(norms.items())
        if not self.held:
            return _length(common)
        squares = self.team.sum(torch.tensor([_length(alone) ** 2], dtype=torch.float64))
        return float((_length(common) ** 2 + squares).sqrt().item())

    def gathered(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state with what the rest of the team holds; all of a team must ask.

        A key is a parameter's name, or ends with "/" and one.
        """
        whole = dict(state)
        places = {name: place for place, name in enumerate(self.held)}
        for key, value in state.items():
            prefix, slash, name = key.rpartition("/")
            if name in places:
                for names, part in zip(self.names, self.team.gather(value), strict=True):
                    whole[prefix + slash + names[places[name]]] = part
        return whole

    def own(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A whole state without what the rest of the team holds."""
        foreign = {name for names in self.names for name in names} - {*self.held}
        return {key: value for key, value in state.items() if key.rpartition("/")[2] not in foreign}

    def _parted(self, named: Iterable[tuple[str, T]]) -> tuple[list[T], list[T]]:
        """(Of names held alone, of all others.)"""
        held, alone, common = {*self.held}, list[T](), list[T]()
        for name, value in named:
            (alone if name in held else common).append(value)
        return alone, common


WHOLE = Shard()
"""Nothing is shared out."""


def _length(norms: Sequence[Tensor]) -> float:
    return float(torch.stack(list(norms)).double().norm().item()) if norms else 0.0
