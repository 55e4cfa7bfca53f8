"""Gives each process of a team some rows of every embedding table, and takes it back: two-dimensional sparse parallelism.

Knows torchrec's collections of tables. Does not know what keys stand for, nor how tables are trained.

Within a team row r lies with process r modulo its size; teams are replicas of each other, whose gradients are added at each
step. Zhang et al. ("Two-dimensional sparse parallelism", arXiv 2508.03854) let each team move its tables alone, average them
now and then, and scale row-wise Adagrad for it; here replicas never differ, so that there is nothing to scale.

n rows asked for, D width of an embedding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from feature_store.errors import InvalidInput
from model.training.parallel import Processes
from model.training.shards import WHOLE, Part, Shard


class Asked(NamedTuple):
    """Different rows of some tables, those of each process together, and by table there."""

    rows: Tensor
    """[u] as their process counts them."""
    counts_ET: Tensor
    """By process and table."""
    place: Tensor
    """[n] where each row that was asked for, possibly several times, stands among them."""


class ShardedTables(EmbeddingCollection):  # type: ignore[misc]  # torchrec is not typed
    """A collection of which this process holds every size-th row from its rank on; all of the team must ask, be it for no row."""

    def __init__(self, whole: EmbeddingCollection, team: Processes) -> None:
        own = [_part(config, team) for config in whole.embedding_configs()]
        super().__init__(tables=own, device=torch.device("meta"))  # draws nothing: weights are the whole's
        self._team, self.whole = team, whole.embedding_configs()
        for config in own:
            _take(self, config.name, whole.embeddings[config.name].weight, _rows(team))

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Vectors by key, as of the whole collection; a process is asked once for a row, however often it occurs."""
        team, keys, lengths = self._team, features.keys(), features.length_per_key()
        asked = distinct(features.values(), lengths, team.world_size)
        incoming_ET = torch.stack(team.gather(asked.counts_ET))[:, team.rank]
        sent, received = asked.counts_ET.sum(1).tolist(), incoming_ET.sum(1).tolist()
        rows = team.exchange(asked.rows, sent, received)
        table = torch.arange(len(keys), device=rows.device).repeat(team.world_size).repeat_interleave(incoming_ET.flatten())
        by_table = table.argsort(stable=True)
        found = super().forward(KeyedJaggedTensor(keys=keys, values=rows[by_table], lengths=incoming_ET.sum(0)))
        vectors = torch.cat([found[key].values() for key in keys]).index_select(0, by_table.argsort())
        answers = team.exchange(vectors, received, sent).index_select(0, asked.place)
        parts = zip(keys, answers.split(lengths), features.lengths().view(len(keys), -1), strict=True)
        return {key: JaggedTensor(values=part, lengths=own) for key, part, own in parts}


def distinct(rows: Tensor, lengths: list[int], size: int) -> Asked:
    """Which rows each of `size` processes is asked for; `rows` are those of the first table, of the second, and so on."""
    table = torch.arange(len(lengths), device=rows.device).repeat_interleave(torch.tensor(lengths, device=rows.device))
    most = int(rows.max()) + 1 if len(rows) else 1
    code, place = torch.unique((rows % size * len(lengths) + table) * most + rows, return_inverse=True)
    counts = torch.bincount(code // most, minlength=size * len(lengths))
    return Asked(code % most // size, counts.view(size, len(lengths)), place)


def shard_tables(model: nn.Module, processes: Processes, size: int) -> Shard:
    """Shares the rows of every table out in place, among each `size` neighbours; all processes must ask.

    They start as those of process 0.

    Raises:
        InvalidInput: teams of that size do not take in all processes, the model has no collection, or a table has fewer
            rows. The model is then as it was.
    """
    if size == 1:
        return WHOLE
    found = {name: module for name, module in model.named_modules() if type(module) is EmbeddingCollection and name}
    if not found:
        raise InvalidInput(f"{type(model).__name__} has no whole tables; share tables out once, or set no team")
    for collection in found.values():
        for config in collection.embedding_configs():
            if config.num_embeddings < size:
                raise InvalidInput(f"table {config.name} has {config.num_embeddings} rows for {size} processes; make teams smaller")
    team, replicas = processes.split(size)
    processes.copy_from_first([table for collection in found.values() for table in collection.parameters()])
    names = tuple(f"{path}.{name}" for path, collection in found.items() for name, _ in collection.named_parameters())
    for name, collection in found.items():
        model.set_submodule(name, ShardedTables(collection, team))
    return Shard((Part(names=(names,) * size, team=team, replicas=replicas, striped=True),))


def join_tables(model: nn.Module, shard: Shard) -> None:
    """Puts whole collections back in place, with all rows as they are now; all processes must ask."""
    state = shard.gathered(model.state_dict())
    found = {name: module for name, module in model.named_modules() if isinstance(module, ShardedTables)}
    for path, tables in found.items():
        whole = EmbeddingCollection(tables=tables.whole, device=torch.device("meta"))
        for config in tables.whole:
            like = tables.embeddings[config.name].weight
            rows = state[f"{path}.embeddings.{config.name}.weight"]
            _take(whole, config.name, Parameter(rows, requires_grad=like.requires_grad), slice(None))
        model.set_submodule(path, whole.train(tables.training))


def _rows(team: Processes) -> slice:
    """Of a table, those of a process."""
    return slice(team.rank, None, team.world_size)


def _part(config: EmbeddingConfig, team: Processes) -> EmbeddingConfig:
    """Of a process's rows. Drawn anew they are what they would be in the whole table."""

    @torch.no_grad()
    def draw(weight: Tensor) -> None:
        whole = weight.new_empty(config.num_embeddings, config.embedding_dim)
        if config.init_fn is not None:
            config.init_fn(whole)
        weight.copy_(whole[_rows(team)])

    return EmbeddingConfig(
        name=config.name, embedding_dim=config.embedding_dim, feature_names=config.feature_names, init_fn=draw,
        num_embeddings=len(range(config.num_embeddings)[_rows(team)]),
    )  # fmt: skip


def _take(collection: EmbeddingCollection, name: str, table: Parameter, rows: slice) -> None:
    """Lets a table of a collection be some rows of another."""
    taken = Parameter(table.detach()[rows].clone(), requires_grad=table.requires_grad)
    collection.embeddings[name].weight = taken
