"""Generalized dot-product attention: act(α · Q Kᵀ) · β · V with no softmax, jagged queries over dense short keys.

Knows heads and layouts. Does not know what conditions what. It is Kunlun's PFFN when K and V come from a context:
the keys are the hidden units of a per-example two-layer network.

T queries packed over R sequences, M keys a sequence, H heads, d width of a head. A part is one sequence, or a bucket of
similar ones padded to the longest; its B = sequences · H products of L queries are one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.kernels import gdpa_tiles as gdpa_tiles  # registers torch.ops.gem.gdpa
from model.kernels.activations import ACTIVATIONS, activated, inner_scale, per_head, runs
from model.kernels.gpu import alike, on_gpu
from model.nn.jagged import Jagged, pad, unpad

LONG = 128
"""Mean tokens of a sequence from which a part a sequence costs less on a CPU than the copies that padding takes."""


def gdpa(
    q_THd: Tensor,
    k_RMHd: Tensor,
    v_RMHd: Tensor,
    layout: Jagged,
    *,
    activation: str | Sequence[str] = "gelu",
    alpha: float | None = None,
    beta: float = 1.0,
) -> Tensor:
    """[T, H, d]; few large products, with a backward of their own.

    Args:
        q_THd: queries of all sequences, packed.
        k_RMHd: keys of each sequence.
        v_RMHd: values of each sequence.
        layout: index maps of the queries.
        activation: one of ACTIVATIONS, or one a head.
        alpha: scale inside the activation; 1/√d if None. Kunlun's text divides by τ here, Meta's kernel after it.
        beta: scale after it.

    Raises:
        ValueError: an activation is unknown, there are neither one nor H of them, or a score is beyond a polynomial's bound.
    """
    names = per_head(activation, q_THd.shape[1])
    if not len(q_THd):
        return q_THd
    scale, given = inner_scale(alpha, q_THd.shape[-1]), alike(q_THd, k_RMHd, v_RMHd)
    if on_gpu(*given):
        read: Tensor = torch.ops.gem.gdpa(*given, layout.offsets, ",".join(names), scale, beta)
        return read
    out: Tensor = _Gdpa.apply(*given, layout, names, scale, beta)
    return out


class Kept(NamedTuple):
    """What the gradient of `products` needs."""

    scores: Tensor
    """[B, M, L] of all parts, one after the other."""
    hidden: Tensor
    """act(scores)"""
    queries: tuple[Tensor, ...]
    """[B, L, d] a part."""
    keys: tuple[Tensor, ...]
    """α · K [B, M, d] a part."""
    values: tuple[Tensor, ...]
    """β · V [B, M, d] a part."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, for a context to save."""
        return (self.scores, self.hidden, *self.queries, *self.keys, *self.values)

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Kept:
        """What `tensors` gave."""
        scores, hidden, *parts = tensors
        third = len(parts) // 3
        return Kept(scores, hidden, *(tuple(parts[at : at + third]) for at in (0, third, 2 * third)))


def products(
    q_THd: Tensor, k_RMHd: Tensor, v_RMHd: Tensor, layout: Jagged, *, names: tuple[str, ...], alpha: float, beta: float
) -> tuple[Tensor, Kept]:
    """`gdpa` [T, H, d] without a graph, T > 0, and what `products_backward` needs."""
    # Keys are few: cheaper to scale than the scores and the sums.
    k, v = (_sequences(x * scale, layout) for x, scale in ((k_RMHd, alpha), (v_RMHd, beta)))
    queries = _queries(q_THd, layout)
    scores, parts = _scores(queries, k)
    hidden = _by_head(lambda name, x: ACTIVATIONS[name].value(x), names, parts, scores)
    return _back(_like(hidden, parts), v, q_THd, layout), Kept(scores, hidden, queries, k, v)


