"""Names of Flower 1.41 that Flower does not promise to keep; tests/engines/test_flower_private.py checks them.

What they are needed for, measured on Flower 1.41: its SuperLink serves the Control API (a program that reaches it
runs code there), the Fleet API and the Runtime API on one port, asks no caller of the Control API for credentials,
and hands a task to the first program that asks; its executors put a task's token on a command line, which every
user of the machine can read; and a round waits: 3 s after a SuperNode found no message, up to 1 s for an object
that is on its way, a second and a half of imports for the process of each message, and 46 requests for the objects
of a round's messages.

| file | what |
|---|---|
| `control` | starting and stopping runs |
| `superlink` | the SuperLink; what every request to it or to a SuperNode goes through |
| `supernode` | the SuperNode's loop |
| `executor` | starting the processes of tasks |
| `carried` | messages that travel with their objects |
| `__main__` | the server's process, and the command lines of all |

Command lines of Flower's programs, mended, are made here:

python -P -m fedpriv.engines.flower_private superexec|supernode|flwr-serverapp ARGUMENT...
"""

import sys
from collections.abc import Sequence
from pathlib import Path

CONTROL, FLEET, RUNTIME = "/v1/control/", "/v1/fleet/", "/v1/runtime/"
UNIX = "unix:"

RESTARTED = "the SuperLink was started again"
"""Why a run ended whose server ended with its SuperLink."""

SOON = 0.02
"""Seconds until one looks again for an object that is on its way."""


MODULE = "fedpriv.engines.flower_private"
SERVERAPP = "flwr-serverapp"
NO_BELL = "-"


def superexec_command(
    address: str, certificate: Path, secret: Path, parent: int, bell: int | None = None
) -> list[str]:
    """The executor that starts tasks for the Runtime API at `address`, and ends when process `parent` does.

    `bell`: the descriptor from which it can read a byte for each task; without, it looks for tasks now and then.
    """
    return [
        *(sys.executable, "-P", "-m", MODULE, "superexec", NO_BELL if bell is None else str(bell)),
        *("--runtime-api-address", address),
        *("--root-certificates", str(certificate), "--superexec-auth-secret-file", str(secret)),
        *("--parent-pid", str(parent)),
    ]


def supernode_command(options: Sequence[str], bell: int) -> list[str]:
    """`flower-supernode OPTIONS` that ends when the process that starts it does.

    It writes a byte to the descriptor `bell` for each task.
    """
    return [sys.executable, "-P", "-m", MODULE, "supernode", str(bell), *options]


def serverapp_command(options: Sequence[str]) -> list[str]:
    """`flwr-serverapp OPTIONS`."""
    return [sys.executable, "-P", "-m", MODULE, SERVERAPP, *options]
