"""A network that swallows everything for ten minutes, in real time; `make test-all`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gameday.faults import TEN_MINUTES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_a_run_survives_ten_minutes_of_network_loss_with_the_same_model(tmp_path: Path) -> None:
    """The run goes on by itself, somebody is told within a minute, and the model has the bytes of its replay."""
    words = ["--only", TEN_MINUTES, "--seed", "64", "--minutes", "0.1", "--at-once", "1", "--rounds", "20"]
    words += ["--patience", "900", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gameday", *words],
        cwd=ROOT,
        env={**os.environ, "FEDPRIV_ALLOW_ROOT": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "1 runs with the bytes of their replay, 0 resumptions" in done.stdout
    (row,) = json.loads((tmp_path / "faults.json").read_text())
    assert (row["fault"], row["detail"], row["outcome"]) == (TEN_MINUTES, "600 s", "same bytes")
    assert float(row["told"].split()[0]) <= 60.0
    assert row["well"] < 900.0
