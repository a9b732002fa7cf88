"""`flwr run .` leaves what `fedpriv run` leaves: the same folder, read by the same commands."""

import logging
from pathlib import Path
from typing import Any

import pytest

from fedpriv.cli.flower_run import app, open_run_folder
from fedpriv.clients.app import app as client_app
from fedpriv.core.errors import InputError
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.study.results import read_results
from tests.cli.command import output_of

SCENARIO = """\
name = "small"
title = "A small one"
[data]
name = "synthetic"
[federation]
silos = 3
rounds = 8
[algorithm]
name = "dp-ftrl"
trust = "untrusted"
clip = 1.0
step = 0.1
[privacy]
relation = "replace-one"
mu = 4.0
[sweep]
"algorithm.trust" = ["untrusted", "trusted"]
"privacy.mu" = [4.0, 8.0]
seeds = 2
[paper]
rows = "algorithm.trust"
columns = "privacy.mu"
test_loss = [[2.5, 2.4], [2.3, 2.2]]
"""


def configured(scenario: Path, **keys: Any) -> dict[str, Any]:
    """The run configuration as pyproject.toml has it, with a person's own values."""
    return {"scenario": str(scenario), "set": "", "cell": 0, "cell-json": "", "out": "", "run-token": "", **keys}


def flwr_run(run_config: dict[str, Any]) -> None:
    """What Flower does with the two apps, on the grid of this process."""
    grid = InProcessGrid(client_app, 3, run_config)
    app(grid, grid.server_context(run_config))


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(SCENARIO)
    return Path("small.toml")


@pytest.mark.slow
@pytest.mark.parametrize("fitted", [False, True], ids=["named noise", "fitted noise"])
def test_flwr_run_reproduces_the_cell_of_a_fedpriv_run(scenario: Path, fitted: bool) -> None:
    """The sixth cell, trusted with seed 1: every figure, the model, and the published value beside it."""
    overrides = ["algorithm.mechanism=auto"] if fitted else []
    flwr_run(configured(scenario, cell=5, set=" ".join(overrides)))
    overrides += ["algorithm.trust=trusted", "privacy.mu=4.0", "seeds=[1]"]
    options = [word for override in overrides for word in ("--set", override)]
    output_of("run", scenario, "--engine", "inprocess", "--out", "runs/ours", *options)
    theirs, ours = read_results(Path("runs/small")), read_results(Path("runs/ours"))
    assert (theirs.complete, theirs.engine) == (True, "flwr run")
    assert (theirs.published, theirs.axes, theirs.seeds) == (ours.published, ours.axes, ours.seeds)
    (cell,), (expected,) = theirs.cells, ours.cells
    assert {key for key in cell if cell[key] != expected[key]} <= {"wall_seconds", "engine"}
    for name in ("models/0000.npy", "history.jsonl"):
        assert Path("runs/small", name).read_bytes() == Path("runs/ours", name).read_bytes()


def test_the_folder_of_flwr_run_is_understood_by_table_and_report(scenario: Path) -> None:
    flwr_run(configured(scenario, cell=2))
    table = output_of("table", "runs/small")
    assert "flwr run" in table
    assert "2.4" in table  # the paper's value for this very cell
    output_of("report", "runs/small", "--out", "report.html")
    page = Path("report.html").read_text(encoding="utf-8")
    assert "flwr run . --run-config" in page
    assert "cell=2" in page


def test_a_second_flwr_run_writes_into_a_new_folder(scenario: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        for _ in range(2):
            flwr_run(configured(scenario))
    assert f"fedpriv: results in {Path('runs/small-2').resolve()}" in caplog.text
    for name in ("small", "small-2"):
        assert read_results(Path("runs", name)).complete
    with pytest.raises(InputError, match="holds results already"):
        open_run_folder(configured(scenario, out="runs/small"))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"cell": 8}, "cell = 8: small.toml has cells 0 … 7"),
        ({"cell": -1}, "cell = -1"),
        ({"scenario": "none.toml"}, "none.toml: no such file"),
        ({"set": "privacy.mu=-1"}, "privacy.mu"),
    ],
)
def test_a_flwr_run_configuration_without_a_valid_cell_writes_nothing(
    scenario: Path, keys: dict[str, Any], line: str
) -> None:
    with pytest.raises(InputError, match=line):
        open_run_folder({**configured(scenario), **keys})
    assert not Path("runs").exists()
