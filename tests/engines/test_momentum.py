"""The momentum rows as they run: golden runs, clipped parts, refusals, and the silo's own check."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.claims.ledger import make_release_streams
from fedpriv.claims.outcome import count_gradient_evaluations
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import Estimator, PlainGradient, SplitGradient
from fedpriv.loss.objective import Batch, Increment, ModelEvaluation, Query, Records
from fedpriv.noise.differences import AlignedDifferences
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.sliding import SlidingDifferences
from fedpriv.noise.tree import BinaryTree
from fedpriv.papers.tran_cutkosky import NormalizedSGD, movement_bound
from fedpriv.participation.orders import FixedOrder
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.rounds.floats import initial_running_sum, update_running_sum
from fedpriv.scenario.schema import Cell
from fedpriv.show.statement import loss_assumption
from tests.engines.test_engines import run
from tests.oracle_momentum import (
    GOLDEN_ALPHA,
    GOLDEN_MIXING,
    GOLDEN_PLACES,
    GOLDEN_RECORDS,
    GOLDEN_ROUNDS,
    GOLDEN_START,
    GOLDEN_STDS,
    GOLDEN_STEP,
    Step,
    Vector,
    golden_noise,
)
from tests.papers.test_momentum_theory import golden_reduced_run, golden_tree_run

MakeCell = Callable[..., Cell]

REDUCED = {"name": "momentum-tree-reduced", "alpha": 0.2, "step": 0.0001}
ALIGNED = {"name": "momentum-tree-aligned", "alpha": 0.2, "step": 0.0001}
IN_PARTS = {**ALIGNED, "step": 0.05, "difference_clip": 0.5, "residual_clip": 0.2}
TREE = {"name": "momentum-tree", "alpha": 0.2, "step": 0.05}


def momentum_tree(algorithm: dict[str, Any], trust: str = "untrusted", **privacy: Any) -> dict[str, Any]:
    return {
        "algorithm": {"trust": trust, **algorithm},
        "privacy": {"relation": "replace-one", "mu": 2.0, **privacy},
        "federation": {"silos": 3, "rounds": 20, "epochs": 4, "samples": 75, "size_skew": 2.0},
    }


class Tanh:
    """The golden loss: gradient tanh(⟨w, x⟩) x, one record a round."""

    dimension, lipschitz, smoothness = 2, 1.0, 1.0

    def initial(self) -> Tensor:
        return torch.from_numpy(GOLDEN_START)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        (x,), total = batch.records.features, torch.zeros(2, dtype=torch.float64)
        for point, coefficient in zip(*query, strict=True):
            total = total + coefficient * torch.tanh(point @ x) * x
        factor = torch.clamp(clip / total.norm(), max=1.0)
        return Increment(batch.weights[0] * factor * total, (factor < 1.0).double())

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        raise NotImplementedError


def golden_run(estimator: Estimator, mechanism: Mechanism, fresh: Callable[[int], Tensor]) -> list[Step]:
    """The parts of fedpriv put together for one silo with one record a round."""
    objective, optimizer = Tanh(), NormalizedSGD(GOLDEN_STEP)
    state, hidden = optimizer.start(objective.initial()), mechanism.start()
    total, steps = initial_running_sum(objective.initial()), []
    for t in range(1, GOLDEN_ROUNDS + 1):
        current = estimator.round(t)
        record = torch.from_numpy(GOLDEN_RECORDS[[(t - 1) % GOLDEN_PLACES]])
        batch, weights = Records(record, torch.zeros(1)), torch.ones(1, dtype=torch.float64)
        total, _ = update_running_sum(
            total, current, optimizer.query(state), objective, batch, weights, estimator.memory
        )
        noise, hidden = mechanism.noise(hidden, t, fresh(t))
        released = total.total + noise
        state = optimizer.update(state, released, current)
        steps.append(Step(total.total.numpy(), released.numpy(), optimizer.query(state).numpy()))
    return steps


def momentum() -> PlainGradient:
    return PlainGradient(GOLDEN_ALPHA, coefficient=GOLDEN_ALPHA, decay=1.0 - GOLDEN_ALPHA)


def check_equal(found: list[Step], expected: list[Step]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for part, literal in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(part, literal, atol=1e-11)


def test_algorithm_1_is_its_golden_run() -> None:
    def fresh(t: int) -> Tensor:
        level = (t & -t).bit_length() - 1
        return torch.from_numpy(0.05 * golden_noise(0, level, (t >> level) - 1))

    check_equal(golden_run(momentum(), BinaryTree(1.0 - GOLDEN_ALPHA), fresh), golden_tree_run())


def test_algorithm_2_with_one_gradient_a_step_is_its_golden_run() -> None:
    """The literal algorithm takes 3T - min(T, N) gradients; α is folded into the standard deviations."""
    early, late, difference, residual = (GOLDEN_ALPHA * std for std in GOLDEN_STDS)
    mechanism = SlidingDifferences(
        GOLDEN_PLACES, GOLDEN_MIXING, 1.0, 1.0, GOLDEN_STEP, 1.0 - GOLDEN_ALPHA, early, late, difference, residual
    )
    trees = {"gradient": 1, "difference": 2, "residual": 3}

    def fresh(t: int) -> Tensor:
        nodes = [golden_noise(trees[tree], k, (t >> k) - 1) for tree, k in mechanism.fresh_nodes(t)]
        return torch.from_numpy(np.array(nodes))

    check_equal(golden_run(momentum(), mechanism, fresh), golden_reduced_run())


def silent() -> AlignedDifferences:
    return AlignedDifferences(GOLDEN_PLACES, GOLDEN_MIXING, 1.0, 1.0, None, 1.0 - GOLDEN_ALPHA, 0.0, 0.0, 0.0, 0.0)


def in_parts(clip: float, difference: float, residual: float) -> SplitGradient:
    return SplitGradient(
        GOLDEN_ALPHA * clip,
        GOLDEN_ALPHA * difference,
        GOLDEN_ALPHA * residual,
        GOLDEN_MIXING,
        GOLDEN_PLACES,
        GOLDEN_ALPHA,
        1.0 - GOLDEN_ALPHA,
    )


def zeros(t: int) -> Tensor:
    return torch.zeros(3, 2, dtype=torch.float64)[: silent().draws(t)]


def test_parts_that_no_clip_touches_add_up_to_momentum() -> None:
    check_equal(golden_run(in_parts(9.0, 9.0, 9.0), silent(), zeros), golden_run(momentum(), silent(), zeros))


def test_clipped_parts_are_the_literal_reconstruction() -> None:
    """Q_{q,p} and its sums over epochs by their definition, along the run that the clipped parts make."""
    clips = (0.3, 0.02, 0.05)
    steps = golden_run(in_parts(*clips), silent(), zeros)
    points = [GOLDEN_START, *(step.after for step in steps)]
    decay = 1.0 - GOLDEN_ALPHA

    def clipped(vector: Vector, norm: float) -> Vector:
        return np.asarray(vector * min(1.0, norm / max(float(np.linalg.norm(vector)), 1e-300)))

    def gradient(t: int, point: Vector) -> Vector:
        x = GOLDEN_RECORDS[(t - 1) % GOLDEN_PLACES]
        return np.asarray(np.tanh(point @ x) * x)

    def anchor(epoch: int) -> Vector:
        return points[epoch * GOLDEN_PLACES]

    def terms(t: int) -> tuple[Vector, Vector, Vector]:
        epoch = (t - 1) // GOLDEN_PLACES
        own = gradient(t, anchor(epoch))
        change = own - gradient(t, anchor(epoch - 1)) if epoch else np.zeros(2)
        residual = gradient(t, points[t - 1]) - own
        return clipped(own, clips[0]), clipped(change, clips[1]), clipped(residual, clips[2])

    def estimate(epoch: int, place: int) -> Vector:
        rounds = range(epoch * GOLDEN_PLACES + 1, epoch * GOLDEN_PLACES + place + 1)
        own, change, _ = (sum(decay ** (rounds[-1] - t) * terms(t)[part] for t in rounds) for part in range(3))
        if epoch == 0:
            return np.asarray(own)
        before = estimate(epoch - 1, place)
        return np.asarray((1 - GOLDEN_MIXING) * (before + change) + GOLDEN_MIXING * own)

    bites = 0
    for t, step in enumerate(steps, start=1):
        epoch, place = (t - 1) // GOLDEN_PLACES, (t - 1) % GOLDEN_PLACES + 1
        expected = estimate(epoch, place)
        for k in range(epoch):
            expected = expected + decay ** (place + (epoch - 1 - k) * GOLDEN_PLACES) * estimate(k, GOLDEN_PLACES)
        expected = expected + sum(decay ** (t - i) * terms(i)[2] for i in range(1, t + 1))
        np.testing.assert_allclose(step.momentum, GOLDEN_ALPHA * expected, atol=1e-13)
        bites += sum(np.linalg.norm(term) > 0.999 * clip for term, clip in zip(terms(t), clips, strict=True))
    assert bites > 5


def test_gradients_of_clipped_parts_are_counted(small_cell: MakeCell) -> None:
    """One a round, and for parts: one at the start, two more from round 2 on, four more from epoch 2 on."""
    for algorithm, rounds in ((TREE, 20), (REDUCED, 20), (ALIGNED, 20), (IN_PARTS, 1 + 4 * 3 + 3 * (3 + 4 * 5))):
        assert count_gradient_evaluations(planned(small_cell, momentum_tree(algorithm)), 20) == 15 * rounds


def test_without_noise_all_three_rows_are_momentum(small_cell: MakeCell) -> None:
    models = []
    for algorithm in (
        {**TREE, "step": 0.0001},
        REDUCED,
        ALIGNED,
        {**ALIGNED, **{"difference_clip": 1e3, "residual_clip": 1e3}},
    ):
        tree = momentum_tree(algorithm)
        tree["privacy"] = {"relation": "replace-one", "mode": "none"}
        models.append(run("vectorized", small_cell(**tree))[0][0].cell_outcome.model)
    assert np.linalg.norm(models[0]) > 1e-4
    for model in models[1:]:
        np.testing.assert_allclose(model, models[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "stops"), [(REDUCED, True), (ALIGNED, True), (TREE, False), (IN_PARTS, False)]
)
def test_a_silo_stops_when_the_query_moves_too_far(
    small_cell: MakeCell, algorithm: dict[str, Any], stops: bool
) -> None:
    """η (1 + 1e-6) a round and no more, where the noise rests on it."""
    silo = SimulatedFederation.from_cell(small_cell(**momentum_tree(algorithm))).silo(0)
    start = torch.zeros(silo.plan.objective.dimension, dtype=torch.float64)
    away = torch.nn.functional.normalize(torch.ones_like(start), dim=0)
    _, state = silo.answer(silo.initial_state(), 1, start)
    _, state = silo.answer(state, 2, start + 0.9999999 * movement_bound(algorithm["step"]) * away)
    last = start + 0.9999999 * movement_bound(algorithm["step"]) * away
    far = last + (1.0 + 3e-6) * algorithm["step"] * away
    if stops:
        with pytest.raises(RunError, match="moved by"):
            silo.answer(state, 3, far)
    else:
        silo.answer(state, 3, far)
    silo.answer(state, 3, last - (1.0 + 5e-7) * algorithm["step"] * away)


def planned(make: MakeCell, tree: dict[str, Any]) -> Plan:
    cell = make(**tree)
    return make_plan(cell, load_task(cell).objective)


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        ({**REDUCED, "order": "fresh"}, "same record"),
        ({**REDUCED, "calibration": "paper"}, "6 on"),
        ({**IN_PARTS, "residual_clip": None}, "both or none"),
        ({**REDUCED, "gamma": 1.0}, "a number below 1"),
        ({**TREE, "calibration": "paper", "alpha": 0.1}, "at least 1/N"),
    ],
)
def test_refusals(small_cell: MakeCell, algorithm: dict[str, Any], line: str) -> None:
    given = {key: value for key, value in algorithm.items() if value is not None}
    with pytest.raises(InputError, match=line):
        planned(small_cell, momentum_tree(given))


@pytest.mark.parametrize("algorithm", [TREE, REDUCED])
def test_the_papers_noise_is_refused_beyond_its_condition(small_cell: MakeCell, algorithm: dict[str, Any]) -> None:
    tree = momentum_tree({**algorithm, "calibration": "paper"})
    tree["federation"] = {"silos": 3, "rounds": 40, "epochs": 4}
    tree["privacy"] = {"relation": "replace-one", "epsilon": 1.0, "delta": 1e-5}
    exact = {**tree, "algorithm": {**tree["algorithm"], "calibration": "exact"}}
    workload, errors = Workload(FixedOrder(40, 10), 0.8, np.ones(40)), []
    for each in (tree, exact):
        plan = planned(small_cell, each)
        errors.append(plan.noise.std_in_mean * plan.mechanism.mean_variance(workload) ** 0.5)
    assert 3.0 < errors[0] / errors[1] < 12.0
    tree["privacy"]["epsilon"] = 12.0
    with pytest.raises(InputError, match="ln"):
        planned(small_cell, tree)


def test_rows_tie_noise_steps_and_smoothness_to_the_same_numbers(small_cell: MakeCell) -> None:
    """α L η N between epoch starts, α L η a round, with the rounding that silos allow; or α times the clips."""
    objective = load_task(small_cell()).objective
    rounds_per_epoch, alpha = 5, 0.2
    for algorithm in (REDUCED, ALIGNED):
        plan = planned(small_cell, momentum_tree(algorithm))
        mechanism, step = plan.mechanism, movement_bound(0.0001)
        assert isinstance(mechanism, SlidingDifferences | AlignedDifferences)
        assert mechanism.movement == step
        assert mechanism.residual == pytest.approx(alpha * objective.smoothness * step, rel=1e-12)
        assert mechanism.difference == pytest.approx(rounds_per_epoch * mechanism.residual, rel=1e-12)
        assert plan.optimizer == NormalizedSGD(0.0001)
        assert plan.estimator.round(3).clip == pytest.approx(alpha * objective.lipschitz, rel=1e-12)
    plan = planned(small_cell, momentum_tree(IN_PARTS))
    assert isinstance(plan.mechanism, AlignedDifferences)
    assert isinstance(plan.estimator, SplitGradient)
    assert plan.mechanism.movement is None
    assert plan.mechanism.difference == plan.estimator.difference_clip == pytest.approx(alpha * 0.5)
    assert plan.mechanism.residual == plan.estimator.residual_clip == pytest.approx(alpha * 0.2)
    assert plan.mechanism.decay == plan.estimator.decay == 1.0 - alpha


def test_a_difference_is_charged_what_two_clipped_gradients_can_differ_by(small_cell: MakeCell) -> None:
    """Guarantee: α min(LηN, 2G); with long steps α g_t is C at one epoch's start and -C at the next, no more."""
    plans = [
        planned(
            small_cell, momentum_tree({"name": "momentum-tree-reduced", "clip": 2.0, "alpha": 0.5, "step": step})
        )
        for step in (1e-6, 100.0)
    ]
    short, long = (plan.mechanism for plan in plans)
    assert isinstance(short, SlidingDifferences)
    assert isinstance(long, SlidingDifferences)
    assert short.difference == pytest.approx(short.residual * plans[0].schedule.rounds_per_epoch)
    assert long.difference == 2.0 * plans[1].max_clip == 2.0 * 0.5 * 2.0


