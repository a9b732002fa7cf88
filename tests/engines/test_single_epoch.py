"""The single-epoch algorithms on the engines: against literal transcriptions, silos do not matter, refusals."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpriv.claims.ledger import stream_from_data, stream_to_data
from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER, public_generator, simulation_noise
from fedpriv.papers.table import ALGORITHMS
from fedpriv.participation.orders import Phases
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.schema import Cell, FederationSection
from tests import oracle_single_epoch as oracle
from tests.engines.builders import ENGINES, QUIET, run, run_cell, small_cell

MakeCell = Callable[..., Cell]

SETTINGS: dict[str, dict[str, Any]] = {
    "accelerated-dp-srgd": {"clip": 11.0, "beta": 40.0, "radius": 2.0},
    "unaccelerated-dp-srgd": {"clip": 11.0, "beta": 40.0, "radius": 2.0},
    "accelerated-independent": {"clip": 11.0, "beta": 40.0, "radius": 2.0},
    "online-to-batch": {"clip": 11.0, "step": 0.01, "radius": 2.0, "power": 2},
    "dp-sgd": {"clip": 11.0, "step": 0.02, "radius": 2.0, "momentum": 0.5, "output": "average"},
    "noisy-minibatch": {"clip": 11.0, "step": 0.02, "radius": 2.0},
    "dp-ftrl": {"clip": 11.0, "step": 0.02, "momentum": 0.5},
    "phased-sgd": {"step": 0.01, "radius": 2.0},
    "momentum-tree": {"alpha": 0.2, "step": 0.05},
    "momentum-tree-reduced": {"alpha": 0.2, "step": 0.005},
    "momentum-tree-aligned": {"alpha": 0.2, "step": 0.05, "difference_clip": 0.5, "residual_clip": 0.2},
}


def single_epoch(name: str, trust: str = "trusted", **federation: Any) -> dict[str, Any]:
    return {
        "algorithm": {"name": name, "trust": trust, **SETTINGS[name]},
        "privacy": {"relation": "zero-out", "mu": 2.0},
        "federation": {"silos": 3, "rounds": 11, "samples": 130, "size_skew": 1.0, **federation},
    }


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "phased-sgd"])
def test_the_model_without_noise_does_not_depend_on_the_partition_into_silos(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The same 20 records a round in one silo, in four equal ones, in four unequal ones: the same model."""

    def in_rounds(_: object, sizes: list[int], __: int) -> list[np.ndarray[Any, Any]]:
        of_round = np.split(np.arange(240), 12)
        cuts = np.cumsum([size // 12 for size in sizes])[:-1]
        return [
            np.concatenate(parts) for parts in zip(*(np.split(numbers, cuts) for numbers in of_round), strict=True)
        ]

    monkeypatch.setattr("fedpriv.plan.task.partition_iid", in_rounds)
    models = []
    for batches in ((20,), (5, 5, 5, 5), (2, 3, 5, 10)):
        monkeypatch.setattr(FederationSection, "batch_sizes", lambda _self, _seed, batches=batches: batches)
        federation = {"silos": len(batches), "rounds": 12, "samples": 240}
        cell = small_cell(**{**single_epoch(name), "federation": federation, "privacy": QUIET})
        models.append(run_cell("vectorized", cell).model)
    assert np.linalg.norm(models[0]) > 1e-2
    for model in models[1:]:
        np.testing.assert_allclose(model, models[0], rtol=1e-9, atol=1e-12)


def test_gradient_evaluations_equal_the_counts_of_the_paper() -> None:
    """2n gradients but for the first batch, whose second coefficient is 0; n for independent gradients."""
    for name, count in (("accelerated-dp-srgd", 2 * 132 - 12), ("accelerated-independent", 132)):
        cell = small_cell(**single_epoch(name, samples=132), federation__size_skew=None)
        assert run_cell("vectorized", cell).gradient_evaluations == count


def test_phased_sgd_requires_a_curator_small_steps_and_the_lipschitz_clip(small_cell: MakeCell) -> None:
    """Broadcast settings, steps beyond 2/smoothness and clips below the Lipschitz constant are refused."""
    with pytest.raises(InputError, match=r"algorithm.trust = 'trusted': phased-sgd can be run with 'curator'"):
        small_cell(**single_epoch("phased-sgd", "trusted"))
    with pytest.raises(InputError, match=r"algorithm.trust = 'curator': dp-sgd can be run with"):
        small_cell(**single_epoch("dp-sgd", "curator"))
    for settings, line in (
        ({"step": 0.1}, "private only for finite steps up to"),
        ({"clip": 1.0}, "the clip must be the Lipschitz"),
    ):
        tree = single_epoch("phased-sgd", "curator")
        cell = small_cell(**{**tree, "algorithm": {**tree["algorithm"], **settings}})
        with pytest.raises(InputError, match=line):
            make_plan(cell, load_task(cell).objective)


@pytest.mark.slow
def test_phased_sgd_refuses_a_loss_not_known_to_be_convex_in_its_ball(
    small_cell: MakeCell,
) -> None:
    """A perceptron; least squares, whose constants hold in a ball; and softmax regression, everywhere."""
    tree = single_epoch("phased-sgd", "curator")
    squares = {"data": {"name": "linear-regression"}, "model": {"name": "least-squares", "ball": 2.0}}
    for changes in ({"model": {"name": "mlp"}}, squares | {"model": {"name": "least-squares", "ball": 1.99}}):
        cell = small_cell(**tree, **changes)
        with pytest.raises(InputError, match="rests on a convex loss"):
            make_plan(cell, load_task(cell).objective)
    admitted = small_cell(**tree, **squares)
    assert make_plan(admitted, load_task(admitted).objective).mechanism
    measured = small_cell(**tree, run__goldstein_radius=0.1)
    assert make_plan(measured, load_task(measured).objective).mechanism


def test_phased_sgd_reads_each_record_once_and_meets_its_mu_target(small_cell: MakeCell) -> None:
    cell = small_cell(**single_epoch("phased-sgd", "curator", rounds=12, samples=130))
    assert cell.schedule == Phases((6, 3, 1))
    (outcome,), heard = run("vectorized", cell)
    assert outcome.cell_outcome.gradient_evaluations == 10 * sum(cell.batch_sizes)
    (stream,) = outcome.cell_outcome.releases
    assert stream.mu == pytest.approx(2.0, rel=1e-9)
    assert stream_from_data(stream_to_data(stream)) == stream
    assert heard.rounds == 13


ROUNDS, CLIP, MU, POWER = 13, 10.0, 3.0, 2

SRGD = {"beta": 20.0, "radius": 0.5}
ROWS: dict[str, tuple[dict[str, Any], Callable[[oracle.Setup], oracle.Vector]]] = {
    "accelerated-dp-srgd": (SRGD, lambda setup: oracle.accelerated_dp_srgd(setup, 20.0, 0.5)),
    "unaccelerated-dp-srgd": (SRGD, lambda setup: oracle.unaccelerated_dp_srgd(setup, 20.0, 0.5)),
    "accelerated-independent": (SRGD, lambda setup: oracle.accelerated_independent(setup, 20.0, 0.5)),
    "online-to-batch": (
        {"step": 0.001, "radius": 0.5, "power": POWER},
        lambda setup: oracle.online_to_batch(setup, 0.001, 0.5, POWER),
    ),
    "dp-ftrl": (
        {"step": 0.01, "radius": 0.5, "momentum": 0.5},
        lambda setup: oracle.dp_ftrl(setup, 0.01, 0.5, 0.5),
    ),
    "phased-sgd": ({"step": 0.01, "radius": 0.5}, lambda setup: oracle.phased_sgd(setup, ROUNDS, 0.01, 0.5)),
}
LIPSCHITZ = (2 * 785) ** 0.5  # √2 max‖z‖: the phased method's clip, which never bites


def clip_of(name: str) -> float:
    return LIPSCHITZ if name == "phased-sgd" else CLIP


def sensitivity(name: str) -> float:
    """Zero-out: the clip times the root of the number of releases or tree nodes that hold the worst record."""
    if name in ("accelerated-independent", "phased-sgd"):
        return clip_of(name)
    growth = POWER - 1 if name == "online-to-batch" else 0
    return max(CLIP * t**growth * oracle.nodes_holding(t, ROUNDS) ** 0.5 for t in range(1, ROUNDS + 1))


def setup_of(cell: Cell, batches: list[Any], clip: float, unit: float, normal: Any) -> oracle.Setup:
    """What a transcription needs, with the record numbers of every round and silo."""
    train, trusted = load_task(cell).train, cell.algorithm.trust != "untrusted"
    features, labels = ([part[rows].numpy() for rows in batches] for part in (train.features, train.labels))
    return oracle.Setup(features, labels, classes=10, clip=clip, unit=unit, trusted=trusted, normal=normal)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "trust"), [(name, trust) for name in ROWS for trust in ALGORITHMS[name].trusts])
