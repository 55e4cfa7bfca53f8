"""The errors of the platform: one tree, each bound to a gRPC status name and a stable reason.

Knows what can be refused and why. Does not know transports: `services.runtime.errors` translates at the edge.

    GemError
    ├── InvalidInput            INVALID_ARGUMENT     fix the input
    │   ├── UnknownSurface      INVALID_ARGUMENT     use one of the spec's surfaces
    │   └── TooManyRejects      INVALID_ARGUMENT     fix the source, or allow a larger share
    ├── NotFound                NOT_FOUND            fall back
    ├── FailedPrecondition      FAILED_PRECONDITION  reload, do not retry
    ├── CorruptArtefact         FAILED_PRECONDITION  publish it again
    ├── Aborted                 ABORTED              retry the whole read-modify-write
    ├── ResourceExhausted       RESOURCE_EXHAUSTED   send less, or back off
    ├── NotReady                UNAVAILABLE          retry with back-off
    ├── DeadlineExceeded        DEADLINE_EXCEEDED    degrade
    └── Unimplemented           UNIMPLEMENTED        call something else
"""

from __future__ import annotations


class GemError(Exception):
    """What the platform refuses; every variable of the message may also sit in `metadata`, as text."""

    code = "INTERNAL"
    reason = "INTERNAL"

    def __init__(self, message: str = "", **metadata: object) -> None:
        super().__init__(message)
        self.metadata: dict[str, str] = {name: str(value) for name, value in metadata.items()}


class InvalidInput(GemError, ValueError):
    """The input can never be accepted as it is."""

    code, reason = "INVALID_ARGUMENT", "INVALID_INPUT"


class UnknownSurface(InvalidInput):
    """The surface is not in the spec."""

    reason = "UNKNOWN_SURFACE"


class TooManyRejects(InvalidInput):
    """More rows of an import were refused than its limit allows."""

    reason = "TOO_MANY_REJECTS"


class NotFound(GemError):
    """There is no such thing."""

    code, reason = "NOT_FOUND", "NOT_FOUND"


class FailedPrecondition(GemError):
    """Two parts were made for different specs or coordinate systems."""

    code, reason = "FAILED_PRECONDITION", "FAILED_PRECONDITION"


class CorruptArtefact(FailedPrecondition):
    """Stored bytes are not what was written."""

    reason = "CORRUPT_ARTEFACT"


class Aborted(GemError):
    """Another writer was first."""

    code, reason = "ABORTED", "ABORTED"


class ResourceExhausted(GemError):
    """A limit was exceeded; the message names it."""

    code, reason = "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"


class NotReady(GemError):
    """It cannot be answered yet; the same call may succeed later."""

    code, reason = "UNAVAILABLE", "NOT_READY"


class DeadlineExceeded(GemError):
    """Time is up."""

    code, reason = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"


class Unimplemented(GemError):
    """The operation does not exist here."""

    code, reason = "UNIMPLEMENTED", "UNIMPLEMENTED"
