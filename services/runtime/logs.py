"""Writes log records as JSON lines that carry the trace they belong to.

Knows records and the current span. Does not know what is logged.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from services.runtime import telemetry


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and trace and traceback if there are any."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of one record."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace_id := telemetry.trace_id():
            fields["trace_id"] = trace_id
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def log_to_stderr(level: str) -> None:
    """Send the process's log to standard error; the first call of a process decides."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
