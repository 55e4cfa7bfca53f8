"""Checks a request once, at the edge, and names what the rest of the router needs of it.

Knows the public message and the spec's ids. Does not know routes or peers.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from gem.router.v1.router_service_pb2 import RankRequest

from feature_store.errors import InvalidInput, UnknownSurface
from feature_store.ids import key_of, to_keys
from feature_store.spec import Spec
from services.router import policy
from services.router.policy import Floats
from services.runtime.limits import Limits

LATEST_MS = 253_402_300_800_000
"""Year 10000: a time beyond it was given in another unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A checked request; its lists are parallel."""

    request_id: str
    surface: str
    user_id: str
    user_key: int
    request_ms: int
    ad_ids: tuple[str, ...]
    ad_keys: tuple[int, ...]
    bids: Floats
    context: dict[str, str]
    top_count: int


def checked(
    request: RankRequest, *, spec: Spec, limits: Limits, clock_ms: Callable[[], int]
) -> Asked:
    """The request, or why it can never be answered.

    Raises:
        UnknownSurface: the spec has no such surface.
        ResourceExhausted: more candidates than the limit.
        InvalidInput: an id, a bid, a time or a count is malformed, or an ad is there twice.
    """
    if request.surface not in spec.surfaces:
        raise unknown_surface(request.surface, spec)
    limits.check_id(request.user_id, what="user id")
    ad_ids = tuple(candidate.ad_id for candidate in request.candidates)
    limits.check_candidates(ad_ids)
    if not 0 <= request.request_ms < LATEST_MS:
        raise InvalidInput(f"request_ms is {request.request_ms}; send milliseconds since the epoch")
    if request.top_count < 0:
        raise InvalidInput(f"top_count is {request.top_count}; send 0 for all")
    id_type = spec.id_type("ad")
    ad_keys: tuple[int, ...] = tuple(to_keys(ad_ids, id_type).tolist())
    if len(set(ad_keys)) != len(ad_keys):
        twice = next(ad for ad, key in zip(ad_ids, ad_keys, strict=True) if ad_keys.count(key) > 1)
        raise InvalidInput(f"ad {twice!r} is there in two spellings; send each ad once", ad=twice)
    return Asked(
        request_id=request.request_id or uuid.uuid4().hex,
        surface=request.surface,
        user_id=request.user_id,
        user_key=key_of(request.user_id, spec.id_type("user")),
        request_ms=request.request_ms or clock_ms(),
        ad_ids=ad_ids,
        ad_keys=ad_keys,
        bids=policy.bids_of(ad_ids, [candidate.bid for candidate in request.candidates]),
        context=dict(request.context),
        top_count=request.top_count or len(ad_ids),
    )


def unknown_surface(surface: str, spec: Spec) -> UnknownSurface:
    """The refusal of a surface that the spec does not have."""
    known = ", ".join(spec.surfaces)
    return UnknownSurface(
        f"surface {surface!r} is unknown; use one of: {known}", surface=surface, known=known
    )
