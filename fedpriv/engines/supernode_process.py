"""`fedpriv supernode`: Flower's SuperNode of one silo; no other user of the machine can take or answer its tasks.

    python -P -m fedpriv.engines.supernode_process SUPERLINK SILO GUARD KEYS|-

It is started again while the SuperLink refuses its key (one that was killed counts as connected for a minute), and
where another program has taken its port meanwhile.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from fedpriv.core.errors import InputError
from fedpriv.engines.flower_private import superexec_command, supernode_command
from fedpriv.engines.processes import AUTHORITY, check_certificates, free_ports, isolated, tls_options

NODE_KEY = "node.key"
_REFUSED_SECONDS = 90.0  # until a refusal is final; Flower misses a node that was killed after 60
_PAUSE_SECONDS = 3.0


def command(superlink: str, silo: int, guard: Path, keys: Path | None) -> list[str]:
    """The command that runs silo `silo`'s SuperNode; `keys` has ca.crt and node.key, None for no TLS, no key."""
    return [
        *(sys.executable, "-P", "-m", __name__, superlink, str(silo), str(guard)),
        "-" if keys is None else str(keys),
    ]


def become_supernode(superlink: str, silo: int, guard: Path, keys: Path | None, *, insecure: bool) -> NoReturn:
    """Make this process silo `silo`'s SuperNode; InputError for keys that cannot be used."""
    if (keys is None) != insecure:
        raise InputError("fedpriv supernode: give --keys FOLDER, or --insecure on a machine of your own")
    if keys is not None:
        check_certificates(keys / AUTHORITY)
        if not (keys / NODE_KEY).exists():
            raise InputError(f"{keys / NODE_KEY}: no such key; run deploy/make-keys.sh, or ssh-keygen")
    words = command(superlink, silo, guard, keys)
    os.execv(words[0], words)


def run_supernode(superlink: str, silo: int, guard: Path, keys: Path | None) -> int:
    """Run until ended or refused for good; the exit code."""
    with isolated("supernode") as (folder, secret, options):
        options += [f"--superlink={superlink}", "--node-config", f"partition-id={silo} guard='{guard}'"]
        options += tls_options(folder)
        if keys is None:
            options += ["--insecure"]
        else:
            authority = keys / AUTHORITY
            options += [f"--root-certificates={authority}", f"--auth-supernode-private-key={keys / NODE_KEY}"]
        return until_it_stays(lambda: _run_once(options, folder / AUTHORITY, secret))


def _run_once(options: Sequence[str], authority: Path, secret: Path) -> int:
    """SuperNode and executor until the SuperNode ends; its exit code.

    A port that is free now may be another's when the SuperNode listens, so that every start takes one of its own.
    """
    (port,) = free_ports(1)
    heard, bell = os.pipe()  # a byte for each task, from the SuperNode to the executor
    words = superexec_command(f"127.0.0.1:{port}", authority, secret, os.getpid(), heard)
    with (
        _ended_with_us(words, heard),
        _ended_with_us(supernode_command([*options, f"--port={port}"], bell), bell) as node,
    ):
        return node.wait()


@contextmanager
def _ended_with_us(words: Sequence[str], inherited: int) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that has the descriptor `inherited`, which is closed here; the SuperLink hears of a node's end."""
    process = subprocess.Popen(words, pass_fds=[inherited])
    os.close(inherited)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def until_it_stays(run_once: Callable[[], int]) -> int:
    """Run what ends too early again, until it ended well or has not stayed for a minute and a half; the code."""
    first = time.monotonic()
    while True:
        started = time.monotonic()
        code = run_once()
        now = time.monotonic()
        first = started if now - started > _REFUSED_SECONDS else first
        if code == 0 or now - first > _REFUSED_SECONDS:
            return code
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    address, number, socket, given = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(run_supernode(address, int(number), Path(socket), None if given == "-" else Path(given)))
