"""Sizes and switches of the foundation model, and of single streams of events in it.

Knows what fits together. Does not know data, nor which streams it has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from model.kernels.activations import per_head

Part = Literal["attention", "pffn", "pooling"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EventConfig:
    """What one merge group's stream of events has of its own (Kunlun, event-level personalization); None: as the model has it."""

    merge_group: str
    width: int | None = None
    """d_e, of its events."""
    heads: int | None = None
    sequence_tokens: int | None = None
    """Tokens of its summary."""
    seeds: int | None = None
    layers: int | None = None
    """Its stack's; deeper layers of the model read its last summary."""
    block: int | None = None
    radius: int | None = None
    causal_blocks: bool | None = None
    max_events: int | None = None
    pool_sources: bool | None = None

    def __post_init__(self) -> None:
        if not self.merge_group:
            raise ValueError("merge_group is empty; name the group of event sources whose stream this is")
        for name in ("width", "heads", "sequence_tokens", "seeds", "layers", "block", "max_events"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"{name} of {self.merge_group!r} is {value}; it must be at least 1, or None for the model's"
                )

    @property
    def changes(self) -> dict[str, int | bool]:
        """Its own values, by the names that they have in `GemConfig`."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "merge_group"}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class GemConfig:
    """Shape of a Kunlun foundation model; the presets are in `model.gem.presets`."""

    width: int = 32
    """D, of tokens."""
    heads: int = 2
    layers: int = 2
    schedule: Literal["compskip", "full"] = "compskip"
    """compskip: even layers run PFFN and pooling, odd ones attention; full: every layer runs all."""
    summary_tokens: int = 8
    """Tokens of the context summary: the keys of the PFFN."""
    seeds: int = 16
    sequence_tokens: int = 4
    """Tokens of the sequence summary."""
    kron_terms: int = 2
    block: int = 8
    """Tokens of an attention block."""
    radius: int = 0
    """Blocks attended on each side."""
    causal_blocks: bool = False
    """Attend on the older side only: a token's own block and `radius` before it in time, none that is newer."""
    experts: int = 1
    combine: Literal["sum", "concat"] = "sum"
    factor_tokens: int = 4
    linear_tokens: int = 4
    rank: int = 4
    """Columns that the factorization machine compresses to."""
    hidden: int = 64
    """Width of the experts' MLP, and of the heads'."""
    id_width: int = 8
    """Width of an id's embedding."""
    bins: int = 16
    """Bins of a dense feature."""
    user_tokens: int = 3
    ad_tokens: int = 3
    max_events: int = 256
    """Newest events of a stream that are kept."""
    pool_sources: bool = False
    """Every source of a merged stream has summaries of its own; else the stream is summarized as one."""
    events: tuple[EventConfig, ...] = ()
    """Streams that differ from the model."""
    time_scale_seconds: int = 3600
    pffn_context: Literal["candidate", "request"] = "request"
    """candidate: the history is encoded anew for every candidate; request: once, and candidates read it."""
    pffn_activations: tuple[str, ...] = ("gelu",)
    """Of the PFFN's hidden units: one for all heads, or one a head; the names are in `model.kernels.activations`."""
    pffn_alpha: float | None = None
    """Scale of scores inside the activation; None: 1/√(width of a head)."""
    pffn_beta: float = 1.0
    """Scale after the activation."""
    pffn_qk_norm: bool = True
    """RMSNorm of each head of the PFFN's queries and keys; without, nothing bounds its scores."""
    fresh_summary: bool = True
    """Pool once more in the last layer, so that the heads read a current summary."""
    rotate_values: bool = False
    same_id_score: float = 4.0
    """By how much a candidate's read starts to prefer events that share an id with it; each head and column then learns its own."""
    id_dropout: float = 0.1
    """Share of ids replaced by unknown in training."""
    dropout: float = 0.0
    """On the input of the heads, in training."""

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} is not divisible by 2 · heads = {2 * self.heads}; rotary pairs need even heads; "
                f"try width={2 * self.heads * max(1, round(self.width / (2 * self.heads)))}"
            )
        if self.seeds <= self.sequence_tokens:
            raise ValueError(f"seeds {self.seeds} must exceed sequence_tokens {self.sequence_tokens}")
        for name in ("layers", "block", "experts", "summary_tokens", "max_events", "bins"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.id_dropout < 1 or not 0 <= self.dropout < 1 or self.radius < 0:
            raise ValueError("id_dropout and dropout must lie in [0, 1), radius must not be negative")
        if not math.isfinite(self.same_id_score):
            raise ValueError(f"same_id_score is {self.same_id_score}; it must be finite, and is 0 to start without preference")
        per_head(self.pffn_activations, self.heads)
        self._check_events()

    def _check_events(self) -> None:
        names = [own.merge_group for own in self.events]
        for own in self.events:
            if names.count(own.merge_group) > 1:
                raise ValueError(f"events has merge group {own.merge_group!r} twice; make them one")
            try:
                layers = self.of(own.merge_group).layers
            except ValueError as error:
                raise ValueError(f"events of merge group {own.merge_group!r}: {error}") from error
            if layers > self.layers:
                raise ValueError(
                    f"layers of merge group {own.merge_group!r} are {layers}, the model has {self.layers}; a stream's stack "
                    f"may be shallower, not deeper; lower them or raise the model's"
                )

    def of(self, merge_group: str) -> GemConfig:
        """The model as one stream has it: with the sizes of that merge group for all."""
        own = next((own for own in self.events if own.merge_group == merge_group), None)
        return replace(self, events=(), **(own.changes if own else {}))  # type: ignore[arg-type]  # checked by itself

    def parts(self, layer: int) -> frozenset[Part]:
        """What the sequence module of a layer runs (CompSkip; layer 0 always pools); nothing behind the last one."""
        if layer >= self.layers:
            return frozenset()
        if self.schedule == "full":
            return frozenset({"attention", "pffn", "pooling"})
        last = self.fresh_summary and layer == self.layers - 1
        if layer % 2 == 0:
            return frozenset({"pffn", "pooling"})
        return frozenset({"attention", "pooling"}) if last else frozenset({"attention"})
