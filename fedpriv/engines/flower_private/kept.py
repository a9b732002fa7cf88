"""Runs that a SuperLink knows of, after it was started again, too.

They are in one file, without a message, a token or an array; messages are in memory only, and so is all that a
trusted server could be asked for.
"""

import json
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedpriv.core.errors import InputError
from fedpriv.core.files import OWN, write_bytes
from fedpriv.engines.flower_private import RESTARTED
from fedpriv.engines.flower_private.control import Status

_MAX_RUNS = 1000
EVERY = 2.0
"""Seconds between two looks at the runs."""


class KeptRuns:
    """The last thousand runs, in a file of mode 0600, if there is one."""

    def __init__(self, path: Path | None) -> None:
        """InputError for a file that cannot be used; runs that were not over in it have ended by now."""
        self._path, self._next = path, 0.0
        self._runs: dict[str, dict[str, Any]] = {}
        if path is None:
            return
        try:
            if path.exists():
                if stat.S_IMODE(path.stat().st_mode) & 0o077:
                    raise InputError(f"--state {path}: others can read it; chmod 600 {path}")
                self._runs = {str(run["run"]): dict(run) for run in json.loads(path.read_text(encoding="utf-8"))}
            elif not os.access(path.parent, os.W_OK):
                raise InputError(f"--state {path}: cannot be written there")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"--state {path}: cannot be used ({error}); move it away to begin another") from None
        for run in self._runs.values():
            if not run.get("finished"):
                run.update(state=f"finished:failed ({RESTARTED})", finished=_now())

    def are_due(self) -> bool:
        """Whether it is time to look at the runs again."""
        if self._path is None or time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + EVERY
        return True

    def keep(self, runs: Iterable[Any]) -> None:
        """Note these runs; a full disk leaves this for another time."""
        before = self.known()
        self._runs |= {str(run.run_id): _as_data(run) for run in runs}
        self._runs = dict(list(self._runs.items())[-_MAX_RUNS:])
        if self._path is not None and (self.known() != before or not self._path.exists()):
            told = [{key: value for key, value in run.items() if key != "details"} for run in self.known()]
            with suppress(OSError):
                write_bytes(self._path, json.dumps(told).encode(), OWN)

    def known(self) -> list[dict[str, Any]]:
        """Runs, the oldest first."""
        return list(self._runs.values())


def _as_data(run: Any) -> dict[str, Any]:
    status = Status.of(run)
    return {
        **{"run": str(run.run_id), "state": status.state, "details": status.details},
        **{"started": run.running_at, "finished": run.finished_at},
        "folder": run.override_config["out"].string if "out" in run.override_config else "",
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
