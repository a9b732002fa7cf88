"""Every example runs, offline, and leaves what it says."""

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fedpriv

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_script_runs_and_prints_output(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example))
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_first_steps_example_shows_a_loss_that_falls_with_mu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(next(path for path in EXAMPLES if path.stem == "first_steps")))
    results: fedpriv.RunResults = names["results"]
    losses = {mu: [c.test_loss for c in results.cells if c.privacy.mu == pytest.approx(mu)] for mu in (1, 4, 16)}
    assert [len(found) for found in losses.values()] == [3, 3, 3]
    assert sum(losses[1]) > sum(losses[4]) > sum(losses[16])
    assert (tmp_path / "runs" / "first-steps" / "report.html").exists()
    assert names["trusted"].folder.name == "first-steps-2"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell, in order, as a kernel would run it; MNIST is the synthetic data set here."""
    monkeypatch.chdir(tmp_path)
    tree = json.loads(path.read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in tree["cells"] if cell["cell_type"] == "code"]
    assert all(cell.get("outputs", []) == [] for cell in tree["cells"])
    module = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    for place, source in enumerate(code):
        small = source.replace('DATA = "mnist"', 'DATA = "synthetic"').replace(
            '"seeds": 2', '"seeds": 2, "federation.rounds": 30'
        )
        exec(compile(small, f"{path.name}, cell {place}", "exec"), module.__dict__)
