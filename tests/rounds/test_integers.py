"""Runs on integers: what is refused, and that without noise they are the runs in floating point."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.random import KeyedNormal
from fedpriv.noise.integers.gaussian import KeyedDiscreteGaussian
from fedpriv.plan.evaluation import assume_scaling
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.rounds.floats import PrefetchedNoise, SeededNoise
from fedpriv.scenario.schema import Cell
from tests.attacks.guards import KEPT_STATE
from tests.engines.test_engines import run
from tests.plan.test_first_step import cell_of as first_step_cell
from tests.rounds.test_exact_runs import TRUSTS, cell_of

MakeCell = Callable[..., Cell]
PHASED = {"name": "phased-sgd", "trust": "curator", "step": 0.01, "radius": 2.0}
SLIDING = {"name": "momentum-tree-reduced", "trust": "untrusted", "clip": 1.0, "alpha": 0.3, "step": 1e-8}


@pytest.mark.every(5)
@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("name", KEPT_STATE)
def test_integer_runs_without_noise_match_floating_point_runs_up_to_rounding(
    name: str, trust: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model within 1e-6: truncation to the lattice, and clipping in units, cost no more."""
    last = {"algorithm__output": "last"} if name in ("trees that restart", "leaves") else {}
    exact = cell_of(name, trust, run__dtype="float64", **last)
    plain = exact.model_copy(update={"run": exact.run.model_copy(update={"arithmetic": "float"})})
    monkeypatch.setattr(KeyedDiscreteGaussian, "vector", lambda _, size, *of_noise: np.zeros(size, np.int64))
    monkeypatch.setattr(SeededNoise, "__call__", lambda *_: None)  # floating point: silos' noise, and the server's
    (one,), _ = run("inprocess", exact)
    (other,), _ = run("inprocess", plain)
    length = np.linalg.norm(other.cell_outcome.model)
    assert length > 1e-5
    atol = 1e-3 if trust == "secure-aggregation" else 1e-6  # what floating point rounds to, to add masked messages
    np.testing.assert_allclose(one.cell_outcome.model, other.cell_outcome.model, rtol=0.0, atol=atol * length)