def test_both_engines_equal_literal_transcriptions_of_the_single_epoch_algorithms(
    engine: str, name: str, trust: str
) -> None:
    """Silos of unequal size, increments clipped: σ = sensitivity/(μ B), B a silo's batch or all of them.

    With secure aggregation the noise is the sum of equal shares, and messages are rounded to 2^-26 of one.
    """
    settings, transcription = ROWS[name]
    cell = small_cell(
        algorithm={"name": name, "trust": trust, "clip": clip_of(name), **settings},
        privacy={"relation": "zero-out", "mu": MU},
        federation={"silos": 3, "rounds": ROUNDS, "samples": 150, "size_skew": 1.0},
    )
    assert len(set(cell.batch_sizes)) > 1
    task, noise = load_task(cell), simulation_noise(cell.seed, np.float64)
    size = task.objective.dimension
    batches = [share.reshape(cell.schedule.batches_per_silo, -1) for share in partition_records(cell)]

    def normal(owner: int, t: int) -> NDArray[np.floating]:
        if owner < 0 and cell.algorithm.trust_setting.masked:
            return noise.weighted_sum(size, [0, 1, 2], [3**-0.5] * 3, t)
        return noise.vector(size, SERVER if owner < 0 else owner, t)

    setup = setup_of(cell, batches, clip_of(name), sensitivity(name) / MU, normal)
    expected, outcome = transcription(setup), run_cell(engine, cell)
    rounding = 1e-7 * np.linalg.norm(expected) if cell.algorithm.trust_setting.masked else 0.0
    np.testing.assert_allclose(outcome.model, expected, rtol=1e-9, atol=1e-12 + rounding)
    assert np.linalg.norm(expected) > 1e-3
    assert outcome.fraction_clipped is not None
    assert (outcome.fraction_clipped > 0.0) == (name != "phased-sgd")


