"""Decides who is served by what, and in which order: pure functions of the route table and of numbers.

Knows surfaces, arms, probabilities and bids. Does not know models, peers or time.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from gem.router.v1 import route_table_pb2 as wire

from feature_store.errors import InvalidInput

BUCKETS = 10_000
DEFAULT_SPECULATION_TOP = 64

Floats = npt.NDArray[np.float64]
Chains = Mapping[str, tuple[str, ...]]
"""Objective → itself and its parents: the events whose probabilities multiply to the chance that it happens."""


class Route(NamedTuple):
    """How one user's request is served."""

    bucket: int
    arm: wire.Arm
    fallback: wire.Arm | None
    """The surface's first served arm, if it is another: it answers when `arm`'s model cannot."""
    shadows: tuple[wire.Arm, ...]


class Ranking(NamedTuple):
    """Candidates put in order."""

    order: npt.NDArray[np.int64]
    """[N] candidate indices, best first."""
    values: Floats
    """[N]"""
    fallback: npt.NDArray[np.bool_]
    """[N] the model gave no usable probability; the value is below every other."""


def choose(routes: wire.SurfaceRoutes, user_key: int) -> Route:
    """The arm a user is in: the same at every request, for as long as salt and weights stay.

    Arms take buckets in the table's order, so raising the last arm's weight at the expense of the one before it moves
    only those users.
    """
    bucket = bucket_of(user_key, salt=routes.salt)
    served = [arm for arm in routes.arms if not arm.shadow]
    bound, chosen = 0, served[-1]
    for arm in served:
        bound += arm.weight
        if bucket < bound:
            chosen = arm
            break
    fallback = served[0] if served[0].name != chosen.name else None
    return Route(bucket, chosen, fallback, tuple(arm for arm in routes.arms if arm.shadow))


def bucket_of(user_key: int, *, salt: str) -> int:
    """One of 10 000 buckets; different salts are independent layers."""
    return xxhash.xxh64_intdigest(salt.encode() + struct.pack("<q", user_key)) % BUCKETS


def chains(parents: Mapping[str, str]) -> Chains:
    """The chain of each objective, from objective → parent ("" for none)."""
    found: dict[str, tuple[str, ...]] = {}
    for name in parents:
        chain, above = [name], parents[name]
        while above and above not in chain:
            chain.append(above)
            above = parents[above]
        found[name] = tuple(chain)
    return found


def rank(
    probabilities: Mapping[str, npt.NDArray[np.float32]],
    *,
    ad_ids: Sequence[str],
    bids: Floats,
    weights: Mapping[str, float],
    chains: Chains,
) -> Ranking:
    """Candidates by value: Σ over weighted objectives of weight · P(objective and its parents) · bid.

    A candidate whose probability of any needed objective is not a number in [0, 1] gets the fallback value, the least of
    0 and every usable value, and comes last. Equal values are ordered by ad id.

    Args:
        probabilities: objective → [N]; a post-click objective's is conditional on its parent.
        ad_ids: N ids.
        bids: [N]
        weights: objective → weight.
        chains: see `chains`.
    """
    values = np.zeros(len(ad_ids), dtype=np.float64)
    usable = np.ones(len(ad_ids), dtype=np.bool_)
    for name in sorted(weights):
        joint = np.ones(len(ad_ids), dtype=np.float64)
        for link in chains[name]:
            p = probabilities[link]
            usable &= (p >= 0) & (p <= 1)  # NaN compares false
            joint *= np.where(usable, p, 0.0)
        values += weights[name] * joint * bids
    values[~usable] = min(0.0, float(values[usable].min(initial=0.0)))
    return Ranking(_order(values, usable, ad_ids), values, ~usable)