def test_integer_runs_draw_no_floating_point_noise(small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above: what it sets to zero is all that a simulation draws."""

    def never(*_: object) -> None:
        raise AssertionError("floating-point noise in an exact run")

    monkeypatch.setattr(KeyedNormal, "vectors", never)
    monkeypatch.setattr(PrefetchedNoise, "vector", never)
    (outcome,), _ = run("inprocess", small_cell(run__arithmetic="integers"))
    assert torch.isfinite(torch.from_numpy(outcome.cell_outcome.model)).all()
    with pytest.raises(RunError, match="floating-point noise"):
        run("inprocess", small_cell())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"privacy": {"relation": "zero-out", "mode": "none"}}, "run.arithmetic = .* give a privacy target"),
        (
            {
                "algorithm": {
                    "name": "dp-ftrl",
                    "mechanism": "bisr",
                    "trust": "trusted",
                    "clip": 1.0,
                    "step": 0.1,
                },
                "privacy": {"relation": "zero-out", "mu": 1.0},
            },
            'dp-ftrl: what it releases cannot be made of integers: mechanism = "bisr"',
        ),
        (
            {"algorithm": PHASED, "privacy": {"relation": "zero-out", "mu": 1.0}},
            "phased-sgd: what it releases cannot be made of integers",
        ),
        (
            {"algorithm": SLIDING, "privacy": {"relation": "zero-out", "mu": 1.0}, "federation__epochs": 2},
            "momentum-tree-reduced: .* SlidingDifferences: its noise cannot be added to integers",
        ),
    ],
    ids=["no noise", "feedback", "phases", "sliding windows"],
)
def test_runs_without_an_integer_form_are_refused_with_the_reason(
    small_cell: MakeCell, changes: dict[str, Any], reason: str
) -> None:
    """By a simulation on integers, and by the plan of everything that really releases; others run."""
    cell = small_cell(run__arithmetic="integers", **changes)
    with pytest.raises(InputError, match=reason):
        make_plan(cell, load_task(cell).objective)
    plain = small_cell(**changes)
    assert make_plan(plain, load_task(plain).objective).exact_plan is None
    if plain.privacy.target_mu is not None:
        with pytest.raises(InputError, match=reason):
            make_plan(plain, load_task(plain).objective, for_release=True)


def test_the_vectorized_engine_refuses_integer_arithmetic(small_cell: MakeCell) -> None:
    with pytest.raises(InputError, match="use --engine inprocess"):
        run("vectorized", small_cell(run__arithmetic="integers"))


@pytest.mark.parametrize(("word", "width"), [(48, 6), (40, 5)])
def test_masked_messages_have_the_requested_bit_width_per_value(
    small_cell: MakeCell, word: int, width: int
) -> None:
    """The same model to the lattice's precision: what 40 bits cost is truncation."""
    cell = small_cell(algorithm__trust="secure-aggregation", run__arithmetic="integers", run__word=word)
    plan = make_plan(cell, load_task(cell).objective)
    assert plan.rounds[0].message_length == 7850 * width
    (outcome,), _ = run("inprocess", cell)
    assert outcome.cell_outcome.bytes_sent == 8 * 7850 * width
    assert np.linalg.norm(outcome.cell_outcome.model) > 1e-3


@pytest.mark.parametrize("name", ["tree", "aligned differences, clipped in parts", "trees that restart"])
def test_the_integer_increment_of_a_record_nearly_attains_and_never_exceeds_its_clip_norm(name: str) -> None:
    """Guarantee of `IntegerSteps.sum_increments`: one record a batch, far queries, every part, in Python's
    integers.
    """
    cell = cell_of(name, "trusted", run__dtype="float64")
    silo = SimulatedFederation.from_cell(cell).silo(0)
    exact, state = silo.plan.required_exact_plan, silo.initial_state()
    assert exact is not None
    assert silo.plan.batch_sizes[0] == 1
    generator = torch.Generator().manual_seed(1)
    for t in range(1, 9):
        query = 1e3 * torch.randn(7850, generator=generator, dtype=torch.float64)
        release, state = silo.answer(state, t, query)
        for vector, norm in zip(release.vector.reshape(-1, 7850).tolist(), exact.norms(t), strict=True):
            length = sum(value**2 for value in vector)
            assert length <= norm**2
            assert length == 0 or length > 0.99 * norm**2, t


@pytest.mark.parametrize("trust", ["untrusted", "secure-aggregation", "trusted"])
def test_sums_over_silos_never_exceed_the_planned_integer_range(small_cell: MakeCell, trust: str) -> None:
    """Every record of every silo at its bound in every round; where a server adds them up, all silos' together."""
    cell = small_cell(run__arithmetic="integers", federation__silos=40, algorithm__trust=trust)
    plan = make_plan(cell, load_task(cell).objective)
    together = max(plan.batch_sizes) if trust == "untrusted" else sum(plan.batch_sizes)
    strategy, largest = plan.required_exact_plan.inputs.factorization.strategy, 0
    state = strategy.initial_state()
    for t in range(1, plan.schedule.rounds + 1):
        output, state = strategy.step(
            state, t, np.full(1, together * plan.required_exact_plan.norms(t)[0], np.int64)
        )
        largest = max(largest, int(output[0]))
    assert largest <= plan.required_exact_plan.max_output


def test_the_record_capacity_covers_all_batches_of_the_largest_round(small_cell: MakeCell) -> None:
    """Three in an anchor's round: a guard counts the memory of the largest round."""
    algorithm = {
        "name": "goldstein-single-pass", "trust": "untrusted", "anchor_batches": 3, "smoothing": 0.4,
        "radius": 0.02, "period": 4, "anchor_clip": 5.0, "clip": 1.0, "window": 3, "step": 0.01, "output": "last",
        "oracle": "first-order",
    }  # fmt: skip
    cell = small_cell(
        algorithm=algorithm,
        federation={"silos": 3, "rounds": 11, "batch": 2},
        privacy={"relation": "zero-out", "mu": 1.0},
        run__arithmetic="integers",
    )
    plan = make_plan(cell, load_task(cell).objective)
    assert plan.record_capacity(0) == 2 * 3


def test_feature_scaling_and_training_rounds_each_get_half_of_the_slack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: the slack of a run, its first step included, is at most 2^-60."""
    cell = first_step_cell(tmp_path, run={"arithmetic": "integers"})
    rounds = assume_scaling(cell)
    alone = rounds.derive_cell(rounds.privacy, rounds.federation, rounds.algorithm)
    found = make_plan(alone, load_task(alone).objective)
    monkeypatch.setattr("fedpriv.plan.calibration.MAX_SLACK", 1.5 * found.required_exact_plan.claim.slack)
    make_plan(alone, load_task(alone).objective)
    with pytest.raises(InputError, match="are too many"):
        make_plan(rounds, load_task(rounds).objective)
