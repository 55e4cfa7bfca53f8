"""Every preset is a model, and its analytic FLOPs are those that torch counts in it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from feature_store.batch import FeatureBatch
from model.gem import presets
from model.gem.batch import Batch
from model.gem.config import GemConfig
from model.gem.encoder import Sequence
from model.gem.flops import flops_by_module, flops_by_part, forward_flops
from model.gem.foundation import CandidateRead, FoundationModel, Tokenizer
from model.nn.embedding import IdEmbeddings
from model.nn.shape import input_shape
from tests.model.world_batches import batch_of, layout

ALL = [made for _, made in inspect.getmembers(presets, inspect.isfunction)]
ON_A_CPU = [presets.tiny, presets.public_s, presets.public_m]
ON_A_GPU = [presets.gpu_l, presets.gpu_xl]
Made = Callable[[], GemConfig]


def named(made: Made) -> str:
    return made.__name__


def whole_blocks(config: GemConfig) -> FeatureBatch:
    """Two requests of one length, in whole blocks: nothing is padded, so that torch counts what is needed and no more."""
    each = 4 * config.block
    batch = batch_of([each, each], [2, 2])
    return batch._replace(event_source=np.tile(np.repeat([0, 1], each // 2), 2).astype(np.int32))


def counting() -> FlopCounterMode:
    return FlopCounterMode(display=False)


def plain_attention() -> Any:
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


def test_presets_are_those_whose_flops_are_tested() -> None:
    assert {named(made) for made in ALL} == {named(made) for made in (*ON_A_CPU, *ON_A_GPU)}


@pytest.mark.parametrize("made", ALL, ids=named)
def test_a_preset_is_a_model_whose_heads_are_wide_enough_to_rotate(made: Made) -> None:
    config = made()
    with torch.device("meta"):
        model = FoundationModel(config, layout())
    assert len(model.layers) == config.layers
    assert all(parameter.numel() for parameter in model.parameters())
    assert named(made) not in ("gpu_l", "gpu_xl") or config.width // config.heads == 128


@pytest.mark.parametrize("made", ON_A_CPU, ids=named)
def test_analytic_flops_of_a_small_preset_are_what_torch_counts_in_a_forward(made: Made) -> None:
    config = dataclasses.replace(made(), radius=0)  # at the ends of a history, torch also counts blocks that are not there
    model, batch = FoundationModel(config, layout()).eval(), whole_blocks(config)
    with counting() as counter, torch.no_grad(), plain_attention():
        model(Batch.from_numpy(batch))
    assert forward_flops(model, batch) == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("made", ON_A_GPU, ids=named)
def test_analytic_flops_of_a_large_preset_are_what_torch_counts_without_memory(made: Made) -> None:
    """Tokens and the candidates' read, whose shapes follow from data, run; layers and heads have shapes alone."""
    config, shape = made(), input_shape(layout())
    batch = whole_blocks(config)
    with torch.device("meta"):
        model = FoundationModel(config, layout())
    tokens = Tokenizer(config, shape)
    embeddings = IdEmbeddings((*shape.user_ids, *shape.ad_ids, *shape.event_ids), config.id_width)
    wanted, tensors = flops_by_module(model, batch), Batch.from_numpy(batch)
    counted: dict[str, int] = {}
    with torch.no_grad(), plain_attention():
        with counting() as counter:
            c, a, streams = tokens(tensors, embeddings)
        counted["tokens"] = counter.get_total_flops()
        request = tensors.request_of_candidate
        x = torch.cat([c.index_select(0, request), a], dim=1).to("meta")
        moved, h = (shapes_of(streams[0]),), None
        for index, layer in enumerate(model.layers):
            with counting() as counter:
                x, moved, h = layer(x, c.to("meta"), moved, h, request.to("meta"))
            counted[f"layer {index}"] = counter.get_total_flops()
        with counting() as counter:
            shared = model.shape.shared
            keys = tensors.ad_ids[:, [ad for ad, _ in shared]]
            CandidateRead(config, columns=len(shared))(a.mean(1), keys, streams[0], request)
        counted["candidate read"] = counter.get_total_flops()
        flat = (x.shape[1] + config.sequence_tokens + 1) * config.width
        with counting() as counter:
            model.heads(torch.empty(len(x), flat, device="meta"), request.to("meta"))
        counted["heads"] = counter.get_total_flops()
    assert wanted == {name: pytest.approx(count, rel=0.01) for name, count in counted.items()}


def shapes_of(value: Any) -> Any:
    """A sequence and its index maps as tensors without memory."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, tuple):
        parts = [shapes_of(part) for part in value]
        return type(value)(*parts) if isinstance(value, Sequence) or hasattr(value, "_fields") else tuple(parts)
    return value


@pytest.mark.parametrize("made", ALL, ids=named)
def test_parts_of_a_layer_add_up_to_it(made: Made) -> None:
    config = made()
    with torch.device("meta"):
        model = FoundationModel(config, layout())
    batch = whole_blocks(config)
    parts, modules = flops_by_part(model, batch), flops_by_module(model, batch)
    assert sum(parts.values()) == sum(modules.values())
    for layer in range(config.layers):
        own = {name for name in parts if name.startswith(f"layer {layer} · ")}
        assert {name.partition(" · ")[2] for name in own} >= {*config.parts(layer), "interaction", "candidate summary"}
        assert sum(parts[name] for name in own) == modules[f"layer {layer}"]
