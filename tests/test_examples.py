"""Every example runs, offline, and leaves what it says."""

import runpy
from pathlib import Path

import pytest

import fedpriv

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example))
    assert capsys.readouterr().out


def test_the_first_steps_show_what_privacy_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(next(path for path in EXAMPLES if path.stem == "first_steps")))
    results: fedpriv.RunResults = names["results"]
    losses = {mu: [c.test_loss for c in results.cells if c.privacy.mu == pytest.approx(mu)] for mu in (1, 4, 16)}
    assert [len(found) for found in losses.values()] == [3, 3, 3]
    assert sum(losses[1]) > sum(losses[4]) > sum(losses[16])
    assert (tmp_path / "runs" / "first-steps" / "report.html").exists()
    assert names["trusted"].folder.name == "first-steps-2"
