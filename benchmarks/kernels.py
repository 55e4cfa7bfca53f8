"""Times the jagged CPU paths against padding everything to the longest sequence.

    python -m benchmarks.kernels --json OUT

Knows shapes. Does not know models. The rival gets its padded inputs for nothing and is composed of torch's own operations.
GFLOP/s count actual lengths only, and their share is of the fastest square matrix product measured here; MB are the tensors
that must be read and written once. What is named "and back" takes gradients of all that comes in, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import alternate, finish, parser
from model.kernels.block_attention import block_attention, block_attention_flops, blocks
from model.kernels.gdpa import gdpa, gdpa_flops
from model.kernels.jagged_attention import jagged_attention, jagged_attention_flops
from model.kernels.jagged_gdpa import pooled_gdpa, windowed_gdpa, windowed_gdpa_flops
from model.kernels.norm_matmul import norm_matmul, norm_matmul_flops
from model.kernels.pffn_block import pffn_block
from model.nn.jagged import Jagged, jagged
from model.nn.norm import EPS
from model.nn.time import turns
from model.training.throughput import measure_ceiling

Run = Callable[[], Tensor]
HEADS, WIDTH, KEYS, SEEDS, BLOCK, WINDOW = 4, 16, 16, 32, 64, 64

SLOW = {"windowed gdpa": 5}
"""Rounds of an op whose rival takes seconds."""


def main() -> None:
    """Runs every pair alternately and prints medians, spread and ratios."""
    options = parser(__doc__.split("\n", 1)[0] if __doc__ else "").parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    ceiling = measure_ceiling().measured
    rows, cells = [], []
    sizes = ((16, 256),) if options.quick else ((64, 256), (32, 1024), (8, 4096))
    for sequences, longest in sizes:
        some = torch.randint(1, longest + 1, (sequences,), generator=generator)
        some[0] = longest
        for lengths in (some, torch.full_like(some, longest)):
            for cell in _cells(lengths, longest, generator, rounds=5 if options.quick else 15):
                cell["share"] = cell["flops"] / cell["times"]["ours"].median / ceiling
                cells.append(cell)
                rows.append(_row(cell))
    columns = ["op", "fill", "ours ms", "low … high", "padded ms", "low … high", "padded / ours", "MB", "GFLOP/s", "share %"]
    result = {"benchmark": "jagged kernels on one thread", "cells": cells, "ceiling": ceiling}
    finish(result, out=options.json, columns=columns, rows=rows)


def _cells(lengths: Tensor, longest: int, generator: torch.Generator, *, rounds: int) -> Iterator[dict[str, Any]]:
    total, width = int(lengths.sum()), HEADS * WIDTH
    flops = {
        "gdpa": gdpa_flops(total, KEYS, width),
        "block attention": block_attention_flops(lengths.tolist(), block=BLOCK, radius=0, width=width),
        "seed pooling": jagged_attention_flops(total, SEEDS, width),
        "windowed gdpa": windowed_gdpa_flops(lengths.tolist(), window=WINDOW, width=width),
        "causal blocks": block_attention_flops(lengths.tolist(), block=BLOCK, radius=1, width=width, causal=True),
    }
    tokens = {"gdpa": 2 * total + 2 * KEYS * len(lengths), "block attention": 4 * total, "windowed gdpa": 4 * total}
    tokens["seed pooling"] = 2 * total + SEEDS * (1 + len(lengths))
    for alike in ("biased pooling", "pooled gdpa"):
        flops[alike], tokens[alike] = flops["seed pooling"], tokens["seed pooling"]
    flops["turned blocks"], tokens["turned blocks"] = flops["block attention"], 4 * total + total // HEADS
    tokens["causal blocks"] = 4 * total
    for passes, product in ((1, "norm, then product"), (3, "norm, then product and back")):
        flops[product] = passes * norm_matmul_flops(total, width, 3 * width)
        tokens[product] = (1 + passes) // 2 * (4 * total + 3 * width)
    for passes, block in ((1, "pffn block"), (3, "pffn block and back")):
        flops[block], tokens[block] = passes * flops["gdpa"], (1 + passes) // 2 * tokens["gdpa"]
    for name, ours, naive in _pairs(lengths, longest, generator):
        times = alternate({"ours": ours, "padded": naive}, rounds=min(rounds, SLOW.get(name, rounds)))
        yield {
            "op": name,
            "sequences": len(lengths),
            "longest": longest,
            "fill": total / len(lengths) / longest,
            "times": times,
            "ratio": times["padded"].median / times["ours"].median,
            "flops": flops[name],
            "bytes": 4 * width * tokens[name],
        }


def _row(cell: dict[str, Any]) -> list[object]:
    own, other = cell["times"]["ours"], cell["times"]["padded"]
    spread = [f"{t.low * 1e3:.1f} … {t.high * 1e3:.1f}" for t in (own, other)]
    name, rate = f"{cell['op']} {cell['sequences']}×{cell['longest']}", cell["flops"] / own.median / 1e9
    times = [own.median * 1e3, spread[0], other.median * 1e3, spread[1]]
    return [name, cell["fill"], *times, cell["ratio"], cell["bytes"] / 1e6, rate, 100 * cell["share"]]


def _pairs(lengths: Tensor, longest: int, generator: torch.Generator) -> Iterator[tuple[str, Run, Run]]:
    """(op, ours, padded)."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    layout = jagged(offsets)
    total = int(offsets[-1])
    q, k, v = (torch.randn(total, HEADS, WIDTH, generator=generator) for _ in range(3))
    keys, values = (torch.randn(len(lengths), KEYS, HEADS, WIDTH, generator=generator) for _ in range(2))
    seeds = torch.randn(1, SEEDS, HEADS, WIDTH, generator=generator)
    maps = blocks(layout, block=BLOCK, radius=0)
    padded, valid = _padded((q, k, v), layout, longest)
    wide_q, wide_k, wide_v = padded
    yield "gdpa", lambda: gdpa(q, keys, values, layout), lambda: _padded_gdpa(wide_q, keys, values)
    yield (
        "block attention",
        lambda: block_attention(q, k, v, maps),
        lambda: _padded_blocks(wide_q, wide_k, wide_v, valid),
    )
    yield "seed pooling", lambda: jagged_attention(seeds, k, v, layout), lambda: _padded_pool(seeds, wide_k, wide_v, valid)
    bias = torch.randn(total, HEADS, generator=generator)
    wide_bias = bias.new_zeros(len(lengths), longest, HEADS)
    wide_bias[layout.sequence, layout.position] = bias
    yield (
        "biased pooling",
        lambda: jagged_attention(seeds, k, v, layout, bias),
        lambda: _padded_pool(seeds, wide_k, wide_v, valid, wide_bias),
    )
    yield "pooled gdpa", lambda: pooled_gdpa(seeds, k, v, layout), lambda: _padded_pooled_gdpa(seeds, wide_k, wide_v)
    yield (
        "windowed gdpa",
        lambda: windowed_gdpa(q, k, v, layout, window=WINDOW),
        lambda: _padded_window(wide_q, wide_k, wide_v),
    )
    yield from _turned_and_causal(q, k, v, layout, longest)
    s, wide_s = q.flatten(1), wide_q.transpose(1, 2).flatten(2)
    yield from _products(s, wide_s, generator)
    yield "pffn block", lambda: pffn_block(s, keys, values, layout), lambda: _padded_block(wide_s, keys, values)
    ours, theirs = ([x.clone().requires_grad_() for x in (tokens, keys, values)] for tokens in (s, wide_s))
    yield (
        "pffn block and back",
        lambda: _and_back(pffn_block(ours[0], ours[1], ours[2], layout), ours),
        lambda: _and_back(_padded_block(*theirs), theirs),
    )


