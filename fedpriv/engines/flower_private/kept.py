"""What a SuperLink has after it was started again: the node ids of its SuperNodes, and the runs of before.

A node's id follows from its name and its key, which lie in files of their owner's, so that a SuperNode that was
left alone is the node that it was.  Runs are kept in one file, without a message, a token or an array; messages
are in memory only, and so is all that a trusted server could be asked for.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.server.superlink.linkstate import LinkState, in_memory_linkstate
from flwr.supercore.run import Run

from fedpriv.core.errors import InputError
from fedpriv.core.files import OWN, write_bytes
from fedpriv.engines.flower_private import RESTARTED

_MOST = 1000
_EVERY = 2.0  # seconds between two looks at the runs


def node_id_of(name: str, public_key: bytes) -> int:
    """The node of this name and key, in this life of the SuperLink and in every other; 64 bits, not 0 or 1."""
    digest = hashlib.sha256(b"fedpriv node\0" + name.encode() + b"\0" + public_key.strip()).digest()
    return max(2, int.from_bytes(digest[:8], "big"))


def create_nodes(state: LinkState, nodes: Mapping[str, bytes]) -> None:
    """Let `state` know SuperNodes by name and public key (PEM).

    Guarantee: only these: a key that is not among the files any more is none of this SuperLink's.
    """
    for name, key in nodes.items():
        own = node_id_of(name, key)
        with mock.patch.object(in_memory_linkstate, "generate_rand_int_from_bytes", return_value=own):
            made = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0, name=name)
        if made != own:
            raise ValueError(f"{name}: node {made}, expected {own}")


def forget_node(state: LinkState, name: str, public_key: bytes) -> None:
    """Let `state` answer no request of the SuperNode with this name and key (PEM) any more.

    Guarantee: whoever has the key is nobody for this SuperLink from now on, and its node is offline for every run.
    """
    with suppress(TypeError):  # what Flower raises for a node that never came, once it is forgotten
        state.delete_node(NOOP_FLWR_AID, node_id_of(name, public_key))
    if state.get_node_id_by_public_key(public_key) is not None:
        raise ValueError(f"{name}: its key is known still")


class KeptRuns:
    """The last thousand runs, in a file of mode 0600, if there is one."""

    def __init__(self, path: Path | None) -> None:
        """InputError for a file that cannot be used; runs that were not over in it have ended by now."""
        self._path, self._looked = path, 0.0
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

    def look(self, state: LinkState) -> None:
        """Note the runs that `state` has, now and then; a full disk leaves this for another time."""
        if self._path is None or time.monotonic() - self._looked < _EVERY:
            return
        self._looked = time.monotonic()
        now = {str(run.run_id): _as_data(run) for run in state.get_run_info()}
        if any(self._runs.get(name) != run for name, run in now.items()) or not self._path.exists():
            self._runs |= now
            self._runs = dict(list(self._runs.items())[-_MOST:])
            with suppress(OSError):
                write_bytes(self._path, json.dumps(list(self._runs.values())).encode(), OWN)

    def earlier(self) -> list[dict[str, Any]]:
        """Every run that is on file."""
        return list(self._runs.values())


def _as_data(run: Run) -> dict[str, Any]:
    state = ":".join(filter(None, (run.status.status, run.status.sub_status)))
    told = {"started": run.running_at, "finished": run.finished_at, "folder": run.override_config.get("out", "")}
    return {"run": str(run.run_id), "state": state, **told}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
