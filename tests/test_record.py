"""Recordings of runs are compared digit by digit, without what differs from run to run."""

import json
from pathlib import Path
from typing import Any

import pytest

import fedpriv
from benchmarks.record import differences, recorded

SMALL = {"data.name": "synthetic", "federation.silos": 3, "federation.rounds": 4, "privacy.rho": 4.0, "seeds": 1}


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    fedpriv.run("quickstart", set=SMALL, out=tmp_path / "run")
    return recorded(tmp_path / "run")


def kept(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "vectorized").mkdir(parents=True)
    (folder / "vectorized" / "quickstart.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_run_and_the_same_run_later(tmp_path: Path, run: dict[str, Any]) -> None:
    fedpriv.run("quickstart", set=SMALL, out=tmp_path / "again")
    again = recorded(tmp_path / "again")
    assert differences(kept(tmp_path / "a", run), kept(tmp_path / "b", again)) == []


def test_one_other_digit_and_one_other_key_are_seen(tmp_path: Path, run: dict[str, Any]) -> None:
    other = json.loads(json.dumps(run))
    other["history"][-1]["test_loss"] += 1e-9
    other["results"]["cells"][0]["scenario"]["model"]["classes"] = 11
    lines = differences(kept(tmp_path / "a", run), kept(tmp_path / "b", other))
    assert len(lines) == 2
    assert any("test_loss" in line for line in lines)
    assert any("classes: only in one of both" in line for line in lines)
