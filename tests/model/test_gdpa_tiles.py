"""The Triton kernels of attention without softmax, without a GPU: interpreted and compiled as all others are."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from model.kernels import gdpa_tiles, jagged_gdpa_tiles, pffn_tiles
from model.kernels.gdpa import gdpa
from model.kernels.jagged_attention import jagged_attention
from model.kernels.jagged_gdpa import pooled_gdpa, windowed_gdpa
from model.kernels.pffn_block import pffn_block
from model.nn.jagged import Jagged
from tests.model.test_triton_kernels import ROOT, compiled, needs_triton, stack_bytes

ARCHITECTURES = pytest.mark.parametrize(
    ("capability", "instruction"), [(90, "wgmma.mma_async"), (100, "tcgen05.mma")], ids=["sm_90", "sm_100"]
)
BFLOAT = {"WIDTH": 128, "PRECISION": "ieee"}


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_on_a_cpu_the_kernels_equal_their_definitions() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/model/interpreted_gdpa.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def assert_compiles(
    module: str, kernel: str, capability: int, instruction: str, cut: Any, numbers: dict[str, Any], folder: Path
) -> None:
    """By matrix instructions, without a spilled register, within the shared memory that a program can have."""
    function = getattr(importlib.import_module(f"model.kernels.{module}"), kernel)
    built = compiled(function, capability, cut, BFLOAT | numbers)
    assert built.asm["ptx"].count(instruction) > 0
    assert stack_bytes(built.asm["cubin"], folder) == 0
    assert built.metadata.shared <= 232448


@needs_triton
@ARCHITECTURES
@pytest.mark.parametrize("activation", ["gelu_polynomial", "hardswish"])
def test_other_activations_spill_no_register_either(
    activation: str, capability: int, instruction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = {"ACTIVATION": activation, "KEYS": 128}
    cut = gdpa_tiles.backward_tiles(128, 128)
    assert_compiles("gdpa_tiles", "_backward_kernel", capability, instruction, cut, numbers, tmp_path)


@needs_triton
@ARCHITECTURES
@pytest.mark.parametrize("of", ["jagged queries", "dense queries"])
@pytest.mark.parametrize("kernel", ["reads", "queries", "keys"])
def test_over_jagged_keys_they_multiply_by_matrix_instructions_too(
    of: str, kernel: str, capability: int, instruction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    jagged = of == "jagged queries"
    numbers: dict[str, Any] = {"ACTIVATION": "gelu", "JAGGED": jagged, "WINDOWED": jagged}
    if kernel != "keys":
        numbers["BACKWARD"] = kernel == "queries"
    name = "_key_kernel" if kernel == "keys" else "_query_kernel"
    cut = (jagged_gdpa_tiles.key_tiles if kernel == "keys" else jagged_gdpa_tiles.query_tiles)(1000, 128)
    assert_compiles("jagged_gdpa_tiles", name, capability, instruction, cut, numbers, tmp_path)


@needs_triton
@ARCHITECTURES
@pytest.mark.parametrize("keys", [128, 256])
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_the_block_around_the_network_is_one_kernel_of_all_heads_forward_and_spills_no_register(
    kernel: str, keys: int, capability: int, instruction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cut = getattr(pffn_tiles, f"{kernel}_tiles")(keys, 128)
    numbers = {"ACTIVATION": "gelu", "KEYS": keys, "NORMALIZE": True}
    assert_compiles("pffn_tiles", f"_{kernel}_kernel", capability, instruction, cut, numbers, tmp_path)


@needs_triton
@pytest.mark.parametrize("capability", [90, 100])
def test_norms_of_whole_tokens_spill_no_register(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cut = pffn_tiles.token_tiles(pffn_tiles.WIDEST_TOKEN)
    for kernel in (pffn_tiles._last_kernel, pffn_tiles._norm_kernel):
        built = compiled(kernel, capability, cut, {"TILES": 2})
        assert stack_bytes(built.asm["cubin"], tmp_path) == 0


class Called(TorchDispatchMode):
    """Remembers which of our operators were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("gem."):
            self.names.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


@needs_triton
def test_tensors_on_a_gpu_take_the_kernels_and_what_these_do_not_take_is_composed() -> None:
    """Fake tensors say that they are on a GPU: which operator is called with what, not what it computes."""
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    several = ("gelu", "relu") * 2
    with FakeTensorMode():
        index = torch.empty(4, dtype=torch.int64, device="cuda")
        layout = Jagged(index, index, index, (), index, index, index, False)
        s, k, q = torch.empty(50, 512, **half), torch.empty(3, 256, 4, 128, **half), torch.empty(50, 4, 128, **half)
        seeds, bias = torch.empty(1, 7, 4, 128, **half), torch.empty(50, 4, device="cuda")
        wide, wide_k = torch.empty(50, 1024, **half), torch.empty(3, 8, 8, 128, **half)
        calls: dict[str, tuple[str, Callable[[], Tensor]]] = {
            "a block": ("pffn_block", lambda: pffn_block(s, k, k, layout)),
            "of float32 tokens": ("pffn_block", lambda: pffn_block(s.float(), k, k, layout)),
            "of several activations": ("gdpa", lambda: pffn_block(s, k, k, layout, activation=several)),
            "of wide tokens": ("gdpa", lambda: pffn_block(wide, wide_k, wide_k, layout)),
            "attention": ("gdpa", lambda: gdpa(q, k, k, layout, activation=several)),
            "a window": ("jagged_gdpa", lambda: windowed_gdpa(q, q, q, layout, window=5)),
            "dense queries": ("jagged_gdpa", lambda: pooled_gdpa(seeds, q, q, layout)),
            "a bias": ("jagged_attention", lambda: jagged_attention(seeds, q, q, layout, bias)),
        }
        for name, (operator, call) in calls.items():
            with Called() as called:
                out = call()
            assert called.names == [operator], name
            assert out.dtype == (torch.float32 if name == "of float32 tokens" else torch.bfloat16)