def _order(
    values: Floats, usable: npt.NDArray[np.bool_], ad_ids: Sequence[str]
) -> npt.NDArray[np.int64]:
    """Indices: usable ones first, by value from the largest, equals by ad id."""
    order = np.lexsort((-values, ~usable))
    value, good = values[order], usable[order]
    if not ((value[1:] == value[:-1]) & (good[1:] == good[:-1])).any():
        return order
    # Python's own comparison of ids: NumPy's ignores trailing NULs, which an id may have.
    keys = list(zip((~usable).tolist(), (-values).tolist(), ad_ids, strict=True))
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def bids_of(ad_ids: Sequence[str], bids: Sequence[float]) -> Floats:
    """[N] bids of N ads; 0 means 1.

    Raises:
        InvalidInput: a bid is negative or not finite.
    """
    found = np.array(bids, dtype=np.float64)
    for index in np.flatnonzero(~(np.isfinite(found) & (found >= 0)))[:1].tolist():
        raise InvalidInput(
            f"bid of ad {ad_ids[index]!r} is {bids[index]}; send a finite number, 0 for none"
        )
    return np.where(found == 0, 1.0, found)


def problems_of(
    table: wire.RouteTable, *, surfaces: Sequence[str], objectives: Sequence[str]
) -> Iterator[str]:
    """What keeps a route table from being served, one sentence each."""
    if not table.surfaces:
        yield "surfaces: is empty; route at least one"
    for name, routes in sorted(table.surfaces.items()):
        if name not in surfaces:
            yield f"surfaces.{name}: no such surface; the spec has {', '.join(surfaces)}"
        for problem in _surface_problems(routes, objectives):
            yield f"surfaces.{name}: {problem}"


def _surface_problems(routes: wire.SurfaceRoutes, objectives: Sequence[str]) -> list[str]:
    names = [arm.name for arm in routes.arms]
    total = sum(arm.weight for arm in routes.arms if not arm.shadow)
    problems = [
        f"arm {name!r} is there twice" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    if total != BUCKETS:
        problems.append(f"weights of served arms add up to {total}; they must add up to {BUCKETS}")
    if not routes.value_weights:
        problems.append("value_weights is empty; weigh at least one objective")
    for objective, weight in sorted(routes.value_weights.items()):
        if objective not in objectives:
            problems.append(f"no objective {objective!r}; the spec has {', '.join(objectives)}")
        if not math.isfinite(weight):
            problems.append(f"weight of {objective!r} is {weight}; it must be finite")
    if routes.speculation_top < 0:
        problems.append(f"speculation_top is {routes.speculation_top}; it must not be negative")
    return problems + [problem for arm in routes.arms for problem in _arm_problems(arm)]


def _arm_problems(arm: wire.Arm) -> list[str]:
    problems = []
    if not arm.name or not arm.model:
        problems.append(f"arm {arm.name!r} of model {arm.model!r} needs a name and a model")
    if arm.weight < 0 or (arm.shadow and arm.weight):
        problems.append(f"arm {arm.name!r} has weight {arm.weight}; a shadow arm has 0, others ≥ 0")
    for channel, on, space in (
        ("loopfm", arm.loopfm, arm.loopfm_space_id),
        ("solaris", arm.solaris, arm.solaris_space_id),
    ):
        if on and space_bytes(space) is None:
            problems.append(
                f"arm {arm.name!r} has {channel}_space_id {space!r}; write 8 bytes as 16 hex digits"
            )
    if arm.loopfm and (arm.loopfm_dim < 2 or arm.loopfm_dim % 2):
        problems.append(
            f"arm {arm.name!r} has loopfm_dim {arm.loopfm_dim}; it must be even, from 2"
        )
    if arm.solaris and arm.solaris_dim < 1:
        problems.append(
            f"arm {arm.name!r} has solaris_dim {arm.solaris_dim}; it must be at least 1"
        )
    return problems


def space_bytes(text: str) -> bytes | None:
    """The 8 bytes that 16 hex digits stand for; None if they do not."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return None
    return raw if len(raw) == 8 else None
