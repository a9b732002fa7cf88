"""A silo's own process: it owns records, keys, ledger and policy, and answers its ClientApp on a Unix socket.

A request is two frames, a JSON header {run, cell, t, dtype} and the query's bytes; a reply is a frame {"ok": true}
and the release's bytes, or one frame {"refused": reason}.  Nothing is unpickled.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clients.guard import Guard, load_shard
from clients.ledger import SiloLedger
from clients.policy import read_policy
from fedpriv.errors import InputError, RunError
from fedpriv.federation import DTYPES

_LONGEST = 2**31


def serve(policy_path: Path, ready: Callable[[Path], None] = lambda _: None) -> None:
    """Answer until the process is ended; InputError if policy, shard or ledger cannot be used."""
    torch.set_num_threads(1)
    policy = read_policy(policy_path)
    shard = load_shard(policy.shard, policy.classes)
    guard = Guard(policy, SiloLedger(policy.ledger), shard)
    policy.socket.unlink(missing_ok=True)
    previous = os.umask(0o177)  # the socket is the silo's own, like the ledger
    try:
        listener = Listener(str(policy.socket), "AF_UNIX")
    finally:
        os.umask(previous)
    with listener:
        ready(policy.socket)
        while True:
            with suppress(OSError), listener.accept() as connection:  # a client may vanish at any time
                _converse(connection, guard)


def ask(socket: Path, run_id: str, cell_json: str, t: int, query: Tensor) -> Tensor:
    """The guard's answer; RunError with its reason if it refuses or is not there."""
    header = {"run": run_id, "cell": cell_json, "t": t, "dtype": str(query.dtype).removeprefix("torch.")}
    try:
        with Client(str(socket), "AF_UNIX") as connection:
            connection.send_bytes(json.dumps(header).encode())
            connection.send_bytes(query.numpy().tobytes())
            answer = json.loads(connection.recv_bytes(_LONGEST))
            if "refused" in answer:
                raise RunError(answer["refused"])
            return torch.frombuffer(bytearray(connection.recv_bytes(_LONGEST)), dtype=query.dtype)
    except (OSError, EOFError) as error:
        raise RunError(
            f"the silo's guard at {socket} does not answer ({error}); is `fedpriv silo` running?"
        ) from None


def _converse(connection: "Connection[Any, Any]", guard: Guard) -> None:
    """One request and its reply; whatever is wrong with a request is refused, and the next one is served."""
    try:
        header = json.loads(connection.recv_bytes(_LONGEST))
        query = torch.frombuffer(bytearray(connection.recv_bytes(_LONGEST)), dtype=DTYPES[header["dtype"]])
        release = guard.answer(str(header["run"]), str(header["cell"]), int(header["t"]), query)
    except (RunError, InputError) as error:
        connection.send_bytes(json.dumps({"refused": str(error)}).encode())
    except (ValueError, KeyError, TypeError, EOFError, RuntimeError):
        connection.send_bytes(json.dumps({"refused": "the request is malformed"}).encode())
    else:
        connection.send_bytes(b'{"ok": true}')
        connection.send_bytes(release.numpy().tobytes())
