"""Every engine runs the paper's algorithm, and they agree with each other."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedpriv.claims.outcome import RunObserver
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.random import SERVER, simulation_noise
from fedpriv.engines.table import IndexedOutcome, make_engine
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.schema import Cell
from tests.oracle import dp_mu2_fl

MakeCell = Callable[..., Cell]


class Recorder(RunObserver):
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.rounds = 0
        self.evaluations: list[tuple[int, int, float, float]] = []

    def advanced(self, rounds: int) -> None:
        self.rounds += rounds

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        self.evaluations.append((place, t, *metrics.values()))


def run(engine: str, *cells: Cell) -> tuple[list[IndexedOutcome], Recorder]:
    recorder = Recorder()
    outcomes = list(make_engine(engine)(list(cells), recorder))
    return sorted(outcomes, key=lambda outcome: outcome.index), recorder


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
@pytest.mark.parametrize("silos", [1, 4])
def test_engine_is_the_papers_algorithm(small_cell: MakeCell, engine: str, trust: str, silos: int) -> None:
    """With the noise on: the model equals a literal transcription of Algorithms 1 and 2."""
    cell = small_cell(algorithm__trust=trust, federation__silos=silos, federation__rounds=25)
    task, order = load_task(cell), torch.stack(partition_records(cell))
    noise = simulation_noise(cell.seed, np.float64)
    size = task.objective.dimension
    expected = dp_mu2_fl(
        task.train.features[order].numpy(),
        task.train.labels[order].numpy(),
        classes=10,
        diameter=0.1,
        rho=4.0,
        trusted=trust == "trusted",
        normal=lambda silo, t: noise.vector(size, SERVER if silo < 0 else silo, t),
    )
    (outcome,), _ = run(engine, cell)
    np.testing.assert_allclose(outcome.cell_outcome.model, expected, rtol=1e-9, atol=1e-13)
    assert np.linalg.norm(expected) > 1e-3  # the comparison is not of zeros


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_vectorized_equals_inprocess_at_every_evaluated_round(small_cell: MakeCell, trust: str) -> None:
    """float64, noise on and drawn per silo: 1e-9 relative at every evaluated round; batches of two records."""
    cell = small_cell(
        algorithm__trust=trust,
        federation__silos=7,
        federation__rounds=60,
        federation__batch=2,
        run__evaluations=12,
    )
    (vectorized,), heard = run("vectorized", cell)
    (inprocess,), also_heard = run("inprocess", cell)
    assert [line[:2] for line in heard.evaluations] == [line[:2] for line in also_heard.evaluations]
    assert len(heard.evaluations) == 12
    np.testing.assert_allclose(
        [line[2:] for line in heard.evaluations], [line[2:] for line in also_heard.evaluations], rtol=1e-9
    )
    np.testing.assert_allclose(vectorized.cell_outcome.model, inprocess.cell_outcome.model, rtol=1e-9, atol=1e-14)
    assert vectorized.cell_outcome.fraction_clipped == inprocess.cell_outcome.fraction_clipped
    assert heard.rounds == also_heard.rounds == 60


@pytest.mark.slow
@pytest.mark.parametrize(("trust", "rounds", "near"), [("untrusted", 100, 1e-6), ("secure-aggregation", 50, 2e-5)])
def test_float32_engines_agree_in_the_loss(small_cell: MakeCell, trust: str, rounds: int, near: float) -> None:
    """float32 noise has 24 digits, so that the grid of masked messages is 2^-12 of a share."""
    cell = small_cell(
        algorithm__trust=trust, run__dtype="float32", federation__silos=10, federation__rounds=rounds
    )
    (vectorized,), _ = run("vectorized", cell)
    (inprocess,), _ = run("inprocess", cell)
    assert vectorized.cell_outcome.test_loss == pytest.approx(inprocess.cell_outcome.test_loss, abs=near)


def test_a_sweep_run_together_equals_its_cells_run_alone(small_cell: MakeCell) -> None:
    """Replicates share a program, never a result: seeds, noise levels, trusts and shapes mixed."""
    cells = [
        small_cell(seed=seed, privacy__rho=rho, algorithm__trust=trust, federation__silos=silos)
        for seed in (0, 5)
        for rho in (1.0, 8.0)
        for trust in ("untrusted", "trusted")
        for silos in (2, 3)
    ]
    together, _ = run("vectorized", *cells)
    assert [outcome.index for outcome in together] == list(range(len(cells)))
    for cell, outcome in zip(cells, together, strict=True):
        (alone,), _ = run("vectorized", cell)
        np.testing.assert_allclose(outcome.cell_outcome.model, alone.cell_outcome.model, rtol=1e-9, atol=1e-14)
    models = np.array([outcome.cell_outcome.model for outcome in together])
    assert len(np.unique(models.round(12), axis=0)) == len(cells)


def test_many_silos_without_noise_equal_one_silo_with_their_records(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who holds a record does not matter without noise: 4 silos of one record a round, one silo of four."""

    def in_rounds(_: NDArray[np.int64], sizes: list[int], __: int) -> list[NDArray[np.int64]]:
        return list(np.arange(sum(sizes)).reshape(-1, len(sizes)).T)  # the same records in every round

    monkeypatch.setattr("fedpriv.plan.task.partition_iid", in_rounds)
    quiet = {"privacy__mode": "none", "privacy__rho": None, "federation__rounds": 12}
    (many,), _ = run("vectorized", small_cell(federation__silos=4, federation__batch=1, **quiet))
    (one,), _ = run("vectorized", small_cell(federation__silos=1, federation__batch=4, **quiet))
    np.testing.assert_allclose(many.cell_outcome.model, one.cell_outcome.model, rtol=1e-10, atol=1e-16)
    assert np.linalg.norm(many.cell_outcome.model) > 0.0


