"""Masked runs: their loss in float32, the fresh noise that a round has, the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedpriv.cli.app import app
from fedpriv.noise.buffered import BufferedToeplitz, LambdaCgd
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian
from fedpriv.noise.differences import AlignedDifferences
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.sliding import SlidingDifferences
from fedpriv.noise.toeplitz import BandedInverseSquareRoot, BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.scenario.schema import Cell
from tests.engines.test_engines import run

MASKED = "secure-aggregation"
MakeCell = Callable[..., Cell]


def test_float32_engines_agree_in_the_loss(small_cell: MakeCell) -> None:
    """float32 noise has 24 digits, so that the grid is 2^-12 of a share."""
    cell = small_cell(algorithm__trust=MASKED, run__dtype="float32", federation__silos=10, federation__rounds=50)
    (vectorized,), _ = run("vectorized", cell)
    (inprocess,), _ = run("inprocess", cell)
    assert vectorized.finished.test_loss == pytest.approx(inprocess.finished.test_loss, abs=2e-5)


MECHANISMS: list[Mechanism] = [
    IndependentGaussian(),
    BinaryTree(),
    BinaryTree(0.9, 5),
    BandedSquareRoot(1.0, 4),
    BandedInverseSquareRoot(1.0, 4),
    LambdaCgd(1.0, (0.9,), (0.0,)),
    BufferedToeplitz(0.9, (0.9, 0.5), (0.7, 0.0), period=6),
    BufferedToeplitz(1.0, (0.9, 0.5), (0.7, 0.2), tuple(1.0 + 0.1 * t for t in range(20))),
    LeafGaussian(0.7, 6, 0.25),
    SlidingDifferences(4, 0.3, 1.0, 1.0, 0.1, 0.8, 0.5, 0.4, 0.3, 0.2),
    AlignedDifferences(4, 0.3, 1.0, 1.0, None, 0.8, 0.5, 0.4, 0.3, 0.2),
]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda each: type(each).__name__)
def test_every_round_has_the_fresh_noise_that_the_grid_is_made_for(mechanism: Mechanism) -> None:
    """Impulse by impulse: what round t's own vectors add to row t, given everything before."""
    state = mechanism.start()
    for t in range(1, 21):
        count = mechanism.draws(t)
        impulses = torch.eye(count or 1, dtype=torch.float64)
        before = tuple(torch.zeros(len(impulses), dtype=torch.float64) for _ in state)
        response, state = mechanism.noise(before, t, impulses[0] if count is None else impulses)
        assert float(response.norm()) >= mechanism.fresh_std > 0.0


def test_the_command_line_runs_a_masked_federation(tmp_path: Path) -> None:
    scenario = tmp_path / "masked.toml"
    scenario.write_text(
        'name = "masked"\n[data]\nname = "synthetic"\n[federation]\nsilos = 3\nrounds = 6\n'
        '[algorithm]\nname = "dp-mu2-fl"\ntrust = "untrusted"\ndiameter = 0.1\n'
        '[privacy]\nrelation = "replace-one"\nrho = 4.0\n'
    )
    options = ["--set", "algorithm.trust=secure-aggregation", "--engine", "inprocess", "--quiet"]
    result = CliRunner().invoke(app, ["run", str(scenario), *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    (cell,) = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    assert (cell["trust"], round(cell["mu"], 9)) == (MASKED, 4.0)
    assert [release["owner"] for release in cell["releases"]] == ["sum of silos 0-2"]
    ledger = CliRunner().invoke(app, ["privacy", "ledger", str(tmp_path / "out")])
    assert "sum of silos 0-2" in ledger.output
    table = CliRunner().invoke(app, ["table", str(tmp_path / "out")])
    assert "untrusted server, secure aggregation" in table.output