SGD = {"name": "dp-sgd", "clip": CLIP, "step": 0.02, "radius": 0.5}


def descent(cell: Cell, unit: float) -> list[oracle.Vector]:
    """The iterates of noisy gradient descent on the records of a cell, written out."""
    task, noise = load_task(cell), simulation_noise(cell.seed, np.float64)
    size, held = task.objective.dimension, cell.schedule.batches_per_silo
    batches = [
        np.resize(share.reshape(held, -1), (cell.schedule.rounds, len(share) // held))
        for share in partition_records(cell)
    ]

    def normal(owner: int, t: int) -> NDArray[np.floating]:
        return noise.vector(size, SERVER if owner < 0 else owner, t)

    return oracle.noisy_descent(setup_of(cell, batches, CLIP, unit, normal), 0.02, 0.5)


@pytest.mark.parametrize("engine", ENGINES)
def test_dp_sgd_with_random_output_publishes_a_seeded_random_iterate(engine: str) -> None:
    """Sensitivity 2 C of one release, as neighbours replace a record; U is the same whatever the records are."""
    for seed in (0, 1):
        cell = small_cell(
            algorithm={**SGD, "trust": "trusted", "output": "random"},
            privacy={"relation": "replace-one", "mu": MU},
            federation={"silos": 1, "rounds": 13, "samples": 13, "batch": 1},
            seed=seed,
        )
        iterates = descent(cell, 2.0 * CLIP / MU)
        outcome = run_cell(engine, cell)
        chosen = int(public_generator(seed, "output iterate").integers(1, 14))
        np.testing.assert_allclose(outcome.model, iterates[chosen - 1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_full_batch_dp_sgd_equals_a_literal_transcription_of_dp_gradient_descent(trust: str) -> None:
    """T releases, each of which a record moves by C/B: √T C in all."""
    cell = small_cell(
        algorithm={**SGD, "trust": trust},
        privacy={"relation": "zero-out", "mu": MU},
        federation={"silos": 2, "rounds": 7, "epochs": 7, "samples": 60},
    )
    assert sum(cell.batch_sizes) == 60
    outcome = run_cell("vectorized", cell)
    expected = descent(cell, CLIP * 7**0.5 / MU)[-1]
    np.testing.assert_allclose(outcome.model, expected, rtol=1e-12, atol=1e-13)
