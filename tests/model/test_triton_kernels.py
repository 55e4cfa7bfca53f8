"""The Triton kernels without a GPU: interpreted they equal their definitions, compiled they use matrix instructions.

Neither says how fast they are.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model.kernels import block_tiles, gdpa_tiles
from model.kernels.jagged_tiles import forward_tiles, key_tiles, query_tiles

ROOT = Path(__file__).resolve().parents[2]
HAVE_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not HAVE_TRITON, reason="triton is not installed: its kernels are neither interpreted nor compiled"
)

INTEGERS = {name: "*i64" for name in ("offsets", "order", "spans", "owner", "firsts")}
FLOATS = {"lse": "*fp32", "turns": "*fp32", "delta": "*fp32", "scale": "fp32", "power": "fp32", "alpha": "fp32", "beta": "fp32"}
FLOATS |= dict.fromkeys(("bias", "dbias", "mean", "rstd", "rms"), "*fp32")
FLOATS |= {"eps": "fp32"}
TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "s", "du", "ds", "by_keys", "a", "weight", "y", "dy", "da", "dweight")
SOFTMAX = {"WIDTH": 128, "PRECISION": "ieee"}
BLOCK = {"BLOCK": 64, "BEFORE": 0, "AFTER": 0, "TURNED": 0}
GDPA = {"ACTIVATION": "gelu"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(
        ("jagged_tiles", kernel, {"SHARED": True, "BIASED": biased})
        for kernel in ("_forward_kernel", "_query_kernel", "_key_kernel")
        for biased in (False, True)
    ),
    ("block_tiles", "_forward_kernel", BLOCK),
    ("block_tiles", "_forward_kernel", BLOCK | {"BEFORE": 1, "AFTER": 1, "TURNED": 2}),
    ("block_tiles", "_backward_kernel", BLOCK),
    ("block_tiles", "_backward_kernel", BLOCK | {"BEFORE": 1, "AFTER": 1}),
    ("block_tiles", "_backward_kernel", BLOCK | {"AFTER": 1, "TURNED": 1}),
    ("block_tiles", "_backward_kernel", BLOCK | {"BEFORE": 1, "AFTER": 1, "TURNED": 2}),
    ("gdpa_tiles", "_forward_kernel", GDPA | {"KEYS": 128, "SPAN": 1024}),
    ("gdpa_tiles", "_forward_kernel", GDPA | {"KEYS": 256, "SPAN": 1024}),
    ("gdpa_tiles", "_backward_kernel", GDPA | {"KEYS": 128}),
]


def name_of(case: tuple[str, str, dict[str, Any]]) -> str:
    module, kernel, numbers = case
    switches = "".join(f" {name.lower()}" for name in ("TURNED", "BIASED") if numbers.get(name))
    return f"{module}{kernel}{numbers.get('AFTER', numbers.get('KEYS', ''))}{switches}"


def cut_of(
    module: str, kernel: str, capability: int, keys: int = 0, turned: bool = False, biased: bool = False
) -> Any:
    """The tiles that the launcher chooses for 256 seeds, blocks of 64, or a number of keys; heads of 128."""
    if module == "block_tiles":
        forward = kernel == "_forward_kernel"
        return block_tiles.forward_tiles(64, 128) if forward else block_tiles.backward_tiles(64, 128, turned=turned)
    if module == "gdpa_tiles":
        return getattr(gdpa_tiles, kernel[1:].replace("kernel", "tiles"))(keys, 128)
    if kernel == "_query_kernel":
        return query_tiles(256, 128, capability, biased=biased)
    return {"_forward_kernel": forward_tiles, "_key_kernel": key_tiles}[kernel](256, 128)


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_on_a_cpu_the_kernels_equal_their_definitions() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/model/interpreted_kernels.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@needs_triton
@pytest.mark.parametrize(
    ("capability", "instruction"), [(90, "wgmma.mma_async"), (100, "tcgen05.mma")], ids=["sm_90", "sm_100"]
)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_compiled_for_a_gpu_they_multiply_by_matrix_instructions_and_spill_no_register(
    case: tuple[str, str, dict[str, Any]],
    capability: int,
    instruction: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, name, more = case
    kernel = getattr(importlib.import_module(f"model.kernels.{module}"), name)
    cut = cut_of(module, name, capability, more.get("KEYS", 0), more.get("TURNED", 0) > 0, more.get("BIASED", False))
    built = compiled(kernel, capability, cut, SOFTMAX | more)
    assert built.asm["ptx"].count(instruction) > 0
    assert stack_bytes(built.asm["cubin"], tmp_path) == 0
    assert built.metadata.shared <= 232448  # bytes that a program can have on either


@needs_triton
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_in_float32_too_turned_blocks_compile_for_hopper_and_spill_little(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.7 failed there where a float32 operand was only reshaped before its product."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = getattr(block_tiles, f"_{kernel}_kernel")
    backward = block_tiles.backward_tiles(64, 64, turned=True, size=4)
    cut = block_tiles.forward_tiles(64, 64) if kernel == "forward" else backward
    numbers = BLOCK | {"BEFORE": 1, "AFTER": 1, "TURNED": 2, "WIDTH": 64, "PRECISION": "tf32"}
    built = compiled(function, 90, cut, numbers, "fp32")
    assert built.asm["ptx"].count("wgmma.mma_async") > 0
    assert stack_bytes(built.asm["cubin"], tmp_path) <= 16
    assert built.metadata.shared <= 232448


def compiled(kernel: Any, capability: int, cut: Any, numbers: dict[str, Any], dtype: str = "bf16") -> Any:
    """The kernel for tensors whose addresses and strides are multiples of 16, as the launcher would find them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    numbers = {key: value for key, value in (numbers | cut._asdict()).items() if key in kernel.arg_names}
    kinds = INTEGERS | FLOATS | dict.fromkeys(TENSORS, f"*{dtype}")
    signature = {name: "constexpr" if name in numbers else kinds.get(name, "i32") for name in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or (signature[name] == "i32" and "_" in name)
    }
    source = ASTSource(kernel, signature, numbers, attributes)
    options = {"num_warps": cut.num_warps, "num_stages": cut.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Local memory of a thread, where spilled registers lie, as cuobjdump, which Triton brings, reads it."""
    from triton import knobs

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"STACK:(\d+).*LOCAL:(\d+)", usage)
    assert found, usage
    return max(int(number) for pair in found for number in pair)
