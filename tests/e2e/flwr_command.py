"""`flwr run FOLDER`, as a person types it, and nothing of it left behind."""

import os
import secrets
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fedpriv.addons.services.service import flower_environment, script_path
from fedpriv.engines.children import reap_processes

_SECONDS = 400.0


def flwr_run(app: Path, supernodes: int, run_config: Mapping[str, str | int | float], cwd: Path) -> str:
    """What the command prints, the run's log among it; run in `cwd`, from where Flower starts its local SuperLink.

    AssertionError if the command fails.  Whether the run did is for the caller to see: the command does not say.
    """
    keys = " ".join(
        f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in run_config.items()
    )
    words = [
        script_path("flwr"),
        "run",
        str(app),
        "--stream",
        "--federation-config",
        f"num-supernodes={supernodes}",
    ]
    with tempfile.TemporaryDirectory(prefix="fedpriv-flwr-") as name, reap_processes(Path(name)):
        own = {
            **flower_environment(Path(name)),
            "FLWR_LOG_LEVEL": "INFO",
            "RAY_AUTH_MODE": "token",  # Ray listens on every address of the machine
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": name,
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        done = subprocess.run(
            [*words, *(["--run-config", keys] if keys else [])],
            cwd=cwd, env=own, capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
