"""Says which parameters a process holds alone, so that gradients, norms and saved states come out as if it held all.

Knows names of parameters, and processes. Does not know models, nor why parameters are shared out.

Processes form teams of neighbours. What a team shares out lies once in each team: a process holds its part with the
processes that have the same place in the other teams, its replicas, and with no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from model.training.parallel import Processes

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one process holds of the parameters that its team shares out among themselves."""

    names: tuple[tuple[str, ...], ...]
    """Of every process of the team, by rank, in the model's order; the n-th names of all have one shape, but for their rows."""
    team: Processes
    replicas: Processes
    striped: bool = False
    """Each name is held by all: row r by process r modulo their number. Otherwise a name is held by one, whole."""

    @property
    def held(self) -> tuple[str, ...]:
        """Names of this process."""
        return self.names[self.team.rank]

    def gathered(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state with what the rest of the team holds; all of it must ask."""
        whole = dict(state)
        places = {name: place for place, name in enumerate(self.held)}
        for key, value in state.items():
            prefix, slash, name = key.rpartition("/")
            if name not in places:
                continue
            if self.striped:
                whole[key] = self._interleaved(value)
                continue
            for names, part in zip(self.names, self.team.gather(value), strict=True):
                whole[prefix + slash + names[places[name]]] = part
        return whole

    def own(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A whole state without what the rest of the team holds."""
        held, known = {*self.held}, {name for names in self.names for name in names}
        kept = {}
        for key, value in state.items():
            name = key.rpartition("/")[2]
            if self.striped and name in held:
                kept[key] = value[self.team.rank :: self.team.world_size]
            elif name in held or name not in known:
                kept[key] = value
        return kept

    def _interleaved(self, own: Tensor) -> Tensor:
        counts = [int(count.item()) for count in self.team.gather(torch.tensor([len(own)]))]
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        return torch.stack(self.team.gather(padded), dim=1).flatten(0, 1)[: sum(counts)]


@dataclass(frozen=True, slots=True)
class Shard:
    """All parts of one process; it holds every parameter that is in none of them, as every process does."""

    parts: tuple[Part, ...] = ()

    def copy_from_first(self, processes: Processes, named: Mapping[str, Tensor]) -> None:
        """Overwrites tensors by those of rank 0; those held alone, by those of the first replica."""
        common, *alone = self._parted(named.items())
        processes.copy_from_first(common)
        for part, tensors in zip(self.parts, alone, strict=True):
            part.replicas.copy_from_first(tensors)

    def sum_gradients(self, processes: Processes, named: Mapping[str, Parameter]) -> None:
        """Replaces each gradient by its sum over processes; over replicas where it is already the team's."""
        common, *alone = self._parted(named.items())
        processes.sum_gradients(common)
        for part, parameters in zip(self.parts, alone, strict=True):
            part.replicas.sum_gradients(parameters)

    def norm(self, norms: Mapping[str, Tensor]) -> float:
        """Euclidean length of tensors of these lengths, and of those that teams hold elsewhere; alike on each process.

        All processes must ask.
        """
        common, *alone = self._parted(norms.items())
        if not self.parts:
            return _length(common)
        squares = torch.tensor(_length(common) ** 2, dtype=torch.float64)
        for part, own in zip(self.parts, alone, strict=True):
            squares += part.team.sum(torch.tensor(_length(own) ** 2, dtype=torch.float64))
        return float(squares.sqrt().item())

    def gathered(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state with what teams hold elsewhere; all processes must ask.

        A key is a parameter's name, or ends with "/" and one.
        """
        whole = dict(state)
        for part in self.parts:
            whole = part.gathered(whole)
        return whole

    def own(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A whole state without what teams hold elsewhere."""
        own = dict(state)
        for part in self.parts:
            own = part.own(own)
        return own

    def _parted(self, named: Iterable[tuple[str, T]]) -> list[list[T]]:
        """What is held by all, and then what each part holds."""
        place = {name: 1 + number for number, part in enumerate(self.parts) for name in part.held}
        parted: list[list[T]] = [[] for _ in range(1 + len(self.parts))]
        for name, value in named:
            parted[place.get(name, 0)].append(value)
        return parted


WHOLE = Shard()
"""Nothing is shared out."""


def _length(norms: Sequence[Tensor]) -> float:
    return float(torch.stack(list(norms)).double().norm().item()) if norms else 0.0
