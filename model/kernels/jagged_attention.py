"""Softmax attention of dense queries over jagged keys: seeds that pool a sequence, candidates that read a history.

Knows heads and lengths. Does not know what queries stand for, nor what a bias of keys says: how old or of what kind they are.
A sequence without keys gives zeros.

On a CPU, and wherever names are compared: buckets of similar length as dense products. Else on an NVIDIA GPU:
`model.kernels.jagged_tiles`.

R sequences, Q queries a sequence (or once for all: broadcast), N queries packed, T keys packed, H heads, d width of a head,
C columns of names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels import jagged_tiles as jagged_tiles  # registers torch.ops.gem.jagged_attention
from model.kernels.gpu import alike, on_gpu
from model.nn.jagged import Jagged, gather, pad, scatter


def jagged_attention(
    q_RQHd: Tensor, k_THd: Tensor, v_THd: Tensor, layout: Jagged, bias_TH: Tensor | None = None
) -> Tensor:
    """[R, Q, H, d]; `q_RQHd` may have one row, which every sequence shares.

    Args:
        q_RQHd: queries.
        k_THd: keys.
        v_THd: values.
        layout: index maps of keys and values.
        bias_TH: finite numbers added to a key's scores of each head, whatever the query; it learns, too.
    """
    if on_gpu(q_RQHd, k_THd, v_THd):
        bias = None if bias_TH is None else bias_TH.float().contiguous()
        out: Tensor = torch.ops.gem.jagged_attention(*alike(q_RQHd, k_THd, v_THd), layout.offsets, bias)[0]
        return out
    biases = [None] * len(layout.buckets) if bias_TH is None else pad(bias_TH, layout)
    return _by_buckets(q_RQHd, k_THd, v_THd, layout, [None if bias is None else bias.transpose(1, 2)[:, :, None] for bias in biases])


def _by_buckets(q_RQHd: Tensor, k_THd: Tensor, v_THd: Tensor, layout: Jagged, biases: Sequence[Tensor | None]) -> Tensor:
    """Of each bucket there is what is added to its scores [r, H, Q or 1, L], or nothing."""
    shared, reads = len(q_RQHd) == 1, []
    if not layout.buckets:
        return q_RQHd.new_zeros(layout.num_sequences, *q_RQHd.shape[1:])
    for k, v, bias, bucket in zip(pad(k_THd, layout), pad(v_THd, layout), biases, layout.buckets, strict=True):
        rows = len(bucket.rows)
        q = q_RQHd.expand(rows, -1, -1, -1) if shared else q_RQHd.index_select(0, bucket.rows)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = bucket.valid[:, None, None, :] if rows > 1 else None  # a sequence alone fills its bucket
        if bias is not None:
            bias = bias.to(q.dtype).contiguous()  # the product reads it anew for every query
            mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        reads.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2))
    order = torch.cat([bucket.rows for bucket in layout.buckets])
    return scatter(torch.cat(reads), order, layout.num_sequences)


class Names(NamedTuple):
    """What queries and keys are called, in columns: a key that has a query's name is read more."""

    query_NC: Tensor
    """int64"""
    key_TC: Tensor
    none: int
    """Who is called this has no name, and is nobody's namesake."""
    score_HC: Tensor
    """Added to a head's score of a namesake in a column; it learns."""


def candidate_attention(
    q_NHd: Tensor, k_THd: Tensor, v_THd: Tensor, layout: Jagged, request_N: Tensor, names: Names | None = None
) -> Tensor:
    """[N, H, d]: each candidate's attention over the tokens of its request; candidates lie grouped by request."""
    counts = torch.bincount(request_N, minlength=layout.num_sequences)
    if not len(request_N):
        return q_NHd
    most = int(counts.max())
    place = torch.arange(len(request_N), device=request_N.device) - (counts.cumsum(0) - counts)[request_N]
    place = request_N * most + place

    def by_request(values: Tensor) -> Tensor:
        return scatter(values, place, layout.num_sequences * most).unflatten(0, (-1, most))

    queries = by_request(q_NHd)
    if names is None or not names.score_HC.shape[1]:
        read = jagged_attention(queries, k_THd, v_THd, layout)
    else:
        read = _by_buckets(queries, k_THd, v_THd, layout, _namesakes(by_request(names.query_NC), names, layout))
    return gather(read.flatten(0, 1), place)


def _namesakes(query_RQC: Tensor, names: Names, layout: Jagged) -> list[Tensor]:
    """What is added to the scores [r, H, Q, L] of every bucket."""
    scores = []
    for key_rLC, bucket in zip(pad(names.key_TC, layout), layout.buckets, strict=True):
        query_rCQ = query_RQC.index_select(0, bucket.rows).transpose(1, 2)
        pairs, nameless = (*query_rCQ.shape, key_rLC.shape[1]), query_rCQ == names.none
        same = torch.eq(query_rCQ[..., None], key_rLC.transpose(1, 2)[:, :, None], out=names.score_HC.new_empty(pairs))
        if nameless.any():
            same.masked_fill_(nameless[..., None], 0)
        scores.append((names.score_HC @ same.flatten(2)).unflatten(2, pairs[2:]))
    return scores


def jagged_attention_reference(
    q_RQHd: Tensor, k_THd: Tensor, v_THd: Tensor, layout: Jagged, bias_TH: Tensor | None = None
) -> Tensor:
    """The definition, a sequence at a time."""
    out = []
    for row in range(layout.num_sequences):
        part = slice(int(layout.offsets[row]), int(layout.offsets[row + 1]))
        q, k, v = q_RQHd[min(row, len(q_RQHd) - 1)], k_THd[part], v_THd[part]
        if not len(k):
            out.append(torch.zeros_like(q))
            continue
        scores = torch.einsum("qhd,thd->hqt", q, k) / q.shape[-1] ** 0.5
        scores = scores if bias_TH is None else scores + bias_TH[part].T[:, None]
        out.append(torch.einsum("hqt,thd->qhd", scores.softmax(-1), v))
    return torch.stack(out) if out else q_RQHd.new_zeros(0, *q_RQHd.shape[1:])


def candidate_attention_reference(
    q_NHd: Tensor, k_THd: Tensor, v_THd: Tensor, layout: Jagged, request_N: Tensor, names: Names | None = None
) -> Tensor:
    """The definition, a candidate and a column at a time."""
    out = [q_NHd[:0]]
    for n, row in enumerate(request_N.tolist()):
        part = slice(int(layout.offsets[row]), int(layout.offsets[row + 1]))
        scores = torch.einsum("hd,thd->ht", q_NHd[n], k_THd[part]) / q_NHd.shape[-1] ** 0.5
        for column in range(0 if names is None else names.score_HC.shape[1]):
            assert names is not None
            called, own = names.key_TC[part, column], names.query_NC[n, column]
            scores = scores + names.score_HC[:, column, None] * ((called == own) & (own != names.none))
        read = torch.einsum("ht,thd->hd", scores.softmax(-1), v_THd[part])
        out.append((read if len(k_THd[part]) else torch.zeros_like(q_NHd[n]))[None])
    return torch.cat(out)


def jagged_attention_flops(num_keys: int, num_queries: int, width: int) -> int:
    """Forward FLOPs of the two products over actual lengths, `width` = H · d, `num_queries` a sequence."""
    return 4 * num_keys * num_queries * width
