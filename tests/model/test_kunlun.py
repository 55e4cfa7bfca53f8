"""Kunlun as a whole: what a score depends on, what a layer skips, what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from feature_store.layout import Layout
from model.gem.batch import Batch
from model.gem.config import GemConfig
from model.gem.flops import flops_by_module, forward_flops
from model.gem.foundation import FoundationModel, stream_rows
from model.gem.presets import public_s, tiny
from model.training.configuration import dump, parse
from tests.model.world_batches import batch_of, grouped, layout, rows_of


def model_of(config: GemConfig) -> FoundationModel:
    torch.manual_seed(0)
    model = FoundationModel(config, layout())
    with torch.no_grad():
        model.heads.out.normal_()
    return model.eval()


@pytest.mark.parametrize("context", ["request", "candidate"])
def test_a_score_depends_on_its_own_request_and_candidate_only(context: str) -> None:
    model = model_of(dataclasses.replace(tiny(), pffn_context=context))  # type: ignore[arg-type]
    batch = batch_of([5, 0, 17], [3, 2, 4])
    with torch.no_grad():
        whole = model(Batch.from_numpy(batch)).logits_NK
        alone = [model(Batch.from_numpy(rows_of(batch, r))).logits_NK for r in range(3)]
    torch.testing.assert_close(torch.cat(alone), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("lengths", "shown"), [([], []), ([3], [0]), ([0], [2]), ([2, 3], [0, 5])])
def test_empty_batches_histories_and_requests_have_scores_of_the_right_shape(lengths: list[int], shown: list[int]) -> None:
    out = model_of(tiny())(Batch.from_numpy(batch_of(lengths, shown)))
    assert out.logits_NK.shape == (sum(shown), 3)
    assert torch.isfinite(out.logits_NK).all()


def test_a_score_follows_the_time_of_the_request_and_not_of_the_clock() -> None:
    model, batch = model_of(tiny()), batch_of([6], [2])
    day = 7 * 86_400_000
    with torch.no_grad():
        now = model(Batch.from_numpy(batch)).logits_NK
        moved = batch._replace(request_ms=batch.request_ms + day, event_ms=batch.event_ms + day)
        later = batch._replace(request_ms=batch.request_ms + day)
        torch.testing.assert_close(model(Batch.from_numpy(moved)).logits_NK, now)
        assert not torch.allclose(model(Batch.from_numpy(later)).logits_NK, now)


def test_the_feed_forward_of_every_stream_is_what_the_configuration_says() -> None:
    changes = {"pffn_activations": ("relu", "silu"), "pffn_alpha": 0.1, "pffn_beta": 3.0, "pffn_qk_norm": False}
    batch = Batch.from_numpy(batch_of([6, 9], [2, 1]))
    with torch.no_grad():
        one_by_one = [dataclasses.replace(tiny(), **{name: value}) for name, value in changes.items()]  # type: ignore[arg-type]
        scores = [model_of(config)(batch).logits_NK for config in (tiny(), *one_by_one)]
    assert all(not torch.allclose(scores[0], other) for other in scores[1:])
    text = dump(dataclasses.replace(tiny(), **changes))  # type: ignore[arg-type]
    assert parse(GemConfig, text) == dataclasses.replace(tiny(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("activations", "error"),
    [(("sigmoid",), "no activation is called sigmoid"), (("gelu",) * 3, "3 activations for 2 heads")],
)
def test_a_configuration_of_activations_that_cannot_be_is_refused(activations: tuple[str, ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        GemConfig(pffn_activations=activations)


def test_a_skipped_stream_is_untouched_and_the_summary_is_the_cached_one() -> None:
    config = dataclasses.replace(tiny(), layers=3)
    assert [sorted(config.parts(layer)) for layer in range(3)] == [["pffn", "pooling"], ["attention"], ["pffn", "pooling"]]
    model, seen = model_of(config), []
    model.layers[1].register_forward_hook(lambda module, given, made: seen.append((given[3], made[2])))
    model(Batch.from_numpy(batch_of([4], [1])))
    assert seen[0][0] is seen[0][1], "an attention layer hands the cached summary on"
    assert model.layers[1].streams[0].pffn is None
    assert model.layers[0].streams[0].attention is None


def test_information_flows_both_ways_and_reaches_the_oldest_event_through_the_summary() -> None:
    model = model_of(dataclasses.replace(tiny(), layers=4, block=2))
    events: list[Tensor] = []

    def keep(module: torch.nn.Module, given: object, made: Tensor) -> None:
        made.retain_grad()
        events.append(made)

    model.tokens.events.register_forward_hook(keep)
    model(Batch.from_numpy(batch_of([30], [1]))).logits_NK.sum().backward()
    assert float(events[0].grad[-1].abs().sum()) > 0  # newest first: the last is the oldest
    assert float(model.layers[2].context_summary.compress.grad.abs().sum()) > 0


def test_every_parameter_learns_and_the_loss_falls() -> None:
    torch.manual_seed(0)
    model = FoundationModel(dataclasses.replace(tiny(), id_dropout=0.0), layout())
    batch, before = batch_of([7] * 100, [1] * 100), {}
    model.fit_statistics([batch])
    labels = torch.rand(100, 3, generator=torch.Generator().manual_seed(1)).round()
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(Batch.from_numpy(batch)).logits_NK, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 < 0.69 < losses[0] + 0.01
    assert [name for name, value in model.named_parameters() if torch.equal(value, before[name])] == []


@pytest.mark.parametrize("context", ["request", "candidate"])
def test_sources_of_another_merge_group_are_a_stream_of_their_own(context: str) -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(tiny(), pffn_context=context)  # type: ignore[arg-type]
    model, batch = FoundationModel(config, grouped()), batch_of([40, 0, 3], [1, 2, 1])
    assert model.shape.streams == ((0,), (1,))
    seen: list[int] = []
    for read in model.reads:
        read.register_forward_hook(lambda module, given, made: seen.append(len(given[2].values_TD)))
    out = model(Batch.from_numpy(batch)).logits_NK
    counts = np.bincount(batch.event_source)
    assert out.shape == (4, 3)
    assert seen == counts.tolist()


def test_a_stream_holds_its_sources_newest_first_and_the_other_events_fall_out() -> None:
    batch = Batch.from_numpy(batch_of([30, 5], [1, 1]))
    rows, offsets = stream_rows(batch, (1,), 6)
    assert (batch.event_source[rows] == 1).all()
    for r in range(2):
        times = batch.event_ms[rows[offsets[r] : offsets[r + 1]]]
        own = batch.event_ms[batch.event_offsets[r] : batch.event_offsets[r + 1]][
            batch.event_source[batch.event_offsets[r] : batch.event_offsets[r + 1]] == 1
        ]
        assert times.tolist() == own.flip(0)[:6].tolist()
    merged, _ = stream_rows(batch, (0, 1), 99)
    assert sorted(merged.tolist()) == list(range(35))


@pytest.mark.parametrize("context", ["request", "candidate"])
@pytest.mark.parametrize("made", [layout, grouped])
def test_analytic_flops_equal_what_torch_counts(context: str, made: Callable[[], Layout]) -> None:
    config = dataclasses.replace(public_s(), pffn_context=context, radius=0)  # type: ignore[arg-type]
    model, batch = FoundationModel(config, made()), batch_of([32, 32], [3, 3])
    batch = batch._replace(event_source=np.tile(np.repeat([0, 1], 16), 2).astype(np.int32))
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ):
        model(Batch.from_numpy(batch))
    assert forward_flops(model, batch) == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("causal", [False, True])
def test_with_causal_blocks_attention_carries_nothing_from_newer_blocks_to_older_events(causal: bool) -> None:
    model = model_of(dataclasses.replace(tiny(), radius=1, causal_blocks=causal))  # blocks of 8
    _, _, (stream,) = model.tokens(Batch.from_numpy(batch_of([30], [1])), model.embeddings)
    attention = model.layers[1].streams[0].attention
    other = stream.values_TD.clone()
    other[:8] += 1.0
    with torch.no_grad():
        changed = (attention(stream) != attention(stream._replace(values_TD=other))).any(1)
    assert changed[:8].all()
    assert changed[8:16].any() == (not causal)
    assert not changed[16:].any()


@pytest.mark.parametrize("summary", [True, False])
def test_compskip_saves_half_of_what_the_sequence_costs(summary: bool) -> None:
    """The reference sizes: 1000 events, width 384, blocks of 64; the published saving is 43 %."""
    full = GemConfig(
        width=384, heads=3, layers=4, schedule="full", summary_tokens=128, seeds=256, sequence_tokens=32,
        kron_terms=8, block=64, experts=4, factor_tokens=20, linear_tokens=24, rank=24, hidden=2048,
        max_events=1024, fresh_summary=summary,
    )  # fmt: skip
    batch, costs = batch_of([1000], [1]), []
    for config in (full, dataclasses.replace(full, schedule="compskip")):
        with torch.device("meta"):
            shapes = FoundationModel(config, layout())
        flops = flops_by_module(shapes, batch)
        costs.append([flops[f"layer {layer}"] for layer in range(4)])
    saved = 1 - sum(costs[1]) / sum(costs[0])
    if summary:  # one more pooling, in the last layer
        assert 0.30 < saved < 0.43
    else:
        assert saved == pytest.approx(0.43, abs=0.03)
