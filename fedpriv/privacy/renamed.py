"""What keys of releases were called in earlier versions: read here, and never written."""

from collections.abc import Mapping
from typing import Any

RENAMED = {"keep": "decay", "places": "rounds_per_epoch"}
"""The name of fedpriv 0.1 -> today's."""


def current(value: Any) -> Any:
    """Plain data with today's keys, at every depth."""
    if isinstance(value, Mapping):
        return {RENAMED.get(key, key): current(entry) for key, entry in value.items()}
    return [current(entry) for entry in value] if isinstance(value, list) else value
