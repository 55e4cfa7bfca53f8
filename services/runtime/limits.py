"""Says how large one message may be: one table, the same on every hop.

Knows counts and bytes. Does not know who sends what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from feature_store.errors import InvalidInput, ResourceExhausted


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Sizes that every client and server of the platform is built with."""

    max_candidates: int = 10_000
    """Ads of one request."""
    max_message_bytes: int = 64 * 1024 * 1024
    """Bytes of one message, either way; 10 000 candidates of 4 KiB fit."""
    max_history_events: int = 16_384
    """Events of one user's history, of all sources: 4 KiB each fill a message, and an append writes the whole row anew."""
    max_appended_events: int = 10_000
    """Events and outcomes of one append."""
    max_id_bytes: int = 512
    """UTF-8 bytes of one id."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a limit must be at least 1")

    def check_candidates(self, ad_ids: Sequence[str]) -> None:
        """Refuse a candidate list that is too long, names an ad twice or holds an oversized id.

        Raises:
            ResourceExhausted: more ads than `max_candidates`.
            InvalidInput: an ad id is empty, too long, or there twice.
        """
        self.check_count(len(ad_ids), limit=self.max_candidates, what="candidates")
        if len(set(ad_ids)) != len(ad_ids):
            twice = next(ad for ad, count in Counter(ad_ids).items() if count > 1)
            raise InvalidInput(
                f"ad {twice!r} is a candidate more than once; send each ad once", ad=twice
            )
        if ad_ids and not (min(map(len, ad_ids)) > 0 and 4 * max(map(len, ad_ids)) <= self.max_id_bytes):
            for ad_id in ad_ids:
                self.check_id(ad_id, what="ad id")

    def check_count(self, count: int, *, limit: int, what: str) -> None:
        """Refuse more than `limit` of something.

        Raises:
            ResourceExhausted: naming both numbers.
        """
        if count > limit:
            raise ResourceExhausted(
                f"{count} {what} exceed the limit of {limit}; send several requests",
                count=count,
                limit=limit,
            )

    def check_history(self, count: int) -> None:
        """Refuse histories that may hold `count` events, more than `max_history_events`.

        Raises:
            InvalidInput: naming both numbers.
        """
        if count > self.max_history_events:
            raise InvalidInput(
                f"event sources keep {count} events of a user, the limit is {self.max_history_events}; lower their "
                f"max_length in the spec, or raise GEM_MAX_HISTORY_EVENTS",
                count=count,
                limit=self.max_history_events,
            )

    def check_id(self, text: str, *, what: str) -> None:
        """Refuse an empty or oversized id.

        Raises:
            InvalidInput: naming the id's kind and the limit.
        """
        if not text:
            raise InvalidInput(f"{what} is empty; every {what} needs at least one character")
        if len(text) * 4 > self.max_id_bytes and len(text.encode()) > self.max_id_bytes:
            raise InvalidInput(
                f"{what} {text[:32]!r}… is longer than {self.max_id_bytes} bytes; shorten it"
            )
