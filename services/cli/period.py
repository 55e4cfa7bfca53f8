"""Says which stretch of a log a command works on, from what a person wrote.

Knows instants and time zones. Does not know logs.
"""

from __future__ import annotations

from dataclasses import dataclass

from feature_store.errors import InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Period:
    """From `since`, included, until `until`, not included; days begin where the zone says. None: as far as the log reaches."""

    since: str | None = None
    until: str | None = None
    zone: str = "UTC"

    def bounds(self, first_ms: int, end_ms: int) -> tuple[int, int]:
        """First millisecond and the one after the last; those given stand in for what was not written.

        Raises:
            InvalidInput: one cannot be read, or nothing lies between them.
        """
        from feature_store.splits import instant

        begin = instant(self.since, zone=self.zone) if self.since else first_ms
        end = instant(self.until, zone=self.zone) if self.until else end_ms
        if begin >= end:
            raise InvalidInput(
                f"nothing lies from {self.since or begin} until {self.until or end}; what can be used begins at {first_ms} "
                f"and ends before {end_ms}: give another --since or --until"
            )
        return begin, end
