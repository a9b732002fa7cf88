"""`flwr run`, really: fedpriv's own app, and a stock app whose silos' guards train."""

from pathlib import Path

import pytest

from fedpriv.core.errors import InputError
from fedpriv.data.named import load
from fedpriv.study.results import read_results
from tests.e2e.flwr_command import flwr_run

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.deployment


def test_flwr_run_of_the_repository_trains_an_accurate_private_model(tmp_path: Path) -> None:
    """The default run: ten silos, MNIST."""
    try:
        load("mnist")
    except InputError as reason:
        pytest.skip(f"no MNIST here: {reason}")
    said = flwr_run(ROOT, 10, {}, tmp_path)
    folder = tmp_path / "runs" / "flower-demo"
    assert f"fedpriv: results in {folder}" in said, said[-3000:]
    results = read_results(folder)
    assert results.complete
    (cell,) = results.cells
    assert cell["test_accuracy"] > 0.95
    assert (cell["mu"], cell["guarantee"]) == (pytest.approx(1.0), "gaussian-dp")


def test_flwr_run_accepts_scenario_overrides_and_an_output_folder(tmp_path: Path) -> None:
    """One's own keys in the run configuration: overrides, a folder."""
    keys = {"set": "data.name=synthetic federation.silos=2 federation.rounds=3 federation.batch=50", "out": "mine"}
    said = flwr_run(ROOT, 2, keys, tmp_path)
    results = read_results(tmp_path / "mine")
    assert results.complete, said[-3000:]
    assert (results.cells[0]["silos"], results.cells[0]["rounds"]) == (2, 3)