def _turned_and_causal(
    q: Tensor, k: Tensor, v: Tensor, layout: Jagged, longest: int
) -> Iterator[tuple[str, Run, Run]]:
    maps, causal = (blocks(layout, block=BLOCK, radius=radius, causal=radius > 0) for radius in (0, 1))
    angles = torch.outer(torch.arange(longest).float(), torch.linspace(1, 0, WIDTH // 2))
    here, everywhere = turns(angles[layout.position]), turns(angles)
    (wide_q, wide_k, wide_v), valid = _padded((q, k, v), layout, longest)
    yield (
        "turned blocks",
        lambda: block_attention(q, k, v, maps, turns=here),
        lambda: _padded_blocks(_turned(wide_q, everywhere), _turned(wide_k, everywhere), wide_v, valid),
    )
    yield (
        "causal blocks",
        lambda: block_attention(q, k, v, causal),
        lambda: _padded_blocks(wide_q, wide_k, wide_v, valid, after=1),
    )


def _products(s: Tensor, wide_s: Tensor, generator: torch.Generator) -> Iterator[tuple[str, Run, Run]]:
    weight = torch.randn(3 * s.shape[1], s.shape[1], generator=generator) / s.shape[1] ** 0.5
    yield "norm, then product", lambda: norm_matmul(s, weight), lambda: _padded_product(wide_s, weight)
    ours, theirs = ([x.clone().requires_grad_() for x in (tokens, weight)] for tokens in (s, wide_s))
    yield (
        "norm, then product and back",
        lambda: _and_back(norm_matmul(ours[0], ours[1]), ours),
        lambda: _and_back(_padded_product(theirs[0], theirs[1]), theirs),
    )


def _padded(values: tuple[Tensor, ...], layout: Jagged, longest: int) -> tuple[list[Tensor], Tensor]:
    out = []
    for value in values:
        wide = value.new_zeros(layout.num_sequences, longest, HEADS, WIDTH)
        wide[layout.sequence, layout.position] = value
        out.append(wide.transpose(1, 2))
    return out, torch.arange(longest) < layout.lengths[:, None]


def _padded_gdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.permute(0, 2, 3, 1) / WIDTH**0.5
    return F.gelu(scores, approximate="tanh") @ v.transpose(1, 2)


def _padded_blocks(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, *, after: int = 0) -> Tensor:
    block = torch.arange(q.shape[2]) // BLOCK
    ahead = block[None, :] - block[:, None]
    near = (ahead >= 0) & (ahead <= after)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=near & valid[:, None, None, :] | torch.eye(len(block), dtype=torch.bool))


def _padded_pool(seeds: Tensor, k: Tensor, v: Tensor, valid: Tensor, bias: Tensor | None = None) -> Tensor:
    q, mask = seeds.transpose(1, 2).expand(len(k), -1, -1, -1), valid[:, None, None, :]
    if bias is not None:
        mask = bias.transpose(1, 2)[:, :, None].masked_fill(~mask, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _padded_pooled_gdpa(seeds: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.gelu(seeds.transpose(1, 2) @ k.mT / WIDTH**0.5, approximate="tanh") @ v


def _padded_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A sequence at a time: the scores of all are more than memory should hold."""
    place = torch.arange(q.shape[2])
    far = (place[:, None] - place).abs() > WINDOW
    out = torch.empty_like(q)
    for row in range(len(q)):
        scores = (q[row] @ k[row].mT / WIDTH**0.5).masked_fill_(far, 0)
        torch.matmul(F.gelu(scores, approximate="tanh"), v[row], out=out[row])
    return out


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2)


def _padded_product(s: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.rms_norm(s, s.shape[-1:], eps=EPS), weight)


def _padded_block(s: Tensor, k: Tensor, v: Tensor) -> Tensor:
    normal = F.layer_norm(s, s.shape[-1:], eps=EPS)
    q = F.rms_norm(normal.view(*normal.shape[:2], HEADS, WIDTH), (WIDTH,), eps=EPS).transpose(1, 2)
    read = _padded_gdpa(q, k, v).transpose(1, 2).flatten(2)
    return F.rms_norm(read + normal, s.shape[-1:], eps=EPS) + s


def _and_back(out: Tensor, given: list[Tensor]) -> Tensor:
    return torch.autograd.grad(out.sum(), given)[0]


if __name__ == "__main__":
    main()
