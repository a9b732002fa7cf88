"""A unit's own sandbox as far as files go: `ProtectSystem=strict` by bind mounts in a mount namespace."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"
VARIABLE = Path("/var/lib")
"""Where state folders are; the namespace has an empty one."""


def setting(unit: str, name: str) -> list[str]:
    """Words of a unit's setting, from all its lines."""
    return [word for line in re.findall(rf"^{name}=(.*)$", unit, re.MULTILINE) for word in line.split()]


def writable_paths(unit: str) -> list[str]:
    """Folders in which the unit may write: of its state, of its sockets, and what it names itself."""
    folders = [f"{VARIABLE}/{name}" for name in setting(unit, "StateDirectory")]
    folders += [f"/run/{name}" for name in setting(unit, "RuntimeDirectory")]
    return [*folders, *(path.lstrip("-") for path in setting(unit, "ReadWritePaths"))]


def command_of(unit: str, etc: Path, silo: int = 0) -> list[str]:
    """The command of a unit, with this installation and with another folder in the place of /etc/fedpriv."""
    (line,) = re.findall("^ExecStart=(.*)$", unit, re.MULTILINE)
    line = line.replace("/etc/fedpriv", str(etc)).replace("%i", str(silo))
    return line.replace("/opt/fedpriv/bin/fedpriv", str(Path(sys.executable).with_name("fedpriv"))).split()


def run_inside(unit: str, folder: Path, begin: str, inside: str) -> "subprocess.CompletedProcess[str]":
    """Run a shell script `begin` before, and a Python script `inside` after all but the unit's paths is read-only.

    `folder` is what lies behind /var/lib and /run; the whole namespace ends with the scripts.
    """
    mounts = [
        "set -e; mount --make-rprivate /",
        *(f"mkdir -p {folder}{place}; mount --bind {folder}{place} {place}" for place in ("/var/lib", "/run")),
        "mount -t tmpfs tmpfs /var/tmp",  # PrivateTmp
        *(f"mkdir -p {path}" for path in (*writable_paths(unit), "/var/lib/fedpriv-mark", "/var/lib/elsewhere")),
        begin,
        "mount --bind /var/tmp /var/tmp",
        "for place in /var/lib /run; do mount -o remount,bind,ro $place; done",
        *(
            f"if [ -e {path} ]; then mount --bind {path} {path}; mount -o remount,bind,rw {path}; fi"
            for path in writable_paths(unit)
        ),
        "mount -o remount,bind,ro /",
        "export TMPDIR=/var/tmp HOME=/var/tmp FLWR_HOME=/var/tmp/flower OMP_NUM_THREADS=1",
        f"cd /var/tmp; PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1 exec {sys.executable} {inside}",
    ]
    command = ["unshare", "--mount", "sh", "-c", "\n".join(mounts)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def may_unshare() -> bool:
    """Whether this machine lets a test have a mount namespace of its own."""
    try:
        done = subprocess.run(
            ["unshare", "--mount", "mount", "--make-rprivate", "/"], capture_output=True, check=False
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0
