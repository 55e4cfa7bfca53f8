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
from model.gem.foundation import FoundationModel, Tokenizer, stream_rows
from model.kernels.block_attention import block_attention_flops
from model.kernels.gdpa import gdpa_flops
from model.kernels.jagged_attention import jagged_attention_flops
from model.nn.interaction import machine_flops

Ints = npt.NDArray[np.int64]
PART = " · "
"""Between a layer's name and its part's."""


@dataclass(frozen=True, slots=True)
class _Counts:
    requests: int
    candidates: int
    streams: tuple[Ints, ...]
    """Events of every sequence that is encoded, a stream: one a request, or one a candidate."""
    events: Ints
    """Events of each source that are projected."""
    read_pairs: int
    """Σ candidates · events over requests."""

    @property
    def tokens(self) -> int:
        return sum(int(lengths.sum()) for lengths in self.streams)

    @property
    def sequences(self) -> int:
        return len(self.streams[0])


def _counted(model: FoundationModel, batch: FeatureBatch) -> _Counts:
    shown, tensors = np.diff(batch.candidate_offsets), Batch.from_numpy(batch)
    chosen = [
        stream_rows(tensors, stream, model.config.max_events) for stream in model.shape.streams
    ]
    lengths = [offsets.diff().numpy() for _, offsets in chosen]
    sources = np.concatenate([batch.event_source[rows.numpy()] for rows, _ in chosen])
    repeated = model.config.pffn_context == "candidate"
    return _Counts(
        requests=batch.num_requests,
        candidates=batch.num_candidates,
        streams=tuple(np.repeat(part, shown) if repeated else part for part in lengths),
        events=np.bincount(sources, minlength=len(model.shape.sources)),
        read_pairs=sum(int((part * shown).sum()) for part in lengths),
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
    streams = len(counts.streams)
    context = config.user_tokens + 1
    tokens = context + config.ad_tokens
    size = {"requests": counts.requests, "candidates": counts.candidates}
    flops = {"tokens": token_flops(model.tokens, **size, events=counts.events)}
    for layer in range(config.layers):
        seen = tokens if config.pffn_context == "candidate" else context
        parts = _layer(config, layer, tokens, seen, counts)
        flops |= {f"layer {layer}{PART}{name}": count for name, count in parts.items()}
        tokens = config.factor_tokens + config.linear_tokens
    width = config.width
    flops["candidate read"] = (
        2 * streams * counts.candidates * width**2 + 4 * counts.tokens * width**2 + 4 * counts.read_pairs * width
    )
    flat = (tokens + streams * (config.sequence_tokens + 1)) * width
    own, objectives = max(8, config.hidden // 4), len(model.shape.objectives)
    head = flat * config.hidden + objectives * config.hidden * own + objectives * own
    flops["heads"] = 2 * counts.candidates * head
    return flops


def token_flops(tokens: Tokenizer, *, requests: int, candidates: int, events: Ints) -> int:
    """Forward FLOPs of a tokenizer; `events` are those of each source that are projected."""
    config, shape = tokens.config, tokens.shape
    width, e = config.width, config.id_width
    user = (len(shape.user_ids) * e + tokens.user_numbers.out_width) * config.user_tokens * width
    ad = (len(shape.ad_ids) * e + tokens.ad_numbers.out_width) * config.ad_tokens * width
    label = len(shape.objectives) * width
    inputs = np.array(tokens.events.in_widths, dtype=np.int64)
    event = int((events * (inputs * 2 * width + 2 * width**2 + label)).sum())
    return 2 * (requests * user + candidates * ad + event)


def _layer(config: GemConfig, layer: int, tokens: int, context: int, counts: _Counts) -> dict[str, int]:
    parts, width, streams = config.parts(layer), config.width, len(counts.streams)
    summaries = streams * config.sequence_tokens
    flops = {
        "candidate summary": _weight_gen(config, counts.candidates, tokens),
        "interaction": _interaction(config, counts.candidates, summaries),
    }
    if "pooling" in parts:
        flops["pooling"] = _pooling(config, counts)
    if "pffn" in parts:
        if config.pffn_context == "request":
            flops["context summary"] = _weight_gen(config, counts.sequences, context + summaries)
        weights = 4 * streams * counts.sequences * config.summary_tokens * width**2
        flops["pffn"] = weights + gdpa_flops(counts.tokens, config.summary_tokens, width)
    if "attention" in parts:
        flops["attention"] = 8 * counts.tokens * width**2 + sum(
            block_attention_flops(part.tolist(), block=config.block, radius=config.radius, width=width)
            for part in counts.streams
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


def _pooling(config: GemConfig, counts: _Counts) -> int:
    width, seeds, out, terms = config.width, config.seeds, config.sequence_tokens, config.kron_terms
    seed = 2 * seeds * width**2
    read = 4 * counts.tokens * width**2 + jagged_attention_flops(counts.tokens, seeds, width)
    kron = 2 * terms * (seeds * out * width + out * width**2)
    each = seed + counts.sequences * (2 * seeds * width**2 + kron)
    return len(counts.streams) * each + read
