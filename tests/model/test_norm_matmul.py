"""A linear layer of normalized tokens in one equals norm and product one after the other; its kernels compile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from model.kernels import norm_matmul as kernels
from model.kernels.norm_matmul import (
    norm_linear,
    norm_matmul,
    norm_matmul_flops,
    norm_matmul_reference,
)
from model.kernels.quantized_matmul import Recipe
from model.training.precision import MxLinear
from tests.model.test_triton_kernels import ROOT, compiled, needs_triton, stack_bytes
from tests.model.twins import normal

TOKENS = st.sampled_from([0, 1, 63, 64, 65, 127, 128, 1000])


def both(
    op: Callable[[Tensor, Tensor], Tensor], a: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    a, weight = a.clone().requires_grad_(), weight.clone().requires_grad_()
    y = op(a, weight)
    return (y.detach(), *torch.autograd.grad(y, (a, weight), normal(*y.shape, seed=7).to(y.dtype)))


@settings(max_examples=30, deadline=None)
@given(TOKENS, st.sampled_from([1, 2, 16, 65]), st.sampled_from([1, 5, 48]), st.sampled_from([1e-4, 1.0, 1e4]))
def test_it_equals_norm_then_product_in_values_and_gradients(tokens: int, width: int, outputs: int, scale: float) -> None:
    a, weight = scale * normal(tokens, width), normal(outputs, width, seed=1)
    for fast, plain in zip(both(norm_matmul, a, weight), both(norm_matmul_reference, a, weight), strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5 * max(1.0, float(plain.abs().max() if plain.numel() else 0)))


def test_in_bfloat16_it_equals_the_composed_to_three_hundredths() -> None:
    a, weight = normal(128, 64, dtype=torch.bfloat16), (normal(48, 64, seed=1) / 8).bfloat16()
    for fast, plain in zip(both(norm_matmul, a, weight), both(norm_matmul_reference, a, weight), strict=True):
        torch.testing.assert_close(fast, plain, rtol=3e-2, atol=3e-2)


def test_it_has_the_gradient_that_differences_show() -> None:
    a, weight = (normal(*shape, seed=i, dtype=torch.float64).requires_grad_() for i, shape in enumerate([(5, 6), (4, 6)]))
    assert torch.autograd.gradcheck(norm_matmul, (a, weight))
    assert torch.autograd.gradcheck(lambda a: norm_matmul(a, weight.detach()), (a,))
    assert torch.autograd.gradcheck(lambda weight: norm_matmul(a.detach(), weight), (weight,))


def test_it_keeps_a_tensor_of_tokens_less_for_the_gradient() -> None:
    a, weight = normal(100, 32).requires_grad_(), normal(8, 32, seed=1).requires_grad_()

    def kept(op: Callable[[Tensor, Tensor], Tensor]) -> int:
        """Numbers kept beside the inputs."""
        found: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            found[x.untyped_storage().data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y = op(a, weight)
        own = {x.untyped_storage().data_ptr() for x in (a, weight)}
        assert y.requires_grad
        return sum(size for place, size in found.items() if place not in own)

    assert kept(norm_matmul_reference) - kept(norm_matmul) == a.numel()
    assert kept(norm_matmul) == len(a)


def test_torch_counts_the_product_and_twice_as_much_backward() -> None:
    a, weight = normal(10, 6).requires_grad_(), normal(4, 6, seed=1).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        y = norm_matmul(a, weight)
    assert counter.get_total_flops() == norm_matmul_flops(10, 6, 4)
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 2 * norm_matmul_flops(10, 6, 4)


def test_autocast_multiplies_in_its_precision() -> None:
    a, weight = normal(10, 6).requires_grad_(), normal(4, 6, seed=1).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm_matmul(a, weight)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), norm_matmul_reference(a, weight), rtol=3e-2, atol=3e-2)


def test_a_layer_that_was_replaced_adds_a_bias_or_is_watched_is_called_as_it_stands() -> None:
    a, plain, biased = normal(10, 32), nn.Linear(32, 4, bias=False), nn.Linear(32, 4)
    torch.testing.assert_close(norm_linear(a, plain), norm_matmul_reference(a, plain.weight))
    torch.testing.assert_close(norm_linear(a, biased), norm_matmul_reference(a, biased.weight) + biased.bias)
    seen: list[Tensor] = []
    handle = plain.register_forward_hook(lambda layer, given, out: seen.append(given[0]))
    norm_linear(a, plain)
    handle.remove()
    assert len(seen) == 1
    replaced = MxLinear(plain, Recipe())
    assert torch.equal(norm_linear(a, replaced), replaced(torch.nn.functional.rms_norm(a, (32,), eps=1e-5)))


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_on_a_cpu_the_kernels_equal_the_definition() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/model/interpreted_norm_matmul.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@needs_triton
@pytest.mark.parametrize(
    ("capability", "instruction", "dtype"),
    [(90, "wgmma.mma_async", "bf16"), (100, "tcgen05.mma", "bf16"), (90, "wgmma.mma_async", "fp32")],
    ids=["sm_90", "sm_100", "sm_90 in float32"],
)
@pytest.mark.parametrize("kernel", ["forward", "token", "weight"])
def test_compiled_for_a_gpu_they_multiply_by_matrix_instructions_and_spill_no_register(
    kernel: str, dtype: str, capability: int, instruction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cut = {"forward": kernels.FORWARD, "token": kernels.TOKENS, "weight": kernels.WEIGHTS}[kernel]
    numbers = {"WIDTH": kernels.WIDEST_TOKEN, "PRECISION": "ieee" if dtype == "bf16" else "tf32"}
    built = compiled(getattr(kernels, f"_{kernel}_kernel"), capability, cut, numbers, dtype)
    assert built.asm["ptx"].count(instruction) > 0
    assert stack_bytes(built.asm["cubin"], tmp_path) == 0
    assert built.metadata.shared <= 232448  # bytes that a program can have on either
