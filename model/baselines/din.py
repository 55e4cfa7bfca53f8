"""Deep Interest Network in this project's frame: the same features, heads and trainer as the foundation model.

Knows the mathematics of Zhou et al. 2018. Does not know training. A baseline: kept small, and as the paper has it.

R requests, N candidates, T events, D width of an event, K objectives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from feature_store.batch import FeatureBatch
from feature_store.layout import Layout
from model.gem.batch import Batch
from model.nn.embedding import IdEmbeddings
from model.nn.jagged import jagged, newest
from model.nn.numeric import PiecewiseLinear
from model.nn.shape import input_shape


@dataclass(frozen=True, kw_only=True, slots=True)
class DinConfig:
    """Shape of a DIN."""

    id_width: int = 16
    attention_hidden: int = 36
    hidden: tuple[int, ...] = (200, 80)
    max_events: int = 100
    bins: int = 16
    id_dropout: float = 0.1
    dropout: float = 0.0


class DeepInterestNetwork(nn.Module):
    """Activation unit over every (event, candidate), weighted sum without softmax, then an MLP."""

    def __init__(self, config: DinConfig, layout: Layout) -> None:
        super().__init__()
        shape = input_shape(layout)
        self.config, self.shape = config, shape
        e, shared = config.id_width, [column.name for column in shape.event_ids]
        names = [column.name for column in shape.ad_ids]
        self._target = [names.index(name) for name in shared]
        self.embeddings = IdEmbeddings((*shape.user_ids, *shape.ad_ids, *shape.event_ids), e)
        self.user_numbers = PiecewiseLinear(shape.user_dense, num_bins=config.bins)
        self.ad_numbers = PiecewiseLinear(shape.ad_dense, num_bins=config.bins)
        self.surface = nn.Embedding(len(shape.surfaces), e)
        self.label = nn.Parameter(torch.randn(len(shape.objectives), len(shared) * e) * 0.02)
        width = len(shared) * e
        self.unit = nn.Sequential(
            nn.Linear(4 * width, config.attention_hidden), nn.PReLU(), nn.Linear(config.attention_hidden, 1)
        )
        total = (len(shape.user_ids) + len(shape.ad_ids) + 1) * e + width
        sizes = [total + self.user_numbers.out_width + self.ad_numbers.out_width, *config.hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.PReLU(), nn.Dropout(config.dropout)]
        self.mlp = nn.Sequential(*layers, nn.Linear(sizes[-1], len(shape.objectives)))

    def fit_statistics(self, batches: Iterable[FeatureBatch]) -> None:
        """Quantile edges from batches of training rows."""
        kept = list(batches)
        self.user_numbers.fit(np.concatenate([batch.user_dense for batch in kept]))
        self.ad_numbers.fit(np.concatenate([batch.ad_dense for batch in kept]))

    def forward(self, batch: Batch) -> Tensor:
        """Logits [N, K]."""
        shape, request_N = self.shape, batch.request_of_candidate
        rows, offsets = newest(batch.event_offsets, self.config.max_events)
        keys = [batch.user_ids, batch.ad_ids, batch.event_ids[rows]]
        columns = (*shape.user_ids, *shape.ad_ids, *shape.event_ids)
        drop = self.config.id_dropout if self.training else 0.0
        found = self.embeddings(columns, [column for part in keys for column in part.unbind(1)], drop=drop)
        users, ads = len(shape.user_ids), len(shape.ad_ids)
        user = torch.cat([*found[:users], self.user_numbers(batch.user_dense), self.surface(batch.surface.long())], dim=1)
        ad = torch.cat([*found[users : users + ads], self.ad_numbers(batch.ad_dense)], dim=1)
        target = torch.cat([found[users + at] for at in self._target], dim=1)
        bits = (batch.event_labels[rows].long()[:, None] >> torch.arange(len(self.label))) & 1
        events = torch.cat(found[users + ads :], dim=1) + bits.to(target.dtype) @ self.label
        interest = self._interest(target, events, offsets, request_N)
        return self.mlp(torch.cat([user[request_N], ad, interest], dim=1))

    def _interest(self, target_ND: Tensor, events_TD: Tensor, offsets: Tensor, request_N: Tensor) -> Tensor:
        """[N, D]: every candidate against every event of its request."""
        lengths = offsets.diff()[request_N]
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        starts[1:] = lengths.cumsum(0)
        pairs = jagged(starts)
        row = offsets[:-1][request_N][pairs.sequence] + pairs.position
        event, target = events_TD[row], target_ND[pairs.sequence]
        weight = self.unit(torch.cat([event, target, event * target, event - target], dim=1))
        return target_ND.new_zeros(target_ND.shape).index_add(0, pairs.sequence, weight * event)
