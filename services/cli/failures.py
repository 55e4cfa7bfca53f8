"""Says why a command failed: a line for people on stderr, one JSON object on stdout for machines that asked for it.

Knows errors and exit codes. Does not know what the command was about.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from feature_store.errors import GemError
from services.cli.console import as_json_line

DONE, REFUSED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: it is done, the platform refused, the command line is wrong, a person pressed Ctrl-C."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a command did not do what it should; `code` is the name of a gRPC status, `reason` is stable."""

    exit_code: int
    code: str
    reason: str
    message: str

    def as_dict(self) -> dict[str, dict[str, str]]:
        """For machines: one key, `error`, that no result has."""
        return {"error": {"code": self.code, "reason": self.reason, "message": self.message}}


def guarded(command: Callable[[], object], *, as_json: bool) -> int:
    """Runs a command; returns its exit code, and says why if that is not 0."""
    failure = _failure_of(command)
    if failure is None:
        return DONE
    if failure.exit_code == REFUSED:
        sys.stderr.write(f"gemctl: {failure.message}\n")
    if as_json:
        sys.stdout.write(as_json_line(failure.as_dict()))
    return failure.exit_code


def _failure_of(command: Callable[[], object]) -> Failure | None:
    try:
        command()
    except SystemExit as done:  # the parser of options has spoken on stderr already
        return _of_exit(done)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except GemError as error:
        return Failure(exit_code=REFUSED, code=error.code, reason=error.reason, message=str(error))
    except OSError as error:
        return _of_system(error)
    return None


_INTERRUPTED = Failure(exit_code=INTERRUPTED, code="CANCELLED", reason="INTERRUPTED", message="interrupted; run it again")


def _of_exit(done: SystemExit) -> Failure | None:
    if not done.code:
        return None
    if done.code == INTERRUPTED:
        return _INTERRUPTED
    if done.code != USAGE:  # nobody reads stdout any more
        raise done
    spell = getattr(done.__context__, "format_message", None)
    said = spell() if spell else "a command is missing"
    return Failure(exit_code=USAGE, code="INVALID_ARGUMENT", reason="USAGE", message=f"{said}; add --help for the usage")


def _of_system(error: OSError) -> Failure:
    """What the operating system refuses: a missing or unreadable file, a full disk."""
    what = error.filename or "the system"
    code = "NOT_FOUND" if isinstance(error, FileNotFoundError) else "FAILED_PRECONDITION"
    message = f"{what}: {error.strerror or error}; check that it exists, is readable and writable, and that the disk has room"
    return Failure(exit_code=REFUSED, code=code, reason=type(error).__name__, message=message)