def test_a_model_without_known_smoothness_is_refused_unless_differences_are_clipped(small_cell: MakeCell) -> None:
    for algorithm, works in ((REDUCED, False), (ALIGNED, False), (IN_PARTS, True)):
        tree = momentum_tree({**algorithm, "clip": 1.0}) | {"model": {"name": "mlp", "hidden": 4}}
        if works:
            assert planned(small_cell, tree).noise.sources
        else:
            with pytest.raises(InputError, match="smoothness"):
                planned(small_cell, tree)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [REDUCED, ALIGNED])
@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
def test_an_honest_float32_run_goes_through(
    small_cell: MakeCell, tmp_path: Path, algorithm: dict[str, Any], engine: str
) -> None:
    """400 rounds in the default type: steps that are rounded to float32 stay below the movement charged.

    With few features a step's rounding is not averaged out.
    """
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 80)
    features = generator.standard_normal((80, 3)) + 2.0 * labels[:, None]
    own = {f"{part}_images": features for part in ("train", "test")}
    np.savez(tmp_path / "own.npz", **own, train_labels=labels, test_labels=labels, classes=2)
    tree = momentum_tree(algorithm)
    tree["data"] = {"name": str(tmp_path / "own.npz")}
    tree["model"] = {"name": "softmax-regression", "feature_norm": 1.0}
    tree["federation"] = {"silos": 2, "rounds": 400, "epochs": 10}
    tree["run"] = {"dtype": "float32", "evaluations": 1}
    assert run(engine, small_cell(**tree))[0][0].cell_outcome is not None


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
def test_every_engine_stops_an_optimizer_that_moves_too_far(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """A run whose noise rests on short steps, and takes longer ones, would claim what it does not keep."""
    honest = NormalizedSGD.update

    def longer(optimizer: NormalizedSGD, state: Any, released: Tensor, current: Any) -> Any:
        return honest(NormalizedSGD(2.0 * optimizer.step, optimizer.output_round), state, released, current)

    monkeypatch.setattr(NormalizedSGD, "update", longer)
    with pytest.raises(RunError, match=r"round 2: the query moved by 0\.0002"):
        run(engine, small_cell(**momentum_tree(REDUCED)))


@pytest.mark.parametrize(
    ("algorithm", "assumed"), [(REDUCED, True), (ALIGNED, True), (TREE, False), (IN_PARTS, False)]
)
def test_a_mechanism_says_what_it_assumes_of_the_loss(
    small_cell: MakeCell, algorithm: dict[str, Any], assumed: bool
) -> None:
    """And so does the description of its noise in every report: such a claim is none for any loss."""
    plan = planned(small_cell, momentum_tree(algorithm))
    assumption = plan.mechanism.assumption
    assert (assumption is not None) == assumed
    assert ("rests on the loss's smoothness" in loss_assumption(make_release_streams(plan, 20)[0])) == assumed