def test_clipping_is_on_and_reported(small_cell: MakeCell) -> None:
    """A clip far below the gradients' norms changes the model and is reported as a fraction of 1."""
    loose, _ = run("vectorized", small_cell())
    tight, _ = run("vectorized", small_cell(algorithm__clip=0.01))
    assert loose[0].cell_outcome.fraction_clipped == 0.0
    assert tight[0].cell_outcome.fraction_clipped == 1.0


def test_aggregate_noise_is_another_draw_of_the_same_size(small_cell: MakeCell) -> None:
    cell = small_cell(federation__silos=50, federation__rounds=4, run__noise="aggregate")
    (aggregate,), _ = run("vectorized", cell)
    (per_silo,), _ = run("vectorized", small_cell(federation__silos=50, federation__rounds=4))
    assert not np.allclose(aggregate.cell_outcome.model, per_silo.cell_outcome.model)
    with pytest.raises(InputError, match="aggregate"):
        run("inprocess", cell)


def test_a_loss_that_is_not_finite_fails_the_run(small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = torch.full((7850,), float("nan"), dtype=torch.float64)
    monkeypatch.setattr(SoftmaxRegression, "initial", lambda _: broken)
    with pytest.raises(RunError, match="not finite"):
        run("vectorized", small_cell())


def test_unusable_device_is_named(small_cell: MakeCell) -> None:
    with pytest.raises(RunError, match=r"run\.device = 'nonsense'"):
        run("vectorized", small_cell(run__device="nonsense"))


def test_unknown_engine_is_refused() -> None:
    with pytest.raises(InputError, match="known engines are vectorized, inprocess, ray"):
        make_engine("warp")


@pytest.mark.slow
def test_ray_equals_inprocess_bit_for_bit(small_cell: MakeCell) -> None:
    """Flower's own simulation engine, started for real, with the noise on; integers, masked too (a minute)."""
    sgd = {"name": "dp-sgd", "clip": 1.0, "step": 0.1, "trust": "trusted"}
    zero_out = {"relation": "zero-out", "mu": 2.0}
    rounds = {"federation__silos": 3, "federation__rounds": 4, "run__dtype": "float32"}
    cells = [
        small_cell(**rounds),
        small_cell(
            algorithm=sgd, run__arithmetic="integers", federation__drop_out=0.3, privacy=zero_out, **rounds
        ),
        small_cell(algorithm__trust="secure-aggregation", run__arithmetic="integers", **rounds),
    ]
    outcomes, heard = run("ray", *cells)
    for ray, inprocess in zip(outcomes, run("inprocess", *cells)[0], strict=True):
        assert np.array_equal(ray.cell_outcome.model, inprocess.cell_outcome.model)
        assert ray.cell_outcome.test_loss == inprocess.cell_outcome.test_loss
        assert ray.cell_outcome.missed == {
            silo: list(rounds) for silo, rounds in inprocess.cell_outcome.missed.items()
        }
    assert heard.rounds == 12
    assert len(heard.evaluations) == 12


@pytest.mark.slow
def test_memory_does_not_grow_with_rounds(tmp_path: Path) -> None:
    """Resident memory after 20,000 rounds of 3 silos is within 30 MB of that after 2,000."""
    script = tmp_path / "grow.py"
    script.write_text(
        "import psutil\n"  # ru_maxrss would have the memory of pytest, which started this process
        "from fedpriv.engines.vectorized.engine import run_vectorized\n"
        "from fedpriv.scenario import resolve_cell\n"
        "from tests.conftest import small_tree\n"
        "resident = {}\n"
        "class Watch:\n"
        "    def advanced(self, n): pass\n"
        "    def evaluated(self, index, t, metrics):\n"
        "        resident[t] = psutil.Process().memory_info().rss / 2**20\n"
        "tree = small_tree(data__name='mnist', federation__silos=3, federation__rounds=20000,\n"
        "                  run__evaluations=10, run__dtype='float32')\n"
        "list(run_vectorized([resolve_cell(tree, 'test')], Watch()))\n"
        "print(resident[20000] - resident[2000])\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 30.0


def test_the_vectorized_engine_refuses_integers_in_one_line(small_cell: MakeCell) -> None:
    """It would train on floating-point noise under the name of another arithmetic."""
    with pytest.raises(
        InputError, match=r'run\.arithmetic = "integers": engine vectorized .* use --engine inprocess'
    ):
        run("vectorized", small_cell(), small_cell(run__arithmetic="integers"))
