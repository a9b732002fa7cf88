"""The systemd units: valid, hardened, started again for ever, and of the commands that fedpriv has."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedpriv.cli.app import app

UNITS = sorted((Path(__file__).resolve().parents[2] / "deploy" / "systemd").glob("*.service"))
HARDENED = {"ProtectSystem=strict", "NoNewPrivileges=yes", "CapabilityBoundingSet=", "UMask=0077"}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_systemd_unit_is_hardened_and_always_restarts(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert {"Restart=always", "StartLimitIntervalSec=0", *HARDENED} <= set(lines)
    assert any(line.startswith("MemoryMax=") for line in lines)
    (user,) = [line for line in lines if line.startswith("User=")]
    assert user not in ("User=root", "User=")


def test_each_systemd_service_runs_as_a_different_user() -> None:
    users = [re.findall("^User=(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)[0] for path in UNITS]
    assert len(set(users)) == len(UNITS) == 3


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_systemd_unit_starts_an_existing_command_with_existing_options(path: Path) -> None:
    (line,) = re.findall("^ExecStart=/opt/fedpriv/bin/fedpriv (.*)$", path.read_text("utf-8"), re.MULTILINE)
    words = line.split()
    command = words[:2] if words[0] == "silo" else words[:1]
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"}).output
    assert all(word in shown for word in words if word.startswith("--"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs apt-get install systemd")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_a_unit_and_rates_its_exposure_as_low(path: Path, tmp_path: Path) -> None:
    unit = tmp_path / path.name.replace("@.", "@0.")
    unit.write_text(path.read_text("utf-8").replace("/opt/fedpriv/bin/fedpriv", "/bin/true"), "utf-8")
    verified = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False, timeout=60
    )
    assert (verified.returncode, path.name in verified.stderr) == (0, False), verified.stderr
    scored = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", unit],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert scored.returncode == 0, scored.stdout[-300:]
