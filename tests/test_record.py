"""A recording is equal to itself in another process, and one other digit in it is seen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.record import differences, main, read, record, written

ROOT = Path(__file__).parents[1]
SOME = (
    r"^dp-ftrl/one epoch/untrusted/inprocess/|^tree/(untrusted|secure-aggregation)/restarted|^evaluation$"
    r"|^convert/mu|^sampled|silos = -1|^policy/allow.clip = -1|^command/run no-such"
)
PARTS = ["rows", "guards", "privacy", "reports", "refusals"]


@pytest.fixture(scope="module")
def some() -> dict[str, str]:
    """A few entries of each part."""
    return record(PARTS, jobs=1, match=SOME)


@pytest.mark.slow
def test_a_recording_is_equal_to_itself_in_another_process(some: dict[str, str], tmp_path: Path) -> None:
    """Other addresses, another hash seed: the same bytes."""
    arguments = ["--only", ",".join(PARTS), "--match", SOME, "--jobs", "1", "--out", str(tmp_path / "other.zip")]
    command = [sys.executable, "-m", "benchmarks.record", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert differences(some, read(tmp_path / "other.zip")) == []
    written(tmp_path / "some.zip", some)
    assert (tmp_path / "some.zip").read_bytes() == (tmp_path / "other.zip").read_bytes()


def test_a_recording_has_valid_entries_of_every_part(some: dict[str, str]) -> None:
    assert {name.split("/")[0] for name in some} == set(PARTS)
    assert len(set(some.values())) > 0.8 * len(some)
    integers = json.loads(some["rows/dp-ftrl/one epoch/untrusted/inprocess/integers/private"])
    assert integers["models"]
    assert "wall_seconds" not in some["rows/dp-ftrl/one epoch/untrusted/inprocess/integers/private"]
    replies = some["guards/tree/untrusted/restarted"].splitlines()
    assert len(replies) == 11
    assert replies[2] == replies[3], "a round that is asked again after a restart has the same bytes"
    assert len(set(replies)) == 8
    assert "<svg" in some["reports/sampled/page"]
    assert "silos = -1: expected" in some["refusals/scenario/federation.silos = -1"]


def test_a_comparison_of_recordings_finds_a_changed_digit_and_a_new_entry(
    some: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "guards/tree/untrusted/restarted"
    other = {**some, name: some[name].replace("a", "b", 1), "guards/new": "1\n"}
    for path, entries in ((tmp_path / "a", some), (tmp_path / "b", other)):
        written(path, entries)
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "guards/new: only after"
    assert lines[1].startswith(f"{name}: 2 lines, first ")
    assert len(lines) == 3
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
