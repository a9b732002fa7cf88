"""A silo's own process: it owns records, keys, ledger and policy, and answers its ClientApp on a Unix socket.

The frames on the socket are described in clients/proxy.py.  Nothing is unpickled.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch

from clients.guard import Guard, load_shard
from clients.ledger import LedgerError, SiloLedger
from clients.policy import read_policy
from clients.proxy import LONGEST
from fedpriv.errors import InputError, RunError
from fedpriv.federation import DTYPES


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
    if policy.group is not None:
        _open_to(policy.socket, policy.group)
    with listener:
        ready(policy.socket)
        while True:
            with suppress(OSError), listener.accept() as connection:  # a client may vanish at any time
                _converse(connection, guard)


def _open_to(socket: Path, group: str) -> None:
    try:
        shutil.chown(socket, group=int(group) if group.isdigit() else group)
        socket.chmod(0o660)
    except (OSError, LookupError) as error:
        raise InputError(f"group = {group!r}: cannot be given the socket {socket}: {error}") from None


def _converse(connection: "Connection[Any, Any]", guard: Guard) -> None:
    """One request and its reply; whatever is wrong with a request is refused, and the next one is served."""
    try:
        header = json.loads(connection.recv_bytes(LONGEST))
        run, cell, t = str(header["run"]), str(header["cell"]), int(header["t"])
        asked = bytearray(connection.recv_bytes(LONGEST))
        if t == 0:
            reply, dtype = guard.public_key(run, cell), "uint8"
        else:
            query = torch.frombuffer(asked, dtype=DTYPES[header["dtype"]])
            release = guard.answer(run, cell, t, query, bytes.fromhex(header["keys"])).numpy()
            reply, dtype = release.tobytes(), str(release.dtype)
    except LedgerError as error:  # a disk may be full now and not in a minute
        _refuse(connection, str(error), final=False)
    except (RunError, InputError) as error:
        _refuse(connection, str(error), final=True)
    except (ValueError, KeyError, TypeError, EOFError, RuntimeError):
        _refuse(connection, "the request is malformed", final=True)
    else:
        connection.send_bytes(json.dumps({"dtype": dtype}).encode())
        connection.send_bytes(reply)


def _refuse(connection: "Connection[Any, Any]", reason: str, *, final: bool) -> None:
    connection.send_bytes(json.dumps({"refused": reason, "final": final}).encode())
