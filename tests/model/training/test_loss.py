from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.training import loss
from model.training.loss import DistillConfig

SEEDS = st.integers(0, 2**31)


def cells(seed: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, k, generator=generator, dtype=torch.float64)
    labels = (torch.rand(n, k, generator=generator) < 0.4).double()
    return logits, labels, torch.rand(n, k, generator=generator) < 0.6


@settings(max_examples=40)
@given(SEEDS, st.integers(0, 9), st.integers(1, 4))
def test_the_loss_is_the_mean_over_settled_cells_of_each_objective(seed: int, n: int, k: int) -> None:
    logits, labels, mask = cells(seed, n, k)
    means = loss.masked_bce(logits, labels, mask).means()
    for column in range(k):
        rows = [i for i in range(n) if mask[i, column]]
        p = [1 / (1 + math.exp(-float(logits[i, column]))) for i in rows]
        terms = [-math.log(q if labels[i, column] else 1 - q) for i, q in zip(rows, p, strict=True)]
        assert float(means[column]) == pytest.approx(sum(terms) / len(terms) if terms else 0.0, abs=1e-9)


@pytest.mark.parametrize("n", [0, 3])
def test_nothing_settled_is_loss_zero_with_weight_zero_and_no_gradient(n: int) -> None:
    logits = torch.zeros(n, 2, requires_grad=True)
    sums = loss.masked_bce(logits, torch.full((n, 2), math.nan), torch.zeros(n, 2, dtype=torch.bool))
    value = loss.total(sums, sums.weight_K)
    value.backward()
    assert value.item() == 0.0
    assert sums.weight_K.tolist() == [0.0, 0.0]
    assert logits.grad is not None
    assert not logits.grad.any()


@given(SEEDS, st.sampled_from([math.nan, math.inf, 7.0]))
def test_a_missing_conversion_leaves_the_conversion_loss_as_it_was(seed: int, junk: float) -> None:
    logits, labels, mask = cells(seed, 5, 2)
    more_logits = torch.cat([logits, torch.tensor([[0.3, 1.5]], dtype=torch.float64)]).requires_grad_()
    more_labels = torch.cat([labels, torch.tensor([[1.0, junk]], dtype=torch.float64)])
    more_mask = torch.cat([mask, torch.tensor([[True, False]])])
    before = loss.masked_bce(logits, labels, mask).means()
    sums = loss.masked_bce(more_logits, more_labels, more_mask)
    assert sums.means()[1].item() == before[1].item()
    loss.total(sums, sums.weight_K).backward()
    assert more_logits.grad is not None
    assert torch.isfinite(more_logits.grad).all()
    assert more_logits.grad[5, 1] == 0.0


def test_shares_of_a_batch_add_up_to_its_gradient() -> None:
    logits, labels, mask = cells(3, 8, 2)
    whole = logits.clone().requires_grad_()
    sums = loss.masked_bce(whole, labels, mask)
    loss.total(sums, sums.weight_K, [1.0, 0.5]).backward()
    parts = logits.clone().requires_grad_()
    for rank in range(3):
        share = loss.masked_bce(parts[rank::3], labels[rank::3], mask[rank::3])
        loss.total(share, sums.weight_K, [1.0, 0.5]).backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=0, atol=1e-15)


def test_soft_labels_are_scaled_and_kept_within_a_probability() -> None:
    logits = torch.tensor([[0.0], [5.0]])
    assert loss.soft_labels(logits, scale=1.5).tolist() == [[0.75], [1.0]]


def test_rows_without_a_teacher_distil_nothing() -> None:
    student = torch.randn(4, 2, requires_grad=True)
    teacher = torch.tensor([[0.5, 1.0], [math.nan, 0.0], [9.0, 9.0], [9.0, 9.0]])
    there = torch.tensor([True, True, False, False])
    sums = loss.distillation(student, teacher, there, DistillConfig())
    assert sums.weight_K.tolist() == [1.0, 2.0]
    loss.total(sums, sums.weight_K).backward()
    assert student.grad is not None
    assert not student.grad[2:].any()
    assert student.grad[1, 0] == 0.0
    nobody = loss.distillation(student, teacher, torch.zeros(4, dtype=torch.bool), DistillConfig())
    assert loss.total(nobody, nobody.weight_K).item() == 0.0


@given(st.floats(0.0, 20.0))
def test_the_gradient_into_the_backbone_scales_linearly_and_values_stay(beta: float) -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = loss.scale_gradient(x, beta)
    assert y.tolist() == x.tolist()
    (y * torch.tensor([3.0, 5.0])).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, beta * torch.tensor([3.0, 5.0]))


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_weights_must_be_finite_and_not_negative(bad: float) -> None:
    with pytest.raises(ValueError, match="must be finite and not negative"):
        DistillConfig(weight=bad)
