"""Log lines of a service: time (UTC), level, silo, run and round, as text or as JSON objects.

The environment variable FEDPRIV_LOG chooses: `text`, which is the default, or `json`.  A record has its silo, run
and round from `facts`.
"""

import json
import logging
import os
import sys
import time
from typing import Any

from fedpriv.core.errors import InputError

FORMAT = "FEDPRIV_LOG"
_FACTS = ("silo", "run", "round")


def facts(run: str | None = None, t: int | None = None) -> dict[str, Any]:
    """Give a record the run and the round that it is about: the argument `extra` of a logger's methods."""
    return {key: value for key, value in (("run", run), ("round", t)) if value is not None}


class _Line(logging.Formatter):
    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        about = {key: getattr(record, key) for key in _FACTS if hasattr(record, key)}
        message = super().format(record)
        if self._as_json:
            level = record.levelname.lower()
            return json.dumps({"time": moment, "level": level, **about, "message": message}, ensure_ascii=False)
        words = "".join(f" {key}={value}" for key, value in about.items())
        return f"{moment} {record.levelname}{words} {message}"


def log_as_service(**always: int) -> None:
    """Write log lines to stderr, each with what is `always` the same; InputError for an unknown format."""
    chosen = os.environ.get(FORMAT, "text")
    if chosen not in ("text", "json"):
        raise InputError(f"{FORMAT}={chosen!r}: expected text or json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line(as_json=chosen == "json"))

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
