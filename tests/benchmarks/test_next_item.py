"""Next-item models read only what came before, are ranked fairly, and go on where they were stopped."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.movielens import TEST, TRAIN, VALID, Histories, Protocol, Run
from benchmarks.next_item import (
    GROUP,
    LAYERS,
    NextItem,
    NextItemConfig,
    causal_attention,
    rank_metrics,
    ranks,
    sampled_softmax,
)
from model.kernels.block_attention import block_attention, blocks
from model.nn.jagged import Jagged, jagged, reverse
from model.nn.time import rote_angles, turns

LENGTHS = (7, 1, 12, 3, 12)
ITEMS = 30


def _layout(lengths: tuple[int, ...] = LENGTHS) -> Jagged:
    return jagged(F.pad(torch.tensor(lengths).cumsum(0), (1, 0)))


def _model(stack: str) -> NextItem:
    torch.manual_seed(3)
    config = NextItemConfig(stack=stack, width=12, heads=2, longest=12, context_tokens=5, dropout=0.5)
    return NextItem(config, ITEMS).eval()


def _histories() -> Histories:
    torch.manual_seed(5)
    lengths = torch.randint(5, 20, (40,))
    return Histories(torch.cat([torch.randperm(ITEMS)[:n] for n in lengths]), F.pad(lengths.cumsum(0), (1, 0)), ITEMS)


def _run(stack: str, folder: Path) -> Run:
    config = NextItemConfig(stack=stack, width=8, longest=10, layers=1, context_tokens=4)
    return Run(config, Protocol(batch=16, negatives=8), _histories(), 0, folder)


@pytest.mark.parametrize("stack", LAYERS)
def test_no_place_reads_an_item_after_it(stack: str) -> None:
    model, layout = _model(stack), _layout()
    item = torch.randint(ITEMS, (sum(LENGTHS),))
    before = model(item, layout)
    for cut in (0, 3, 6, 11):
        later = layout.position > cut
        other = torch.where(later, (item + 1 + torch.randint(ITEMS - 1, item.shape)) % ITEMS, item)
        after = model(other, layout)
        torch.testing.assert_close(after[~later], before[~later])
        assert not torch.isclose(after[later], before[later]).all(dim=1).any()


@pytest.mark.parametrize("stack", LAYERS)
def test_a_place_reads_the_items_before_it_and_no_other_sequence(stack: str) -> None:
    model, layout = _model(stack), _layout()
    item = torch.randint(ITEMS, (sum(LENGTHS),))
    first = layout.offsets[2]
    other = item.clone()
    other[first] = (item[first] + 1) % ITEMS
    changed = ~torch.isclose(model(other, layout), model(item, layout), atol=1e-7, rtol=0).all(dim=1)
    assert changed.tolist() == (layout.sequence == 2).tolist()
    alone = model(item[:7], _layout((7,)))
    torch.testing.assert_close(alone, model(item, layout)[:7], msg="what a batch pads to changes nothing")


@pytest.mark.parametrize("stack", LAYERS)
def test_dropout_acts_in_training_alone(stack: str) -> None:
    model, layout, item = _model(stack), _layout(), torch.randint(ITEMS, (sum(LENGTHS),))
    torch.testing.assert_close(model(item, layout), model(item, layout), rtol=0, atol=0)
    model.train()
    assert not torch.allclose(model(item, layout), model(item, layout))


def test_causal_attention_is_block_attention_of_single_tokens_that_reach_over_everything() -> None:
    torch.manual_seed(0)
    layout, back = _layout(), reverse(_layout().offsets)
    given = [torch.randn(3, sum(LENGTHS), 2, 6, requires_grad=True) for _ in range(2)]
    given[1].data.copy_(given[0].data)
    angles = turns(rote_angles(layout.position, torch.zeros(sum(LENGTHS)), 6))
    made = causal_attention(*given[0].unbind(0), layout, turns=angles)
    newest_first = [x[back] for x in given[1].unbind(0)]
    maps = blocks(layout, block=1, radius=max(LENGTHS) - 1, causal=True)
    wanted = block_attention(*newest_first, maps, turns=angles[back])[back]
    torch.testing.assert_close(made, wanted)
    upstream = torch.randn_like(made)
    for out in (made, wanted):
        out.backward(upstream)
    torch.testing.assert_close(given[0].grad, given[1].grad)


def test_a_rank_counts_ties_against_the_target_and_leaves_out_what_was_seen() -> None:
    scores = torch.tensor([[0.9, 0.5, 0.5, 0.1], [0.9, 0.8, 0.7, 0.6], [0.1, 0.2, 0.3, 0.4], [1.0, 1.0, 1.0, 1.0]])
    target = torch.tensor([1, 3, 3, 0])
    nothing = torch.zeros(0, dtype=torch.int64)
    assert ranks(scores, target, (nothing, nothing)).tolist() == [3, 4, 1, 4]
    seen = torch.tensor([0, 0, 1, 1, 3]), torch.tensor([0, 3, 0, 3, 1])
    assert ranks(scores, target, seen).tolist() == [2, 3, 1, 3], "the target itself is never left out"
    assert scores[0, 0] == pytest.approx(0.9), "the scores stay as they are"


def test_metrics_are_those_computed_by_hand() -> None:
    found = rank_metrics(torch.tensor([1, 2, 10, 11, 50, 51]))
    gain = 1 + 1 / math.log2(3) + 1 / math.log2(11)
    reciprocal = 1 + 1 / 2 + 1 / 10 + 1 / 11 + 1 / 50 + 1 / 51
    expected = {"hr@10": 3 / 6, "ndcg@10": gain / 6, "hr@50": 5 / 6, "mrr": reciprocal / 6}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("count", [5, GROUP, GROUP + 1, 3 * GROUP])
def test_the_loss_of_alike_items_is_that_of_a_guess(count: int) -> None:
    out, table = F.normalize(torch.randn(count, 4), dim=-1), F.normalize(torch.ones(ITEMS, 4), dim=-1)
    target, random = torch.zeros(count, dtype=torch.int64), torch.Generator().manual_seed(0)
    loss = sampled_softmax(out, target, table, negatives=7, temperature=0.05, random=random)
    assert math.log(1 + 7 * 0.7) < loss.item() <= math.log(8) + 1e-5, "but that the wanted item is no rival of itself"


def test_the_loss_is_that_of_every_place_with_what_was_drawn_for_its_group() -> None:
    torch.manual_seed(1)
    count, negatives = 2 * GROUP + 5, 6
    out, table = F.normalize(torch.randn(count, 4), dim=-1), F.normalize(torch.randn(ITEMS, 4), dim=-1)
    target = torch.randint(ITEMS, (count,))
    made = sampled_softmax(out, target, table, negatives=negatives, temperature=0.5, random=torch.Generator().manual_seed(2))
    random = torch.Generator().manual_seed(2)
    order = torch.randperm(count, generator=random)
    drawn = torch.randint(ITEMS, (3, negatives), generator=random)
    losses: list[Tensor] = []
    for nth, place in enumerate(order.tolist()):
        rivals = drawn[nth // GROUP]
        kept = torch.cat([target[place : place + 1], rivals[rivals != target[place]]])
        losses.append(-F.log_softmax(table[kept] @ out[place] / 0.5, dim=0)[0])
    torch.testing.assert_close(made, torch.stack(losses).mean())


def test_every_item_can_be_drawn_and_ranked_and_nothing_else() -> None:
    model = _model("kunlun")
    assert len(model.table()) == ITEMS
    table = model.table().detach().requires_grad_()
    out, target = F.normalize(torch.randn(5 * GROUP, 12), dim=-1), torch.zeros(5 * GROUP, dtype=torch.int64)
    sampled_softmax(out, target, table, negatives=64, temperature=0.05, random=torch.Generator().manual_seed(0)).backward()
    assert table.grad is not None
    assert (table.grad.abs().sum(dim=1) > 0).all()


def test_targets_follow_their_items_and_held_items_are_out_of_training() -> None:
    data = Histories(torch.arange(12), torch.tensor([0, 7, 12]), 12)
    users = torch.tensor([1, 0])
    train, valid, test = (data.batch(users, newest=newest, longest=3) for newest in (TRAIN, VALID, TEST))
    assert train.item_T.tolist() == [7, 8, 1, 2, 3]
    assert train.target_T.tolist() == [8, 9, 2, 3, 4]
    assert valid.item_T.tolist() == [7, 8, 9, 2, 3, 4]
    assert valid.target_T[valid.layout.offsets[1:] - 1].tolist() == [10, 5]
    assert test.item_T.tolist() == [8, 9, 10, 3, 4, 5]
    assert test.target_T[test.layout.offsets[1:] - 1].tolist() == [11, 6]


@pytest.mark.parametrize("stack", LAYERS)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(stack: str, tmp_path: Path) -> None:
    whole = _run(stack, tmp_path / "whole")
    whole.train(passes=4, every=2, patience=10)
    for passes in (1, 2, 4):
        parts = _run(stack, tmp_path / "parts")
        parts.train(passes=passes, every=2, patience=10)
    assert parts.progress.passes == 4
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(parts.model.state_dict()[name], value, rtol=0, atol=0)
    assert [point["pass"] for point in parts.progress.curve] == [1.0, 2.0, 4.0]
    assert parts.tested()["test"] == _run(stack, tmp_path / "parts").tested()["test"]


def test_a_run_ends_without_a_new_best_and_tests_the_best(tmp_path: Path) -> None:
    run = _run("kunlun", tmp_path)
    run.optimizer.param_groups[0]["lr"] = 0.0
    run.train(passes=50, every=1, patience=2)
    assert (run.progress.passes, run.progress.best) == (3, 1)
    assert run.tested()["best"] == 1
