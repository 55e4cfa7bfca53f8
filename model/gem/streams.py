"""Says what each stream of events is encoded with, and which events it holds.

Knows merge groups, sources and their order of time. Does not know what an event says, nor how it is encoded.

A merge group is one stream; its sources are merged by time. What was merged can be taken apart again: the source of
every event is kept. T events packed over R requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from feature_store.errors import InvalidInput
from model.gem.batch import Batch
from model.gem.config import GemConfig
from model.nn.jagged import Jagged, jagged, newest, only, reverse
from model.nn.shape import InputShape


@dataclass(frozen=True, kw_only=True, slots=True)
class EventStream:
    """A merge group's sources, as indices, and the model as this stream has it."""

    merge_group: str
    sources: tuple[int, ...]
    config: GemConfig

    @property
    def pooled(self) -> int:
        """Sequences that are summarized by themselves: the merged one, or one a source."""
        return max(1, len(self.sources)) if self.config.pool_sources else 1

    @property
    def summary_tokens(self) -> int:
        """Of all its summaries."""
        return self.pooled * self.config.sequence_tokens


def event_streams(config: GemConfig, shape: InputShape) -> tuple[EventStream, ...]:
    """The streams of a model, in the order of `InputShape.streams`.

    Raises:
        InvalidInput: the configuration has sizes for a merge group that no source is in.
    """
    for own in config.events:
        if own.merge_group not in shape.merge_groups:
            raise InvalidInput(
                f"events names merge group {own.merge_group!r}, which no event source is in; "
                f"use one of {list(shape.merge_groups)}, or set merge_group of a source in the spec"
            )
    pairs = zip(shape.merge_groups, shape.streams, strict=True)
    return tuple(
        EventStream(merge_group=group, sources=sources, config=config.of(group)) for group, sources in pairs
    )


def stream_rows(batch: Batch, sources: tuple[int, ...], limit: int) -> tuple[Tensor, Tensor]:
    """Rows of the newest `limit` events of these sources a request, newest first, and their offsets.

    Events of a batch lie in the order of time, so what is taken out of it is merged already.
    """
    members = torch.tensor(sources, dtype=torch.int64, device=batch.event_ms.device)
    own, offsets = only(torch.isin(batch.event_source.long(), members), batch.event_offsets)
    kept, offsets = newest(offsets, limit)
    return own[kept][reverse(offsets)], offsets


class Member(NamedTuple):
    """What one source has in a merged stream."""

    rows: Tensor
    """Its events' places, in the stream's order."""
    layout: Jagged


def unmerged(source_T: Tensor, layout: Jagged, sources: tuple[int, ...]) -> tuple[Member, ...]:
    """The members of a merged stream: the merge, undone."""
    members = []
    for source in sources:
        rows, offsets = only(source_T == source, layout.offsets)
        members.append(Member(rows, jagged(offsets)))
    return tuple(members)
