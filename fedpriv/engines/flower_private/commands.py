"""The command lines of Flower's programs, mended.

python -P -m fedpriv.engines.flower_private superexec|supernode|flwr-serverapp ARGUMENT...
"""

import sys
from collections.abc import Sequence
from pathlib import Path

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
