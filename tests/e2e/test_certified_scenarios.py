"""Every shipped scenario's reduced run is certified, and verifies in a process that has no data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedpriv
from benchmarks.reduced import SCENARIOS, WEIGHTS, reduced
from tests.cli.command import fedpriv as command


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_certificate_of_every_reduced_scenario_run_verifies_without_the_data(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPRIV_WEIGHTS", str(WEIGHTS))
    folder = tmp_path / "run"
    cells = fedpriv.run(path, set=reduced(path), out=folder).cells
    own = ["--key", folder / "key", "--cell", len(cells) - 1]
    done = command("certify", folder, *own, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("certificate.html", "model-card.md"):
        assert "A SIMULATION" in (folder / name).read_text()
    (folder / "trusted").write_text(done.stdout.splitlines()[0] + "\n")
    elsewhere = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "nothing")}
    again = subprocess.run(
        [Path(sys.executable).with_name("fedpriv"), "certify", "--verify", folder / "certificate.json", "--keys",
         folder / "trusted", "--model", folder / f"models/{len(cells) - 1:04d}.npy"],
        capture_output=True, text=True, env=elsewhere, check=False,
    )  # fmt: skip
    assert (again.returncode, again.stderr) == (0, ""), again.stderr
