"""Streams of events: merged by time and taken apart again, each with sizes of its own, up to 16,384 events long."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from feature_store.batch import FeatureBatch
from feature_store.errors import InvalidInput
from feature_store.layout import Layout
from model.gem.batch import Batch
from model.gem.config import EventConfig, GemConfig
from model.gem.flops import flops_by_part, flops_by_stream, forward_flops
from model.gem.foundation import FoundationModel
from model.gem.presets import public_m, public_s, tiny
from model.gem.streams import stream_rows, unmerged
from model.nn.jagged import jagged
from model.training import configuration
from model.training.profile import parts_of
from model.training.teacher import Teacher, TeacherConfig
from tests.model.world_batches import batch_of, grouped, layout

LONGEST = 16_384
IMPRESSION = EventConfig(
    merge_group="impression", width=48, heads=3, sequence_tokens=6, seeds=20, layers=4, block=4, radius=1, max_events=64
)
SEARCH = EventConfig(merge_group="search", width=16, heads=1, sequence_tokens=2, seeds=5, layers=1, block=8, max_events=32)


def personalized(config: GemConfig | None = None, *events: EventConfig) -> GemConfig:
    """Impressions wider and deeper than searches."""
    return dataclasses.replace(
        config or dataclasses.replace(tiny(), layers=4), events=events or (IMPRESSION, SEARCH)
    )


def model_of(config: GemConfig, made: Callable[[], Layout] = grouped) -> FoundationModel:
    torch.manual_seed(0)
    model = FoundationModel(config, made())
    with torch.no_grad():
        model.heads.out.normal_()
    return model.eval()


def scores(model: FoundationModel, batch: FeatureBatch) -> Tensor:
    out: Tensor = model(Batch.from_numpy(batch)).logits_NK
    return out


@pytest.mark.parametrize("context", ["request", "candidate"])
@pytest.mark.parametrize("schedule", ["compskip", "full"])
def test_streams_of_other_widths_heads_and_depths_train_together_and_every_parameter_learns(context: Any, schedule: Any) -> None:
    config = dataclasses.replace(personalized(), pffn_context=context, schedule=schedule, id_dropout=0.0)
    model, batch = model_of(config), batch_of([60, 30, 0, 9], [2, 1, 1, 2])
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    labels = torch.rand(6, 3, generator=torch.Generator().manual_seed(1)).round()
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores(model, batch), labels)
        optimizer.zero_grad()
        loss.backward()
        assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


def test_each_stream_has_its_own_width_tokens_depth_and_window() -> None:
    model, batch, widths = model_of(personalized()), batch_of([90, 50], [2, 1]), []
    for layer in model.layers:
        layer.register_forward_hook(
            lambda module, given, made: widths.append([s.values_TD.shape[1] for s in made[1]])
        )
    scores(model, batch)
    assert widths == [[48, 16]] * 4
    assert [stream.summary_tokens for stream in model.streams] == [6, 2]
    impressions, searches = model.tokens(Batch.from_numpy(batch), model.embeddings)[2]
    assert (impressions.blocks.block, impressions.blocks.radius) == (4, 1)
    assert (searches.blocks.block, searches.blocks.radius) == (8, 0)
    counts = [[int((batch.event_source[rows] == source).sum()) for rows in (slice(0, 90), slice(90, 140))] for source in (0, 1)]
    assert impressions.layout.lengths.tolist() == [min(64, count) for count in counts[0]]
    assert searches.layout.lengths.tolist() == [min(32, count) for count in counts[1]]


def test_a_stack_that_has_ended_leaves_its_events_and_its_last_summary_as_they_are() -> None:
    model, seen = model_of(personalized()), []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, given, made: seen.append((given[2], *made[1:])))
    scores(model, batch_of([40, 12], [2, 1]))
    summaries = [h for _, _, h in seen]
    for before, (given, made, h) in zip(summaries, seen[1:], strict=False):
        assert made[1].values_TD is given[1].values_TD
        assert torch.equal(h[:, 6:], before[:, 6:])
    assert not torch.equal(summaries[2][:, :6], summaries[1][:, :6])
    (gradient,) = torch.autograd.grad(seen[-1][2][:, 6:].sum(), model.layers[0].poolings[1].seeds)
    assert float(gradient.abs().sum()) > 0, "the last summary stays in the graph"


def test_a_stream_as_wide_as_the_model_has_the_parameters_of_one_that_is_not_named() -> None:
    same = EventConfig(merge_group="search", width=32, heads=2, layers=2)
    plain, named = model_of(tiny()), model_of(personalized(tiny(), same))
    first, second = dict(plain.named_parameters()), dict(named.named_parameters())
    assert list(first) == list(second)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    batch = batch_of([20, 3], [1, 2])
    assert torch.equal(scores(plain, batch), scores(named, batch))


@pytest.mark.parametrize("context", ["request", "candidate"])
@pytest.mark.parametrize("schedule", ["compskip", "full"])
def test_analytic_flops_of_personalized_streams_equal_what_torch_counts(context: Any, schedule: Any) -> None:
    wide = EventConfig(merge_group="impression", width=96, heads=3, sequence_tokens=12, layers=3, block=8, radius=0)
    narrow = EventConfig(merge_group="search", width=32, heads=2, seeds=12, layers=2, radius=0)
    config = dataclasses.replace(public_s(), pffn_context=context, schedule=schedule)
    model, batch = model_of(personalized(config, wide, narrow)), batch_of([64, 64], [3, 3])
    batch = batch._replace(event_source=np.tile(np.repeat([0, 1], 32), 2).astype(np.int32))
    assert counted(model, batch) == pytest.approx(forward_flops(model, batch), rel=0.01)


def test_analytic_flops_of_sources_that_are_pooled_apart_equal_what_torch_counts() -> None:
    model = model_of(dataclasses.replace(public_s(), pool_sources=True, radius=0), layout)
    batch = batch_of([64, 64], [3, 3])._replace(event_source=np.tile([0, 1], 64).astype(np.int32))
    assert counted(model, batch) == pytest.approx(forward_flops(model, batch), rel=0.01)


def counted(model: FoundationModel, batch: FeatureBatch) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ):
        scores(model, batch)
    total: int = counter.get_total_flops()
    return total


@pytest.mark.parametrize("schedule", ["compskip", "full"])
def test_every_part_of_a_personalized_model_is_watched_and_its_flops_are_what_torch_counts(schedule: Any) -> None:
    wide = dataclasses.replace(IMPRESSION, radius=0)
    config = dataclasses.replace(personalized(None, wide, SEARCH), schedule=schedule, pool_sources=True)
    teacher = Teacher(TeacherConfig(foundation=config), grouped()).eval()
    model, batch = teacher.foundation, batch_of([64, 64], [3, 3])
    batch = batch._replace(event_source=np.tile(np.repeat([0, 1], 32), 2).astype(np.int32))
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ):
        scores(model, batch)
    found, names = counter.get_flop_counts(), {module: name for name, module in model.named_modules()}
    parts = parts_of(teacher)
    for name, wanted in flops_by_part(model, batch).items():
        each = [sum(found[f"FoundationModel.{names[module]}"].values()) for module in parts[name]]
        assert sum(each) == pytest.approx(wanted, rel=0.01), name


def test_half_of_one_stream_leaves_the_flops_of_the_other() -> None:
    half = dataclasses.replace(IMPRESSION, width=24, sequence_tokens=3, seeds=10, layers=2, max_events=32)
    batch = batch_of([200, 60], [3, 1])
    whole, halved = (flops_by_stream(model_of(personalized(None, own, SEARCH)), batch) for own in (IMPRESSION, half))
    assert whole["search"] == halved["search"]
    assert halved["impression"] < whole["impression"] / 2


def test_streams_and_the_parts_that_they_do_not_share_add_up() -> None:
    model, batch = model_of(personalized()), batch_of([40, 9], [2, 1])
    parts = flops_by_part(model, batch)
    own = sum(
        count for name, count in parts.items() if name.rpartition(" · ")[2] in ("pooling", "pffn", "attention", "candidate read")
    )
    projected = sum(flops_by_stream(model, batch).values()) - own
    assert 0 < projected < parts["tokens"]


def test_a_wrong_merge_group_is_named_with_those_that_there_are() -> None:
    wrong = personalized(tiny(), EventConfig(merge_group="purchase", width=16))
    with pytest.raises(InvalidInput, match=r"merge group 'purchase', which no event source is in; use one of \['impression', 'search'\]"):
        FoundationModel(wrong, grouped())


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"width": 24, "heads": 8}, "'search': width 24 is not divisible by 2 · heads = 16"),
        ({"seeds": 4}, "'search': seeds 4 must exceed sequence_tokens 4"),
        ({"layers": 3}, "layers of merge group 'search' are 3, the model has 2"),
        ({"layers": 0}, "layers of 'search' is 0; it must be at least 1"),
        ({"radius": -1}, "'search': .*radius must not be negative"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_their_stream(own: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        personalized(tiny(), EventConfig(merge_group="search", **own))  # type: ignore[arg-type]


def test_a_merge_group_has_one_configuration() -> None:
    with pytest.raises(ValueError, match="merge group 'search' twice"):
        personalized(tiny(), SEARCH, SEARCH)
    with pytest.raises(ValueError, match="merge_group is empty"):
        EventConfig(merge_group="")


def test_a_personalized_configuration_comes_back_from_an_artefact_and_hashes() -> None:
    config = TeacherConfig(foundation=personalized())
    text = configuration.dump(config)
    assert configuration.parse(TeacherConfig, text) == config
    assert hash(config.foundation) == hash(configuration.parse(TeacherConfig, text).foundation)
    older = text.replace(', "pool_sources": false', "")
    assert older != text
    assert configuration.parse(TeacherConfig, older) == config


def test_what_was_merged_is_taken_apart_into_what_each_source_alone_is() -> None:
    batch = Batch.from_numpy(batch_of([30, 0, 5, 1], [1, 1, 1, 1]))
    rows, offsets = stream_rows(batch, (0, 1), 99)
    members = unmerged(batch.event_source[rows].long(), jagged(offsets), (0, 1))
    for source, member in enumerate(members):
        alone, own = stream_rows(batch, (source,), 99)
        assert rows[member.rows].tolist() == alone.tolist()
        assert member.layout.offsets.tolist() == own.tolist()
    assert sorted(torch.cat([member.rows for member in members]).tolist()) == list(range(36))


def test_events_of_the_same_time_keep_the_order_of_the_batch_whatever_is_merged() -> None:
    made = batch_of([12], [1])
    batch = Batch.from_numpy(made._replace(event_ms=np.repeat(made.event_ms[:3], 4)))
    rows, offsets = stream_rows(batch, (0, 1), 99)
    assert rows.flip(0).tolist() == list(range(12))
    for source, member in enumerate(unmerged(batch.event_source[rows].long(), jagged(offsets), (0, 1))):
        assert rows[member.rows].flip(0).tolist() == np.flatnonzero(made.event_source == source).tolist()


def test_a_stream_of_one_source_is_that_source() -> None:
    batch = Batch.from_numpy(batch_of([30, 4], [1, 1]))
    rows, offsets = stream_rows(batch, (1,), 99)
    (member,) = unmerged(batch.event_source[rows].long(), jagged(offsets), (1,))
    assert member.rows.tolist() == list(range(len(rows)))
    assert member.layout.offsets.tolist() == offsets.tolist()
    plain, apart = model_of(tiny()), model_of(dataclasses.replace(tiny(), pool_sources=True))
    assert torch.equal(scores(plain, batch_of([30], [2])), scores(apart, batch_of([30], [2])))


@pytest.mark.parametrize("context", ["request", "candidate"])
def test_sources_that_are_pooled_apart_have_summaries_of_their_own(context: Any) -> None:
    config = dataclasses.replace(tiny(), pool_sources=True, pffn_context=context)
    model, batch, seen = model_of(config, layout), batch_of([30, 8, 0], [2, 1, 1]), []
    first = model.layers[0]
    first.register_forward_hook(lambda module, given, made: seen.append((given[2][0], made[2])))
    scores(model, batch)
    ((stream, h),) = seen
    assert len(first.poolings) == 2
    assert h.shape[1] == 2 * config.sequence_tokens
    for source, pooling in enumerate(first.poolings):
        alone = []
        for r in range(stream.layout.num_sequences):
            own = slice(int(stream.layout.offsets[r]), int(stream.layout.offsets[r + 1]))
            events = stream.values_TD[own][stream.source_T[own] == source]
            alone.append(pooling(events, jagged(torch.tensor([0, len(events)]))))
        wanted = torch.cat(alone)
        torch.testing.assert_close(h.split(config.sequence_tokens, dim=1)[source], wanted, atol=1e-5, rtol=1e-5)


def long_history(config: GemConfig, events: int) -> tuple[FoundationModel, FeatureBatch]:
    return model_of(dataclasses.replace(config, max_events=LONGEST), layout), batch_of([events], [2])


def test_16384_events_are_read_down_to_the_oldest_and_no_further() -> None:
    model, batch = long_history(tiny(), LONGEST + 1)
    events: list[Tensor] = []

    def keep(module: torch.nn.Module, given: object, made: Tensor) -> None:
        made.retain_grad()
        events.append(made)

    hook = model.tokens.events.register_forward_hook(keep)
    scores(model, batch).sum().backward()
    hook.remove()
    assert len(events[0]) == LONGEST
    assert float(events[0].grad[-1].abs().sum()) > 0  # newest first: the last is the oldest
    changed = [batch.event_ids.copy() for _ in range(2)]
    changed[0][1] += 7
    changed[1][0] += 7
    with torch.no_grad():
        said, oldest, dropped = (scores(model, batch._replace(event_ids=ids)) for ids in (batch.event_ids, *changed))
    assert not torch.equal(oldest, said)
    assert torch.equal(dropped, said)


def test_memory_of_a_training_step_and_flops_grow_as_the_history_does() -> None:
    kept, flops = [], []
    for length in (LONGEST // 4, LONGEST // 2, LONGEST):
        model, batch = long_history(tiny(), length)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = scores(model, batch)
        out.sum().backward()
        kept.append(sum(saved.values()))
        flops.append(forward_flops(model, batch))
    for sizes in (kept, flops):
        assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.05)


def test_the_medium_preset_encodes_16384_events() -> None:
    model, batch = long_history(public_m(), LONGEST)
    with torch.no_grad():
        said = scores(model, batch)
        batch.event_ids[0] += 7
        assert torch.isfinite(said).all()
        assert not torch.equal(scores(model, batch), said)
