"""Log lines of a service: time (UTC), level, event, silo, run and round, as text or as JSON objects.

The environment variable FEDPRIV_LOG chooses: `text`, which is the default, or `json`.  A record has its event, run
and round from `facts`.

Guarantee: a stranger's words make no line and no fact of their own.  In text a record's first line alone begins
with a time, and facts with other characters than those of names are quoted.
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
_MAX_LENGTH = 2000  # characters of a line
_LOG_FIELDS = ("event", "silo", "run", "round")
_PLAIN_VALUE = re.compile(r"[\w.:/-]+", re.ASCII)


def log_fields(run: str | None = None, t: int | None = None, event: str | None = None) -> dict[str, Any]:
    """Give a record its event, and the run and the round that it is about: the argument `extra` of a logger."""
    given = {"event": event, "run": run, "round": t}
    return {key: value for key, value in given.items() if value is not None}


class _LineFormatter(logging.Formatter):
    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        about = {key: getattr(record, key) for key in _LOG_FIELDS if hasattr(record, key)}
        message = super().format(record)
        if self._as_json:
            own = {"time": moment, "level": record.levelname.lower()}
            return json.dumps({**own, **about, "message": message})
        words = "".join(f" {key}={_quote_value(value)}" for key, value in about.items())
        lines = "\n  | ".join(sanitize_line(line, _MAX_LENGTH) for line in message.splitlines())
        return f"{moment} {record.levelname}{words} {lines}"


def _quote_value(value: object) -> str:
    text = str(value)
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text)


def configure_service_logging(**always: int) -> None:
    """Write log lines to stderr, each with what is `always` the same; InputError for an unknown format."""
    chosen = os.environ.get(FORMAT_VARIABLE, "text")
    if chosen not in ("text", "json"):
        raise InputError(f"{FORMAT_VARIABLE}={chosen!r}: expected text or json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(as_json=chosen == "json"))

    def add(record: logging.LogRecord) -> bool:
        for key, value in always.items():
            if not hasattr(record, key):
                setattr(record, key, value)
        return True

    handler.addFilter(add)
    log = logging.getLogger("fedpriv")
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
