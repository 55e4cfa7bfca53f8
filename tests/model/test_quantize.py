"""MXFP8 numbers are what the standard says, to the bit, and products of them are close to float32's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from model.kernels.quantize import (
    E4M3,
    E5M2,
    SCALE_NAN,
    Format,
    Quantized,
    Scaling,
    Tile,
    code_of,
    code_values,
    dequantize,
    dequantize_reference,
    quantize,
    quantize_reference,
)
from model.kernels.quantized_matmul import (
    Recipe,
    fp8_matmul,
    fp8_matmul_reference,
    hadamard,
    mx_matmul,
    mx_matmul_reference,
    rotate,
)
from tests.model.twins import normal

FORMATS = pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
SCALINGS = pytest.mark.parametrize("scaling", ["floor", "up"])
ROW, SQUARE = (1, 32), (32, 32)
ULP = {"E4M3": 2.0**-4, "E5M2": 2.0**-3}
"""Half a step over the value, at most, of numbers that are not subnormal."""


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def wild(*shape: int, seed: int = 0) -> Tensor:
    """Magnitudes over 2^±20, with zeros of both signs and powers of two among them."""
    rng = np.random.default_rng(seed)
    power = np.exp2(rng.integers(-20, 20, shape))
    fraction = rng.choice([0.0, -0.0, 1.0, -1.0, 1.75, 1.875, np.nan], shape)
    return torch.from_numpy(np.where(np.isnan(fraction), rng.normal(size=shape), fraction) * power).float()


def codes(q: Quantized) -> Tensor:
    return q.elements.view(torch.uint8)


def block(*values: float) -> Tensor:
    """One row of 32 numbers."""
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]])


def error(close: Tensor, exact: Tensor) -> float:
    return float(((close - exact).norm() / exact.norm()).detach())


@FORMATS
def test_all_256_codes_mean_what_their_bits_say(format: Format) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    values = torch.tensor(code_values(format))
    torch.testing.assert_close(every.view(format.dtype).float(), values, rtol=0, atol=0, equal_nan=True)
    finite = values[values.isfinite()]
    assert (float(finite.max()), len(finite)) == ((448.0, 254) if format is E4M3 else (57344.0, 248))
    assert math.log2(finite[finite > 0].min()) == format.smallest_step


@FORMATS
@SCALINGS
@pytest.mark.parametrize("power", [-127, -60, 0, 60, 112])
def test_every_finite_code_at_every_scale_survives_being_read_and_written(
    format: Format, scaling: Scaling, power: int
) -> None:
    values = torch.tensor(code_values(format))
    kept = values.isfinite()
    largest = torch.full((int(kept.sum()), 1), format.largest)
    x = torch.cat([values[kept][:, None], largest], dim=1) * 2.0**power
    q = quantize(x, format, tile=ROW, scaling=scaling)
    assert torch.equal(codes(q)[:, 0], torch.arange(256, dtype=torch.uint8)[kept])
    assert set(q.scales.flatten().tolist()) == {power + 127}
    assert torch.equal(dequantize(q), x)


def test_all_256_scales_are_powers_of_two_and_the_last_is_nan() -> None:
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    ones = torch.ones(256, 1).to(torch.float8_e4m3fn)
    read = dequantize(Quantized(ones, scales, ROW)).flatten()
    assert read[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert read[255].isnan()


@FORMATS
def test_halves_go_to_the_even_code_and_neighbours_to_the_nearest(format: Format) -> None:
    for code in range(255 - 128):
        low, high = code_values(format)[code : code + 2]
        if not math.isfinite(high):
            break
        middle = torch.tensor((low + high) / 2)
        x = torch.stack([torch.nextafter(middle, middle * 0), middle, torch.nextafter(middle, middle * 2)])
        row = torch.cat([x, torch.tensor([format.largest])])[None]  # the last fixes the scale at 1
        found = codes(quantize(row, format, tile=ROW, scaling="floor"))
        assert found[0, :3].tolist() == [code, code + code % 2, code + 1]
        assert [code_of(v, format) for v in x.tolist()] == [code, code + code % 2, code + 1]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 999),
    st.sampled_from([(1, 1), (3, 31), (2, 33), (33, 40), (5, 64)]),
    st.sampled_from([E4M3, E5M2]),
    st.sampled_from([ROW, (32, 1), SQUARE]),
    st.sampled_from(["floor", "up"]),
    st.booleans(),
)
def test_quantizing_equals_the_table_to_the_bit(
    seed: int, shape: tuple[int, int], format: Format, tile: Tile, scaling: Scaling, stochastic: bool
) -> None:
    x = wild(*shape, seed=seed)
    noise = torch.rand(shape, generator=draw(seed)) if stochastic else None
    fast = quantize(x, format, tile=tile, scaling=scaling, noise=noise)
    plain_codes, plain_scales = quantize_reference(x, format, tile=tile, scaling=scaling, noise=noise)
    assert torch.equal(fast.scales, plain_scales)
    assert torch.equal(codes(fast), plain_codes)
    assert torch.equal(dequantize(fast).double(), dequantize_reference(plain_codes, plain_scales, format, tile))


@FORMATS
def test_the_floor_scale_saturates_above_the_largest_element_and_the_scale_rounded_up_never_does(
    format: Format,
) -> None:
    largest = format.largest
    for power in (-30, 0, 30):
        over = block(largest * 1.125 * 2.0**power, -largest * 1.14 * 2.0**power)
        q = quantize(over, format, tile=ROW, scaling="floor")
        assert dequantize(q)[0, :2].tolist() == [largest * 2.0**power, -largest * 2.0**power]
        up = quantize(over, format, tile=ROW, scaling="up")
        assert int(up.scales) == int(q.scales) + 1
        assert error(dequantize(up), over) <= ULP[format.name]


@FORMATS
def test_scales_change_exactly_where_the_rules_say(format: Format) -> None:
    emax = math.floor(math.log2(format.largest))
    for power in (-100, -3, 0, 7, 100):
        one, top = torch.tensor(2.0**power), torch.tensor(format.largest * 2.0 ** (power - emax))
        below, above = torch.nextafter(one, one * 0), torch.nextafter(top, top * 2)
        amax = torch.stack([below, one, top, above])[:, None]
        floor = quantize(amax, format, tile=ROW, scaling="floor").scales.flatten().tolist()
        up = quantize(amax, format, tile=ROW, scaling="up").scales.flatten().tolist()
        byte = power - emax + 127
        assert floor == [byte - 1, byte, byte, byte]
        assert up == [byte, byte, byte, byte + 1]


@SCALINGS
def test_a_block_of_zeros_is_zero_and_keeps_their_signs(scaling: Scaling) -> None:
    q = quantize(block(0.0, -0.0), E4M3, tile=ROW, scaling=scaling)
    assert codes(q)[0, :3].tolist() == [0x00, 0x80, 0x00]
    assert int(q.scales) == 0
    assert not dequantize(q).any()


@SCALINGS
@pytest.mark.parametrize("size", [2.0**-149, 3 * 2.0**-140, 2.0**-126, 2.0**-119 * 1.5])
def test_numbers_below_the_smallest_scale_become_subnormal_or_zero_and_never_garbage(
    scaling: Scaling, size: float
) -> None:
    back = dequantize(quantize(block(size, -size / 2), E4M3, tile=ROW, scaling=scaling))
    assert float((back - block(size, -size / 2)).abs().max()) <= max(2.0**-137, size * 2.0**-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(bad: float, stochastic: bool) -> None:
    x = normal(3, 64)
    clean = dequantize(quantize(x, E4M3, tile=ROW, scaling="up"))
    x[1, 40] = bad
    noise = torch.zeros_like(x) + 0.999 if stochastic else None
    q = quantize(x, E4M3, tile=ROW, scaling="up", noise=noise)
    back = dequantize(q)
    assert int(q.scales[1, 1]) == SCALE_NAN
    assert back[1, 32:].isnan().all()
    assert back.isnan().sum() == 32
    if not stochastic:
        assert torch.equal(back[0], clean[0])


@FORMATS
@given(seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_what_is_not_subnormal_loses_half_a_step_at_most(format: Format, seed: int) -> None:
    x = normal(4, 64, seed=seed)
    q = quantize(x, format, tile=ROW, scaling="up")
    smallest = 2.0 ** (format.smallest_step + format.mantissa_bits)
    kept = q.elements.float().abs() >= smallest
    assert float(((dequantize(q) - x).abs() / x.abs())[kept].max()) <= ULP[format.name]


def test_a_tile_cut_off_is_a_tile_filled_up_with_zeros() -> None:
    x = normal(40, 50)
    padded = torch.nn.functional.pad(x, (0, 14, 0, 24))
    for tile in (ROW, (32, 1), SQUARE):
        cut, whole = (quantize(y, E4M3, tile=tile, scaling="up") for y in (x, padded))
        assert torch.equal(codes(cut), codes(whole)[:40, :50])
        rows, columns = cut.scales.shape
        assert torch.equal(cut.scales, whole.scales[:rows, :columns])
    empty = quantize(x[:0], E4M3, tile=SQUARE, scaling="up")
    assert dequantize(empty).shape == (0, 50)


def test_batches_of_matrices_are_quantized_each_for_itself() -> None:
    x = normal(3, 40, 50)
    q = quantize(x, E4M3, tile=SQUARE, scaling="up")
    alone = [dequantize(quantize(y, E4M3, tile=SQUARE, scaling="up")) for y in x]
    assert torch.equal(dequantize(q), torch.stack(alone))


def test_inputs_that_cannot_be_quantized_are_refused_with_a_way_out() -> None:
    with pytest.raises(ValueError, match="float32 or narrower"):
        quantize(normal(2, 32).double(), E4M3, tile=ROW, scaling="up")
    with pytest.raises(ValueError, match="reshape"):
        quantize(normal(32), E4M3, tile=ROW, scaling="up")
    with pytest.raises(ValueError, match="one number for each"):
        quantize(normal(2, 32), E4M3, tile=ROW, scaling="up", noise=torch.zeros(32))
    with pytest.raises(ValueError, match="must make 7"):
        Format("E4M4", 4, 4, torch.float8_e4m3fn, infinities=False)


@FORMATS
def test_square_tiles_quantize_a_matrix_and_its_transpose_to_the_same_bytes(format: Format) -> None:
    x = wild(70, 45)
    one, other = (quantize(y, format, tile=SQUARE, scaling="up") for y in (x, x.mT))
    assert torch.equal(codes(one.transposed), codes(other))
    assert torch.equal(one.transposed.scales, other.scales)
    assert torch.equal(dequantize(one).mT, dequantize(one.transposed))
    rows = quantize(x, format, tile=ROW, scaling="up")
    assert not torch.equal(dequantize(rows).mT, dequantize(quantize(x.mT, format, tile=ROW, scaling="up")))


@FORMATS
@pytest.mark.parametrize("value", [1.0, 1.03, -1.9, 0.013, 3e-5, -0.0049])
def test_stochastic_rounding_is_unbiased_and_takes_neighbours_only(format: Format, value: float) -> None:
    draws = 100_000
    x = torch.full((draws, 2), value)
    x[:, 1] = 2.0  # fixes the scale
    q = quantize(x, format, tile=ROW, scaling="up", noise=torch.rand(draws, 2, generator=draw(1)))
    found = dequantize(q)[:, 0].double()
    neighbours = found.unique()
    assert len(neighbours) <= 2
    assert float(neighbours[0]) <= float(x[0, 0]) <= float(neighbours[-1])
    gap = float(neighbours[-1] - neighbours[0])
    share = (float(x[0, 0]) - float(neighbours[0])) / gap if gap else 0.0
    sigma = gap * math.sqrt(share * (1 - share) / draws)
    assert abs(float(found.mean()) - float(x[0, 0])) <= 4 * sigma


def test_the_same_generator_draws_the_same_bytes() -> None:
    a, b = normal(8, 32).requires_grad_(), normal(4, 32, seed=1).requires_grad_()

    def gradients(seed: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(mx_matmul(a, b, Recipe(), generator=draw(seed)).square().sum(), (a, b))

    found = [gradients(seed) for seed in (1, 1, 2)]
    assert all(torch.equal(x, y) for x, y in zip(found[0], found[1], strict=True))
    assert not torch.equal(found[0][0], found[2][0])


@pytest.mark.parametrize("size", [1, 2, 32, 64])
def test_the_rotation_is_orthonormal_and_keeps_products(size: int) -> None:
    turn = hadamard(size, seed=3)
    assert torch.equal((turn * math.sqrt(size)).abs().round(), torch.ones(size, size))
    signs = turn[:, 0] * math.sqrt(size)
    plain = [[signs[i] * (-1) ** (i & j).bit_count() / math.sqrt(size) for j in range(size)] for i in range(size)]
    torch.testing.assert_close(turn, torch.tensor(plain))
    torch.testing.assert_close(turn @ turn.mT, torch.eye(size))
    x, y = normal(5, 64), normal(7, 64, seed=1)
    torch.testing.assert_close(rotate(rotate(x, turn), turn.mT), x)
    torch.testing.assert_close(rotate(x, turn) @ rotate(y, turn).mT, x @ y.mT, atol=1e-5, rtol=1e-5)
    explicit = torch.block_diag(*[turn] * (64 // size))
    torch.testing.assert_close(rotate(x, turn), x @ explicit)


def test_rotations_of_impossible_size_are_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        Recipe(rotation=24)
    with pytest.raises(ValueError, match="no whole blocks of 32"):
        mx_matmul(normal(2, 40), normal(3, 40), Recipe(rotation=32))


RECIPES = [
    Recipe(square=square, stochastic=stochastic, backward=backward, rotation=rotation, exact_weight_gradient=exact)
    for square, stochastic, backward, rotation, exact in [
        (True, False, E4M3, 0, False),
        (True, True, E5M2, 0, False),
        (True, True, E4M3, 8, True),
        (False, False, E4M3, 0, False),
        (False, True, E5M2, 8, False),
        (False, False, E4M3, 0, True),
    ]
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(1, 1, 8), (34, 3, 40), (5, 35, 72)])
def test_a_product_and_its_gradients_equal_three_products_each_quantized_for_itself(
    recipe: Recipe, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    a, b = normal(m, k).requires_grad_(), normal(n, k, seed=1).requires_grad_()
    upstream = normal(m, n, seed=2) * 1e-3
    out = mx_matmul(a, b, recipe, generator=draw(7))
    fast = (out, *torch.autograd.grad(out, (a, b), upstream))
    with torch.no_grad():
        plain = mx_matmul_reference(a, b, upstream, recipe, generator=draw(7))
    for x, y in zip(fast, plain, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5 * float(y.abs().max()))


@pytest.mark.parametrize(("square", "exact"), [(True, False), (True, True), (False, False), (False, True)])
@pytest.mark.parametrize("rotation", [0, 32])
def test_products_and_gradients_are_near_float32s(square: bool, exact: bool, rotation: int) -> None:
    a, b, upstream = normal(96, 64).requires_grad_(), normal(48, 64, seed=1).requires_grad_(), normal(96, 48, seed=2)
    recipe = Recipe(square=square, exact_weight_gradient=exact, rotation=rotation)
    out, true = mx_matmul(a, b, recipe, generator=draw(0)), a @ b.mT
    da, db = torch.autograd.grad(out, (a, b), upstream)
    true_da, true_db = torch.autograd.grad(true, (a, b), upstream)
    assert error(out, true) < 0.05  # two operands, each within about 2^-5 of itself in the mean
    assert error(da, true_da) < 0.07  # rounding up or down at random errs more than to the nearest
    assert error(db, true_db) < (1e-5 if exact else 0.07)


def test_the_backward_pass_keeps_a_byte_a_number_and_with_square_tiles_the_forwards_own() -> None:
    for square, tiles in ((True, 4 * 2 + 2 * 2), (False, 4 * 64 + 2 * 64)):
        a, b = normal(128, 64).requires_grad_(), normal(64, 64, seed=1).requires_grad_()
        out = mx_matmul(a, b, Recipe(square=square))
        assert out.grad_fn is not None
        kept = out.grad_fn.saved_tensors  # type: ignore[attr-defined]
        assert sum(x.numel() * x.element_size() for x in kept) == a.numel() + b.numel() + tiles


def test_halves_go_in_and_come_out_and_autocast_changes_nothing() -> None:
    a, b = normal(4, 32).bfloat16().requires_grad_(), normal(3, 32, seed=1).requires_grad_()
    recipe = Recipe(rotation=32, stochastic=False)
    out = mx_matmul(a.float(), b, recipe)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mx_matmul(a.float(), b, recipe), out)
    recipe = Recipe(stochastic=False)
    half = mx_matmul(a, b, recipe)
    assert torch.equal(half, mx_matmul(a.float(), b, recipe).bfloat16())
    da, db = torch.autograd.grad(half.float().sum(), (a, b))
    assert (da.dtype, db.dtype) == (torch.bfloat16, torch.float32)


def trained(recipe: Recipe | None, steps: int = 150) -> float:
    """Mean loss of the last 30 steps of a two-layer network that learns another one."""
    torch.manual_seed(0)
    first, second, teacher = nn.Linear(64, 96), nn.Linear(96, 32), nn.Linear(64, 32)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=3e-3)
    losses = []
    for step in range(steps):
        x = normal(128, 64, seed=step)

        def layer(y: Tensor, linear: nn.Linear) -> Tensor:
            return (y @ linear.weight.mT if recipe is None else mx_matmul(y, linear.weight, recipe)) + linear.bias

        loss = (layer(torch.relu(layer(x, first)), second) - torch.sin(3 * teacher(x)).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses[-30:]))


def test_a_small_network_learns_as_well_with_quantized_products() -> None:
    full = trained(None)
    for recipe in (Recipe(), Recipe(square=False), Recipe(rotation=32, backward=E5M2)):
        assert trained(recipe) == pytest.approx(full, rel=0.01)


def test_the_hardware_product_has_one_scale_a_row_and_says_what_it_needs() -> None:
    a, b = normal(5, 64) * torch.logspace(-6, 6, 5)[:, None], normal(32, 64, seed=1)
    a[2] = 0.0
    try:
        out = fp8_matmul(a, b)
    except RuntimeError as refused:
        pytest.skip(f"this machine has no FP8 product: {refused}")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), fp8_matmul_reference(a, b), rtol=2.0**-8, atol=0)
    for row in (0, 1, 3, 4):
        assert error(out[row].float(), a[row] @ b.mT) < 0.05
    with pytest.raises(ValueError, match="multiples of 16"):
        fp8_matmul(normal(4, 40), b[:, :40])
