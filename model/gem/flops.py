"""Counts the forward FLOPs of the foundation model over a batch's actual lengths; no padding, no recomputation.

Knows the model's products. Does not know hardware. A multiply-add counts as two; element-wise work is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from feature_store.batch import FeatureBatch
from model.gem.batch import Batch
from model.gem.config import GemConfig
from model.gem.foundation import FoundationModel, Tokenizer, flat_width
from model.gem.streams import EventStream, stream_rows
from model.kernels.block_attention import block_attention_flops
from model.kernels.gdpa import gdpa_flops
from model.kernels.jagged_attention import jagged_attention_flops
from model.nn.interaction import machine_flops

Ints = npt.NDArray[np.int64]
PART = " · "
"""Between a layer's name and its part's."""


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A stream, and how much of it is encoded."""

    stream: EventStream
    lengths: Ints
    """Events of every sequence: one a request, or one a candidate."""
    read_pairs: int
    """Σ candidates · events over requests."""

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class _Counts:
    requests: int
    candidates: int
    streams: tuple[_Encoded, ...]
    events: Ints
    """Events of each source that are projected."""

    @property
    def sequences(self) -> int:
        return len(self.streams[0].lengths)

    @property
    def summaries(self) -> int:
        return sum(encoded.stream.summary_tokens for encoded in self.streams)


def _counted(model: FoundationModel, batch: FeatureBatch) -> _Counts:
    shown, tensors = np.diff(batch.candidate_offsets), Batch.from_numpy(batch)
    repeated = model.config.pffn_context == "candidate"
    streams, sources = [], []
    for stream in model.streams:
        rows, offsets = stream_rows(tensors, stream.sources, stream.config.max_events)
        lengths = offsets.diff().numpy()
        encoded = np.repeat(lengths, shown) if repeated else lengths
        streams.append(_Encoded(stream, encoded, int((lengths * shown).sum())))
        sources.append(batch.event_source[rows.numpy()])
    return _Counts(
        requests=batch.num_requests,
        candidates=batch.num_candidates,
        streams=tuple(streams),
        events=np.bincount(np.concatenate(sources), minlength=len(model.shape.sources)),
    )


def forward_flops(model: FoundationModel, batch: FeatureBatch) -> float:
    """Model FLOPs of one forward; a training step is three times that."""
    return float(sum(flops_by_module(model, batch).values()))


def flops_by_module(model: FoundationModel, batch: FeatureBatch) -> dict[str, int]:
    """FLOPs of the tokens, of each layer, of the candidates' read and of the heads."""
    flops: dict[str, int] = {}
    for name, count in flops_by_part(model, batch).items():
        module = name.partition(PART)[0]
        flops[module] = flops.get(module, 0) + count
    return flops