def products_backward(
    gradient_THd: Tensor, kept: Kept, layout: Jagged, *, names: tuple[str, ...], alpha: float, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: dP = dO Vᵀ, dV = Pᵀ dO, dS = dP ⊙ act′(S), dQ = dS K, dK = dSᵀ Q."""
    upstream, heads = _queries(gradient_THd, layout), gradient_THd.shape[1]
    gradient, parts = _scores(upstream, kept.values)
    values = [torch.bmm(part, up) for part, up in zip(_like(kept.hidden, parts), upstream, strict=True)]
    slopes = _by_head(lambda name, g, x: ACTIVATIONS[name].slope(g, x), names, parts, gradient, kept.scores)
    parts = _like(slopes, parts)
    keys = [torch.bmm(part, q) for part, q in zip(parts, kept.queries, strict=True)]
    queries = _back(parts, kept.keys, gradient_THd, layout)
    return queries, _dense(keys, layout, heads).mul_(alpha), _dense(values, layout, heads).mul_(beta)


class _Gdpa(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Jagged, names: tuple[str, ...], alpha: float, beta: float
    ) -> Tensor:
        ctx.layout, ctx.options = layout, {"names": names, "alpha": alpha, "beta": beta}
        out, kept = products(q, k, v, layout, **ctx.options)
        ctx.save_for_backward(*kept.tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept = Kept.of(ctx.saved_tensors)
        return *products_backward(gradient, kept, ctx.layout, **ctx.options), None, None, None, None


def _alone(layout: Jagged) -> bool:
    """Whether every sequence is a part of its own."""
    tokens, sequences = len(layout.sequence), layout.num_sequences
    return layout.offsets.device.type == "cpu" and len(layout.buckets) > 1 and tokens >= LONG * sequences


def _queries(x_THd: Tensor, layout: Jagged) -> tuple[Tensor, ...]:
    """Parts [B, L, d] of tokens."""
    if _alone(layout):
        return x_THd.transpose(0, 1).split(layout.lengths.tolist(), dim=1)
    return tuple(part.transpose(1, 2).flatten(0, 1) for part in pad(x_THd, layout))


def _back(parts: Sequence[Tensor], sequences: Sequence[Tensor], like_THd: Tensor, layout: Jagged) -> Tensor:
    """Tokens [T, H, d] of Pᵀ V, for parts P [B, M, L] and V [B, M, d]."""
    pairs = zip(parts, sequences, strict=True)
    if not _alone(layout):
        made = (torch.bmm(part.transpose(1, 2), each) for part, each in pairs)
        return unpad([each.unflatten(0, (-1, like_THd.shape[1])).transpose(1, 2) for each in made], layout)
    out = torch.empty_like(like_THd, memory_format=torch.contiguous_format)
    for (part, each), place in zip(pairs, _queries(out, layout), strict=True):
        torch.bmm(part.transpose(1, 2), each, out=place)
    return out


def _sequences(x_RMHd: Tensor, layout: Jagged) -> tuple[Tensor, ...]:
    """Parts [B, M, d] of what every sequence has."""
    if _alone(layout):
        return x_RMHd.transpose(1, 2).unbind(0)
    return tuple(x_RMHd.index_select(0, b.rows).transpose(1, 2).flatten(0, 1) for b in layout.buckets)


def _dense(parts: Sequence[Tensor], layout: Jagged, heads: int) -> Tensor:
    """[R, M, H, d] of parts; zeros for a sequence without tokens."""
    if _alone(layout):
        return torch.stack(list(parts)).transpose(1, 2)
    out = parts[0].new_zeros(layout.num_sequences, heads, *parts[0].shape[1:])
    for part, bucket in zip(parts, layout.buckets, strict=True):
        out.index_copy_(0, bucket.rows, part.unflatten(0, (-1, heads)))
    return out.transpose(1, 2)


def _scores(queries: Sequence[Tensor], keys: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """(K Qᵀ of all parts one after the other, each as [B, M, L]): long rows, where M may be fewer than a vector register."""
    shapes = [(len(q), k.shape[1], q.shape[1]) for q, k in zip(queries, keys, strict=True)]
    sizes = [math.prod(shape) for shape in shapes]
    flat = queries[0].new_empty(sum(sizes))
    parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
    for q, k, part in zip(queries, keys, parts, strict=True):
        torch.bmm(k, q.transpose(1, 2), out=part)
    return flat, parts


def _like(flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _by_head(function: Callable[..., Tensor], names: Sequence[str], parts: Sequence[Tensor], *flats: Tensor) -> Tensor:
    """What `function` of a head's activation makes of its share of every part."""
    if len(set(names)) == 1:
        return function(names[0], *flats)
    out = torch.empty_like(flats[0])
    for pieces in zip(*(_like(flat, parts) for flat in (out, *flats)), strict=True):
        made, *given = (piece.unflatten(0, (-1, len(names))) for piece in pieces)
        for name, first, count in runs(names):
            share = slice(first, first + count)
            made[:, share] = function(name, *(x[:, share] for x in given))
    return out


def gdpa_reference(
    q_THd: Tensor,
    k_RMHd: Tensor,
    v_RMHd: Tensor,
    layout: Jagged,
    *,
    activation: str | Sequence[str] = "gelu",
    alpha: float | None = None,
    beta: float = 1.0,
) -> Tensor:
    """The definition, a sequence at a time."""
    names = per_head(activation, q_THd.shape[1])
    scale = inner_scale(alpha, q_THd.shape[-1])
    out = [q_THd[:0]]
    for row in range(layout.num_sequences):
        q = q_THd[layout.offsets[row] : layout.offsets[row + 1]]
        scores = scale * torch.einsum("thd,mhd->htm", q, k_RMHd[row])
        out.append(beta * torch.einsum("htm,mhd->thd", activated(scores, names, axis=0), v_RMHd[row]))
    return torch.cat(out)


def gdpa_flops(num_queries: int, num_keys: int, width: int) -> int:
    """Forward FLOPs of two products over actual lengths, `width` = H · d."""
    return 4 * num_queries * num_keys * width
