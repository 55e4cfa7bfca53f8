"""Gives each process of a team some experts of every mixture, and takes it back: expert parallelism, from outside of the model.

Knows mixtures of Wukong experts. Does not know what else a model holds, nor how it is trained.

There is no router: every expert sees every row. A process gathers the rows of its team, crosses them by its own experts,
and each process gets the sum over experts of its own rows: all-gather, experts, reduce-scatter, in the order of Meta's
"GEM Training: How Meta Doubled the Efficiency of Its LLM-Scale Ads Foundation Model" (2026). Backward is the transpose:
output gradients are gathered, input gradients are summed and scattered. So an expert's gradient is the team's sum at once,
and only teams among each other still have to add up.

n own rows, Σn of the team, t tokens, F + L tokens out, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from feature_store.errors import InvalidInput
from model.nn.interaction import MixtureOfWukongExperts, Wukong
from model.nn.norm import layer_norm
from model.training.parallel import Processes
from model.training.shards import WHOLE, Part, Shard


class ShardedExperts(MixtureOfWukongExperts):
    """A mixture of which this process holds some experts; the places of the others are empty, so that names stay."""

    def __init__(self, mixture: MixtureOfWukongExperts, team: Processes) -> None:
        own = _places(mixture, team)
        _adopt(self, mixture, (e if n in own else nn.Identity() for n, e in enumerate(mixture.experts)))
        self._team = team

    def forward(self, x: Tensor) -> Tensor:
        """[n, F + L, D]; all of the team must ask, be it with no row.

        Where tokens of experts stand side by side, a process's are surrounded by zeros, so that outputs add up all the same.
        """
        # All-to-all serves for both collectives: it takes any number of rows of each process, none included, adds in one
        # order on any backend, and is its own transpose.
        own, size = len(x), self._team.world_size
        counts = [int(count.item()) for count in self._team.gather(torch.tensor([own], device=x.device))]
        gathered = self._team.exchange(x.repeat(size, 1, 1), [own] * size, counts)
        crossed = self.crossed(gathered, torch.zeros_like(self.shortcut))
        parts = self._team.exchange(crossed, counts, [own] * size)
        mixed = parts.view(size, own, *parts.shape[1:]).sum(0)
        return layer_norm(mixed + self.shortcut.expand(own, -1, -1) @ x)

    def _members(self) -> Iterator[tuple[Tensor, Wukong, int]]:
        return (member for member in super()._members() if isinstance(member[1], Wukong))


def shard_experts(model: nn.Module, processes: Processes, size: int) -> Shard:
    """Shares the experts of every mixture out in place, among each `size` neighbours; all processes must ask.

    They start as those of process 0.

    Raises:
        InvalidInput: teams of that size do not take in all processes, the model has no mixture, or experts cannot be
            shared out evenly. The model is then as it was.
    """
    if size == 1:
        return WHOLE
    found = {name: module for name, module in model.named_modules() if type(module) is MixtureOfWukongExperts and name}
    if not found:
        raise InvalidInput(f"{type(model).__name__} has no whole mixture of experts; share experts out once, or set no team")
    for name, mixture in found.items():
        if size < 1 or len(mixture.experts) % size:
            raise InvalidInput(
                f"{name} has {len(mixture.experts)} experts, which {size} processes cannot share out evenly; "
                "choose a team whose size divides their number"
            )
    team, replicas = processes.split(size)
    processes.copy_from_first([parameter for mixture in found.values() for parameter in mixture.parameters()])
    names = tuple(_names(found, Processes(rank=rank, world_size=size)) for rank in range(size))
    for name, mixture in found.items():
        model.set_submodule(name, ShardedExperts(mixture, team))
    return Shard((Part(names=names, team=team, replicas=replicas),))


def join_experts(model: nn.Module, shard: Shard) -> None:
    """Puts whole mixtures back in place, with all experts as they are now; all processes must ask."""
    state = shard.gathered(model.state_dict())
    found = {name: module for name, module in model.named_modules() if isinstance(module, ShardedExperts)}
    for name, mixture in found.items():
        held = next(expert for expert in mixture.experts if isinstance(expert, Wukong))
        experts = [
            expert if isinstance(expert, Wukong) else _expert(held, f"{name}.experts.{number}.", state)
            for number, expert in enumerate(mixture.experts)
        ]
        whole = MixtureOfWukongExperts.__new__(MixtureOfWukongExperts)
        _adopt(whole, mixture, experts)
        model.set_submodule(name, whole)


def _adopt(heir: MixtureOfWukongExperts, mixture: MixtureOfWukongExperts, experts: Iterable[nn.Module]) -> None:
    """Makes a mixture of another's parameters, the very same objects, and of some experts."""
    nn.Module.__init__(heir)  # the mixture's would draw new parameters
    heir.combine, heir.gate, heir.shortcut = mixture.combine, mixture.gate, mixture.shortcut
    heir.experts = nn.ModuleList(experts)
    heir.train(mixture.training)


def _expert(like: Wukong, prefix: str, state: Mapping[str, Tensor]) -> Wukong:
    expert = copy.deepcopy(like)
    expert.load_state_dict({name: state[prefix + name] for name in expert.state_dict()})
    return expert


def _places(mixture: MixtureOfWukongExperts, team: Processes) -> range:
    """Numbers of the experts that a process holds: as many neighbours as any other's."""
    share = len(mixture.experts) // team.world_size
    return range(team.rank * share, (team.rank + 1) * share)


def _names(mixtures: Mapping[str, MixtureOfWukongExperts], team: Processes) -> tuple[str, ...]:
    return tuple(
        f"{path}.experts.{place}.{name}"
        for path, mixture in mixtures.items()
        for place in _places(mixture, team)
        for name, _ in mixture.experts[place].named_parameters()
    )