def flops_by_part(model: FoundationModel, batch: FeatureBatch) -> dict[str, int]:
    """The same with every layer's parts by themselves, as `layer 0 · pooling`."""
    config, counts = model.config, _counted(model, batch)
    context = config.user_tokens + 1
    tokens = context + config.ad_tokens
    size = {"requests": counts.requests, "candidates": counts.candidates}
    flops = {"tokens": token_flops(model.tokens, **size, events=counts.events)}
    for layer in range(config.layers):
        seen = tokens if config.pffn_context == "candidate" else context
        parts = _layer(config, layer, tokens, seen, counts)
        flops |= {f"layer {layer}{PART}{name}": count for name, count in parts.items()}
        tokens = config.factor_tokens + config.linear_tokens
    flops["candidate read"] = sum(_read(model, encoded, counts.candidates) for encoded in counts.streams)
    flat = flat_width(config, tokens, model.streams)
    own, objectives = max(8, config.hidden // 4), len(model.shape.objectives)
    head = flat * config.hidden + objectives * config.hidden * own + objectives * own
    flops["heads"] = 2 * counts.candidates * head
    return flops


def flops_by_stream(model: FoundationModel, batch: FeatureBatch) -> dict[str, int]:
    """FLOPs of every merge group's stream: its events' projection, its part of every layer and the candidates' read of it."""
    config, counts = model.config, _counted(model, batch)
    projected = _projection(model.tokens, counts.events)
    flops = {}
    for encoded in counts.streams:
        layers = [_encoding(config, layer, encoded) for layer in range(config.layers)]
        flops[encoded.stream.merge_group] = (
            sum(int(projected[source]) for source in encoded.stream.sources)
            + sum(sum(parts.values()) for parts in layers)
            + _read(model, encoded, counts.candidates)
        )
    return flops


def token_flops(tokens: Tokenizer, *, requests: int, candidates: int, events: Ints) -> int:
    """Forward FLOPs of a tokenizer; `events` are those of each source that are projected."""
    config, shape = tokens.config, tokens.shape
    width, e = config.width, config.id_width
    user = (len(shape.user_ids) * e + tokens.user_numbers.out_width) * config.user_tokens * width
    ad = (len(shape.ad_ids) * e + tokens.ad_numbers.out_width) * config.ad_tokens * width
    event = int(_projection(tokens, events).sum())
    return 2 * (requests * user + candidates * ad) + event


def _projection(tokens: Tokenizer, events: Ints) -> Ints:
    """Of each source's events."""
    flops = np.zeros(len(events), dtype=np.int64)
    for projection in tokens.projections:
        width, label = projection.width, len(tokens.shape.objectives) * projection.width
        for source, inputs in projection.in_widths.items():
            flops[source] = 2 * events[source] * (inputs * 2 * width + 2 * width**2 + label)
    return flops


def _layer(config: GemConfig, layer: int, tokens: int, context: int, counts: _Counts) -> dict[str, int]:
    encoded = [_encoding(config, layer, each) for each in counts.streams]
    own = {name: sum(parts.get(name, 0) for parts in encoded) for name in ("pooling", "pffn", "attention")}
    flops = {
        "candidate summary": _weight_gen(config, counts.candidates, tokens),
        "interaction": _interaction(config, counts.candidates, counts.summaries),
    }
    if any("pffn" in parts for parts in encoded) and config.pffn_context == "request":
        flops["context summary"] = _weight_gen(config, counts.sequences, context + counts.summaries)
    return flops | {name: own[name] for name in own if any(name in parts for parts in encoded)}


def _encoding(model: GemConfig, layer: int, encoded: _Encoded) -> dict[str, int]:
    """What one stream's part of a layer costs."""
    stream, tokens, sequences = encoded.stream, encoded.tokens, len(encoded.lengths)
    config, width = stream.config, stream.config.width
    parts, flops = config.parts(layer), {}
    if "pooling" in parts:
        flops["pooling"] = _pooling(model, encoded)
    if "pffn" in parts:
        weights = 4 * sequences * config.summary_tokens * model.width * width
        flops["pffn"] = weights + gdpa_flops(tokens, config.summary_tokens, width)
    if "attention" in parts:
        flops["attention"] = 8 * tokens * width**2 + block_attention_flops(
            encoded.lengths.tolist(),
            block=config.block,
            radius=config.radius,
            width=width,
            causal=config.causal_blocks,
        )
    return flops


def _weight_gen(config: GemConfig, rows: int, tokens: int) -> int:
    return 2 * rows * config.summary_tokens * (tokens * config.width + 2 * config.width**2)


def _interaction(config: GemConfig, rows: int, summaries: int) -> int:
    width, t = config.width, config.summary_tokens + summaries
    share = config.experts if config.combine == "concat" else 1
    factors = config.factor_tokens // share
    machine = machine_flops(rows, t, width, rank=config.rank, count=config.experts)
    mlp = t * config.rank * config.hidden + config.hidden * factors * width
    linear = (config.factor_tokens + config.linear_tokens) * t * width
    return machine + 2 * rows * (config.experts * mlp + linear)


def _pooling(model: GemConfig, encoded: _Encoded) -> int:
    config, width = encoded.stream.config, encoded.stream.config.width
    seeds, out, terms = config.seeds, config.sequence_tokens, config.kron_terms
    seed = 2 * seeds * width**2
    read = 4 * encoded.tokens * width**2 + jagged_attention_flops(encoded.tokens, seeds, width)
    kron = 2 * terms * (seeds * out * width + out * width * model.width)
    each = seed + len(encoded.lengths) * (2 * seeds * width**2 + kron)
    return encoded.stream.pooled * each + read


def _read(model: FoundationModel, encoded: _Encoded, candidates: int) -> int:
    config, width = encoded.stream.config, encoded.stream.config.width
    attention = 4 * encoded.read_pairs * width + 2 * encoded.read_pairs * config.heads * len(model.shape.shared)
    return 2 * candidates * model.config.width * width + 4 * encoded.tokens * width**2 + attention
