"""Every engine runs the paper's algorithm, and they agree with each other."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedpriv.core.errors import InputError, RunError
from fedpriv.core.random import SERVER, simulation_noise
from fedpriv.engines.table import make_engine
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.plan.task import load_task, partition_records
from tests.engines.builders import (
    ENGINES,
    Recorder,
    refusal,
    run,
    run_cell,
    run_on_both,
    run_python,
    run_together,
    small_cell,
)
from tests.oracle import dp_mu2_fl

__all__ = ["Recorder", "run"]


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
@pytest.mark.parametrize("silos", [1, 4])
def test_both_engines_equal_a_literal_transcription_of_the_dp_mu2_fl_algorithm(
    engine: str, trust: str, silos: int
) -> None:
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
    outcome = run_cell(engine, cell)
    np.testing.assert_allclose(outcome.model, expected, rtol=1e-9, atol=1e-13)
    assert np.linalg.norm(expected) > 1e-3  # the comparison is not of zeros


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_vectorized_equals_inprocess_at_every_evaluated_round(trust: str) -> None:
    """float64, noise on and drawn per silo: 1e-9 relative at every evaluated round; batches of two records."""
    federation = {"silos": 7, "rounds": 60, "batch": 2}
    cell = small_cell(algorithm__trust=trust, federation=federation, run__evaluations=12)
    _, recorder = run_on_both(cell, atol=1e-14)
    assert len(recorder.evaluations) == 12
    assert recorder.rounds == 60


@pytest.mark.slow
@pytest.mark.parametrize(("trust", "rounds", "near"), [("untrusted", 100, 1e-6), ("secure-aggregation", 50, 2e-5)])
def test_float32_engines_agree_in_the_loss(trust: str, rounds: int, near: float) -> None:
    """float32 noise has 24 digits, so that the grid of masked messages is 2^-12 of a share."""
    federation = {"silos": 10, "rounds": rounds}
    cell = small_cell(algorithm__trust=trust, run__dtype="float32", federation=federation)
    losses = [run_cell(engine, cell).test_loss for engine in ENGINES]
    assert losses[0] == pytest.approx(losses[1], abs=near)


def test_cells_run_together_in_a_sweep_equal_the_cells_run_alone() -> None:
    """Replicates share a program, never a result: seeds, noise levels, trusts and shapes mixed."""
    cells = [
        small_cell(seed=seed, privacy__rho=rho, algorithm__trust=trust, federation__silos=silos)
        for seed in (0, 5)
        for rho in (1.0, 8.0)
        for trust in ("untrusted", "trusted")
        for silos in (2, 3)
    ]
    models = np.array([outcome.model for outcome in run_together(cells, "vectorized", atol=1e-14)])
    assert len(np.unique(models.round(12), axis=0)) == len(cells)


def test_many_silos_without_noise_equal_one_silo_with_their_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds a record does not matter without noise: 4 silos of one record a round, one silo of four."""

    def in_rounds(_: NDArray[np.int64], sizes: list[int], __: int) -> list[NDArray[np.int64]]:
        return list(np.arange(sum(sizes)).reshape(-1, len(sizes)).T)  # the same records in every round

    monkeypatch.setattr("fedpriv.plan.task.partition_iid", in_rounds)
    quiet = {"privacy__mode": "none", "privacy__rho": None, "federation__rounds": 12}
    many = run_cell("vectorized", small_cell(federation__silos=4, federation__batch=1, **quiet))
    single = run_cell("vectorized", small_cell(federation__silos=1, federation__batch=4, **quiet))
    np.testing.assert_allclose(many.model, single.model, rtol=1e-10, atol=1e-16)
    assert np.linalg.norm(many.model) > 0.0


def test_the_fraction_of_clipped_increments_is_reported() -> None:
    """A clip far below the gradients' norms changes the model and is reported as a fraction of 1."""
    cells = small_cell(), small_cell(algorithm__clip=0.01)
    assert [run_cell("vectorized", cell).fraction_clipped for cell in cells] == [0.0, 1.0]


def test_aggregate_noise_gives_another_model_and_needs_the_vectorized_engine() -> None:
    cell = small_cell(federation__silos=50, federation__rounds=4, run__noise="aggregate")
    aggregate = run_cell("vectorized", cell)
    per_silo = run_cell("vectorized", small_cell(federation__silos=50, federation__rounds=4))
    assert not np.allclose(aggregate.model, per_silo.model)
    with refusal(r'run\.noise = "aggregate"'):
        run("inprocess", cell)


def test_a_loss_that_is_not_finite_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = torch.full((7850,), float("nan"), dtype=torch.float64)
    monkeypatch.setattr(SoftmaxRegression, "initial", lambda _: broken)
    with pytest.raises(RunError, match="not finite"):
        run("vectorized", small_cell())


def test_unknown_engine_is_refused() -> None:
    with pytest.raises(InputError, match="known engines are vectorized, inprocess, ray"):
        make_engine("warp")


@pytest.mark.slow
def test_ray_equals_inprocess_bit_for_bit() -> None:
    """Flower's own simulation engine, started for real, with the noise on; integers, masked too (a minute)."""
    short: dict[str, Any] = {"federation__silos": 3, "federation__rounds": 4, "run__dtype": "float32"}
    integers = {**short, "run__arithmetic": "integers"}
    sgd = {"name": "dp-sgd", "clip": 1.0, "step": 0.1, "trust": "trusted"}
    privacy = {"relation": "zero-out", "mu": 2.0}
    cells = [
        small_cell(**short),
        small_cell(algorithm=sgd, federation__drop_out=0.3, privacy=privacy, **integers),
        small_cell(algorithm__trust="secure-aggregation", **integers),
    ]
    outcomes, recorder = run("ray", *cells)
    for ray, inprocess in zip(outcomes, run("inprocess", *cells)[0], strict=True):
        ours, theirs = ray.cell_outcome, inprocess.cell_outcome
        assert np.array_equal(ours.model, theirs.model)
        assert ours.test_loss == theirs.test_loss
        assert ours.missed == {silo: list(rounds) for silo, rounds in theirs.missed.items()}
    assert recorder.rounds == len(recorder.evaluations) == 12


@pytest.mark.slow
def test_memory_does_not_grow_with_rounds() -> None:
    """Resident memory after 20,000 rounds of 3 silos is within 30 MB of that after 2,000."""
    program = (
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
    assert float(run_python("-c", program)) < 30.0


@pytest.mark.parametrize(
    ("key", "value", "kind", "reason"),
    [
        ("device", "nonsense", InputError, r"run\.device = 'nonsense'"),
        (
            "arithmetic",
            "integers",
            InputError,
            r'run\.arithmetic = "integers": engine vectorized .* use --engine in',
        ),
    ],
)  # integers: it would train on floating-point noise under the name of another arithmetic
def test_unknown_devices_and_integer_arithmetic_are_refused_by_the_vectorized_engine(
    key: str, value: str, kind: type[Exception], reason: str
) -> None:
    with refusal(reason, kind):
        run("vectorized", small_cell(), small_cell(**{f"run__{key}": value}))
