"""Candidates read their own history, and of it what shares an id with them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from feature_store.ids import ABSENT
from model.gem.batch import Batch
from model.gem.foundation import FoundationModel
from model.gem.presets import tiny
from model.kernels.jagged_attention import (
    Names,
    candidate_attention,
    candidate_attention_reference,
)
from tests.model.twins import assert_equal, double, layout_of
from tests.model.world_batches import batch_of, layout

H, D, C = 2, 4, 3
LENGTHS = [[0], [1], [0, 5, 1, 63, 64, 65, 0], [127, 128, 600]]
SHOWN = [[2], [1], [3, 1, 0, 2, 1, 4, 1], [1, 7, 2]]


def called(rows: int, seed: int) -> torch.Tensor:
    """Few names, so that some are shared, and one in five is none."""
    drawn = torch.randint(0, 5, (rows, C), generator=torch.Generator().manual_seed(seed))
    return torch.where(drawn == 0, ABSENT, drawn)


@pytest.mark.parametrize(("lengths", "shown"), [*zip(LENGTHS, SHOWN, strict=True)])
@pytest.mark.parametrize("named", [False, True])
def test_candidates_read_as_one_at_a_time_would_values_and_gradients(lengths: list[int], shown: list[int], named: bool) -> None:
    keys, request = layout_of(lengths), torch.repeat_interleave(torch.arange(len(shown)), torch.tensor(shown))
    q, k, v, score = (
        double(*shape, seed=seed).requires_grad_()
        for seed, shape in enumerate([(len(request), H, D), (sum(lengths), H, D), (sum(lengths), H, D), (H, C)])
    )
    names = Names(called(len(request), 7), called(sum(lengths), 8), ABSENT, score) if named else None
    fast = candidate_attention(q, k, v, keys, request, names)
    plain = candidate_attention_reference(q, k, v, keys, request, names)
    assert_equal(fast, plain, q, k, v, *([score] if named else []))


def test_scores_of_namesakes_are_kept_in_float32_beside_half_precision() -> None:
    keys, request = layout_of([5, 64]), torch.tensor([0, 1, 1])
    q, k, v = (double(n, H, D, seed=n).bfloat16() for n in (3, 69, 70))
    names = Names(called(3, 1), called(69, 2), ABSENT, double(H, C).float())
    fast = candidate_attention(q, k, v[:69], keys, request, names)
    plain = candidate_attention_reference(q.float(), k.float(), v[:69].float(), keys, request, names)
    assert fast.dtype == torch.bfloat16
    torch.testing.assert_close(fast.float(), plain, rtol=2e-2, atol=2e-2)


def test_what_has_no_id_is_nobodys_namesake() -> None:
    keys, request = layout_of([4]), torch.tensor([0])
    q, k, v = (double(n, H, D, seed=n) for n in (1, 4, 4))
    absent = torch.full((4, C), ABSENT)
    names = Names(absent[:1], absent, ABSENT, double(H, C) + 9)
    torch.testing.assert_close(candidate_attention(q, k, v, keys, request, names), candidate_attention(q, k, v, keys, request))


def test_a_read_begins_as_the_rate_of_namesakes_shrunk_towards_that_of_all_events() -> None:
    clicks, names_of_events = [1.0, 1.0, 0.0, 0.0, 1.0], [5, 5, 5, 6, 7]
    v, score = torch.tensor(clicks)[:, None, None], torch.tensor([[4.0]])
    nothing = torch.zeros(5, 1, 1)
    names = Names(torch.tensor([[5]]), torch.tensor(names_of_events)[:, None], ABSENT, score)
    read = candidate_attention(nothing[:1], nothing, v, layout_of([5]), torch.tensor([0]), names)
    weight = math.exp(4.0)
    assert read.item() == pytest.approx((2 * weight + 1) / (3 * weight + 2))


def test_an_untrained_model_minds_the_mark_of_an_event_more_if_its_ad_is_the_candidate() -> None:
    torch.manual_seed(0)
    model, batch = FoundationModel(tiny(), layout()).eval(), batch_of([40], [1])
    ad, event = next(pair for pair in model.shape.shared if model.shape.ad_ids[pair[0]].name == "ad")
    ids, labels = batch.event_ids.copy(), batch.event_labels.copy()
    ids[:, event], labels[:] = 1_000_000 + torch.arange(40).numpy(), 0
    ids[11, event] = batch.ad_ids[0, ad]
    seen: list[torch.Tensor] = []
    model.reads[0].register_forward_hook(lambda module, given, made: seen.append(made))

    def moved(row: int) -> float:
        marked = labels.copy()
        marked[row] = 1
        for own in (labels, marked):
            with torch.no_grad():
                model(Batch.from_numpy(batch._replace(event_ids=ids, event_labels=own)))
        return float((seen[-1] - seen[-2]).norm())

    assert moved(11) > 3 * max(moved(10), moved(12))


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_refused(score: float) -> None:
    with pytest.raises(ValueError, match=r"same_id_score is .*; it must be finite"):
        dataclasses.replace(tiny(), same_id_score=score)
