"""Log lines of a service: time (UTC), level, event, silo, run and round, as text or as JSON objects.

The environment variable FEDPRIV_LOG selects `text`, which is the default, or `json`.  Event, silo, run and round
are in a line if they are known.

Guarantee: text of another party in a field or a message begins no log record and ends no field.  In text format
only the first line of a record begins with a time, and the value of a field with other characters than letters,
digits and _ . : / - is quoted.
"""

import json
import logging
import os
import re
import sys
import time
from typing import Any

from fedpriv.core.errors import InputError, sanitize_line

FORMAT_VARIABLE = "FEDPRIV_LOG"
_MAX_LENGTH = 2000  # characters of a message's line that are kept
_LOG_FIELDS = ("event", "silo", "run", "round")
_PLAIN_VALUE = re.compile(r"[\w.:/-]+", re.ASCII)


def log_fields(run: str | None = None, t: int | None = None, event: str | None = None) -> dict[str, Any]:
    """Return a log record's event, run and round as the argument `extra` of a logger."""
    return {key: value for key, value in (("event", event), ("run", run), ("round", t)) if value is not None}


class _LineFormatter(logging.Formatter):
    """Formatter of a log record as one JSON object, or as text with fields before the message."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Format a record with its UTC time, its level and those of event, silo, run and round that it has.

        In text format each line of the message, such as of a traceback, is cut to 2,000 characters and sanitized,
        and lines behind the first are indented.
        """
        time_text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        fields = {key: getattr(record, key) for key in _LOG_FIELDS if hasattr(record, key)}
        message = super().format(record)
        if self._as_json:
            return json.dumps({"time": time_text, "level": record.levelname.lower(), **fields, "message": message})
        field_texts = "".join(f" {key}={_quote_value(value)}" for key, value in fields.items())
        # Only the first line begins with a time, so that a message cannot forge a record.
        lines = "\n  | ".join(sanitize_line(line, _MAX_LENGTH) for line in message.splitlines())
        return f"{time_text} {record.levelname}{field_texts} {lines}"


def _quote_value(value: object) -> str:
    text = str(value)
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text)


def configure_service_logging(**always: int) -> None:
    """Write the log lines of fedpriv from level INFO on to stderr, in the format of FEDPRIV_LOG.

    Args:
        always: Fields of every log record that does not have them itself, such as silo=0.

    Raises:
        InputError: FEDPRIV_LOG is neither `text` nor `json`.
    """
    format_name = os.environ.get(FORMAT_VARIABLE, "text")
    if format_name not in ("text", "json"):
        raise InputError(f"{FORMAT_VARIABLE}={format_name!r}: expected text or json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(as_json=format_name == "json"))

    # A filter runs before the handler formats a record, and may add fields to it.
    def add(log_record: logging.LogRecord) -> bool:
        for key, value in always.items():
            if not hasattr(log_record, key):
                setattr(log_record, key, value)
        return True

    handler.addFilter(add)
    log = logging.getLogger("fedpriv")
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
