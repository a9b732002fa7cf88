"""The momentum rows as they run: golden runs, clipped parts, refusals, and the silo's own check."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.claims.ledger import make_release_streams
from fedpriv.claims.outcome import count_gradient_evaluations
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import RunError
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
from fedpriv.plan.plan import Plan
from fedpriv.plan.task import load_task
from fedpriv.rounds.floats import initial_running_sum, update_running_sum
from fedpriv.scenario.schema import Cell
from fedpriv.show.statement import loss_assumption
from tests import oracle_momentum as oracle
from tests.engines.builders import plan_cell, refusal, run, run_cell, small_cell
from tests.oracle_momentum import Step, Vector
from tests.papers.test_momentum_theory import golden_reduced_run, golden_tree_run

ALPHA, MIXING, PLACES, STEP = oracle.GOLDEN_ALPHA, oracle.GOLDEN_MIXING, oracle.GOLDEN_PLACES, oracle.GOLDEN_STEP
REDUCED = {"name": "momentum-tree-reduced", "alpha": 0.2, "step": 0.0001}
ALIGNED = {"name": "momentum-tree-aligned", "alpha": 0.2, "step": 0.0001}
IN_PARTS = {**ALIGNED, "step": 0.05, "difference_clip": 0.5, "residual_clip": 0.2}
TREE = {"name": "momentum-tree", "alpha": 0.2, "step": 0.05}
MOVEMENT_MATTERS = [(REDUCED, True), (ALIGNED, True), (TREE, False), (IN_PARTS, False)]
"""Whether a row's noise rests on short steps and a smooth loss."""


def momentum_cell(row: dict[str, Any], **changes: Any) -> Cell:
    """Three silos of unequal size, four epochs of five rounds."""
    changes = {
        "algorithm": {"trust": "untrusted", **{key: value for key, value in row.items() if value is not None}},
        "privacy": {"relation": "replace-one", "mu": 2.0},
        "federation": {"silos": 3, "rounds": 20, "epochs": 4, "samples": 75, "size_skew": 2.0},
        **changes,
    }
    return small_cell(**changes)


def momentum_plan(row: dict[str, Any], **changes: Any) -> Plan:
    return plan_cell(momentum_cell(row, **changes))


class Tanh:
    """The golden loss: gradient tanh(⟨w, x⟩) x, one record a round."""

    dimension, lipschitz, smoothness = 2, 1.0, 1.0

    def initial(self) -> Tensor:
        return torch.from_numpy(oracle.GOLDEN_START)

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
    objective, optimizer = Tanh(), NormalizedSGD(STEP)
    state, hidden = optimizer.start(objective.initial()), mechanism.start()
    total, steps = initial_running_sum(objective.initial()), []
    for t in range(1, oracle.GOLDEN_ROUNDS + 1):
        current = estimator.round(t)
        record = torch.from_numpy(oracle.GOLDEN_RECORDS[[(t - 1) % PLACES]])
        batch, weights = Records(record, torch.zeros(1)), torch.ones(1, dtype=torch.float64)
        query = optimizer.query(state)
        total, _ = update_running_sum(total, current, query, objective, batch, weights, estimator.memory)
        noise, hidden = mechanism.noise(hidden, t, fresh(t))
        released = total.total + noise
        state = optimizer.update(state, released, current)
        steps.append(Step(total.total.numpy(), released.numpy(), optimizer.query(state).numpy()))
    return steps


def momentum() -> PlainGradient:
    return PlainGradient(ALPHA, coefficient=ALPHA, decay=1.0 - ALPHA)


def check_equal(steps: list[Step], expected: list[Step]) -> None:
    for ours, theirs in zip(steps, expected, strict=True):
        for part, literal in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(part, literal, atol=1e-11)


def test_algorithm_1_of_the_momentum_paper_reproduces_its_reference_run() -> None:
    def fresh(t: int) -> Tensor:
        level = (t & -t).bit_length() - 1
        return torch.from_numpy(0.05 * oracle.golden_noise(0, level, (t >> level) - 1))

    check_equal(golden_run(momentum(), BinaryTree(1.0 - ALPHA), fresh), golden_tree_run())


def test_algorithm_2_of_the_momentum_paper_reproduces_its_reference_run() -> None:
    """The literal algorithm takes 3T - min(T, N) gradients; α is folded into the standard deviations."""
    early, late, difference, residual = (ALPHA * std for std in oracle.GOLDEN_STDS)
    mechanism = SlidingDifferences(PLACES, MIXING, 1.0, 1.0, STEP, 1.0 - ALPHA, early, late, difference, residual)
    trees = {"gradient": 1, "difference": 2, "residual": 3}

    def fresh(t: int) -> Tensor:
        nodes = [oracle.golden_noise(trees[tree], k, (t >> k) - 1) for tree, k in mechanism.fresh_nodes(t)]
        return torch.from_numpy(np.array(nodes))

    check_equal(golden_run(momentum(), mechanism, fresh), golden_reduced_run())


def silent() -> AlignedDifferences:
    return AlignedDifferences(PLACES, MIXING, 1.0, 1.0, None, 1.0 - ALPHA, 0.0, 0.0, 0.0, 0.0)


def in_parts(*clips: float) -> SplitGradient:
    clip, difference, residual = (ALPHA * norm for norm in clips)
    return SplitGradient(clip, difference, residual, MIXING, PLACES, ALPHA, 1.0 - ALPHA)


def zeros(t: int) -> Tensor:
    return torch.zeros(3, 2, dtype=torch.float64)[: silent().draws(t)]


def test_split_gradients_without_active_clipping_equal_momentum() -> None:
    check_equal(golden_run(in_parts(9.0, 9.0, 9.0), silent(), zeros), golden_run(momentum(), silent(), zeros))


def test_clipped_split_gradients_equal_a_literal_transcription() -> None:
    """Q_{q,p} and its sums over epochs by their definition, along the run that the clipped parts make."""
    clips = (0.3, 0.02, 0.05)
    steps = golden_run(in_parts(*clips), silent(), zeros)
    points = [oracle.GOLDEN_START, *(step.after for step in steps)]
    decay = 1.0 - ALPHA

    def clipped(vector: Vector, norm: float) -> Vector:
        return np.asarray(vector * min(1.0, norm / max(float(np.linalg.norm(vector)), 1e-300)))

    def gradient(t: int, point: Vector) -> Vector:
        x = oracle.GOLDEN_RECORDS[(t - 1) % PLACES]
        return np.asarray(np.tanh(point @ x) * x)

    def anchor(epoch: int) -> Vector:
        return points[epoch * PLACES]

    def terms(t: int) -> tuple[Vector, Vector, Vector]:
        epoch = (t - 1) // PLACES
        own = gradient(t, anchor(epoch))
        change = own - gradient(t, anchor(epoch - 1)) if epoch else np.zeros(2)
        residual = gradient(t, points[t - 1]) - own
        return clipped(own, clips[0]), clipped(change, clips[1]), clipped(residual, clips[2])

    def estimate(epoch: int, place: int) -> Vector:
        rounds = range(epoch * PLACES + 1, epoch * PLACES + place + 1)
        own, change, _ = (sum(decay ** (rounds[-1] - t) * terms(t)[part] for t in rounds) for part in range(3))
        if epoch == 0:
            return np.asarray(own)
        before = estimate(epoch - 1, place)
        return np.asarray((1 - MIXING) * (before + change) + MIXING * own)

    bites = 0
    for t, step in enumerate(steps, start=1):
        epoch, place = (t - 1) // PLACES, (t - 1) % PLACES + 1
        expected = estimate(epoch, place)
        for k in range(epoch):
            expected = expected + decay ** (place + (epoch - 1 - k) * PLACES) * estimate(k, PLACES)
        expected = expected + sum(decay ** (t - i) * terms(i)[2] for i in range(1, t + 1))
        np.testing.assert_allclose(step.momentum, ALPHA * expected, atol=1e-13)
        bites += sum(np.linalg.norm(term) > 0.999 * clip for term, clip in zip(terms(t), clips, strict=True))
    assert bites > 5


def test_gradient_evaluations_of_the_momentum_algorithms_are_counted() -> None:
    """One a round, and for parts: one at the start, two more from round 2 on, four more from epoch 2 on."""
    for algorithm, rounds in ((TREE, 20), (REDUCED, 20), (ALIGNED, 20), (IN_PARTS, 1 + 4 * 3 + 3 * (3 + 4 * 5))):
        assert count_gradient_evaluations(momentum_plan(algorithm), 20) == 15 * rounds


def test_all_momentum_algorithms_agree_without_noise() -> None:
    models = []
    unclipped = {**ALIGNED, "difference_clip": 1e3, "residual_clip": 1e3}
    for algorithm in ({**TREE, "step": 0.0001}, REDUCED, ALIGNED, unclipped):
        quiet = {"relation": "replace-one", "mode": "none"}
        models.append(run_cell("vectorized", momentum_cell(algorithm, privacy=quiet)).model)
    assert np.linalg.norm(models[0]) > 1e-4
    for model in models[1:]:
        np.testing.assert_allclose(model, models[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("algorithm", "stops"), MOVEMENT_MATTERS)
def test_a_silo_stops_at_a_query_beyond_the_movement_bound_of_its_mechanism(
    algorithm: dict[str, Any], stops: bool
) -> None:
    """η (1 + 1e-6) a round and no more, where the noise rests on it."""
    silo = SimulatedFederation.from_cell(momentum_cell(algorithm)).silo(0)
    start = torch.zeros(silo.plan.objective.dimension, dtype=torch.float64)
    away = torch.nn.functional.normalize(torch.ones_like(start), dim=0)
    last = start + 0.9999999 * movement_bound(algorithm["step"]) * away
    _, state = silo.answer(silo.initial_state(), 1, start)
    _, state = silo.answer(state, 2, last)
    with refusal("moved by", RunError) if stops else nullcontext():
        silo.answer(state, 3, last + (1.0 + 3e-6) * algorithm["step"] * away)
    silo.answer(state, 3, last - (1.0 + 5e-7) * algorithm["step"] * away)


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
def test_invalid_settings_of_the_momentum_algorithms_are_refused(algorithm: dict[str, Any], line: str) -> None:
    with refusal(line):
        momentum_plan(algorithm)


@pytest.mark.parametrize("algorithm", [TREE, REDUCED])
def test_the_noise_calibration_of_the_paper_is_refused_outside_its_conditions(algorithm: dict[str, Any]) -> None:
    def plan_calibrated(calibration: str, epsilon: float) -> Plan:
        privacy = {"relation": "replace-one", "epsilon": epsilon, "delta": 1e-5}
        federation = {"silos": 3, "rounds": 40, "epochs": 4}
        return momentum_plan({**algorithm, "calibration": calibration}, privacy=privacy, federation=federation)

    workload, errors = Workload(FixedOrder(40, 10), 0.8, np.ones(40)), []
    for calibration in ("paper", "exact"):
        plan = plan_calibrated(calibration, 1.0)
        errors.append(plan.noise.std_in_mean * plan.mechanism.mean_variance(workload) ** 0.5)
    assert 3.0 < errors[0] / errors[1] < 12.0
    with refusal("ln"):
        plan_calibrated("paper", 12.0)


def test_the_momentum_algorithms_derive_sensitivities_from_step_size_and_smoothness() -> None:
    """α L η N between epoch starts, α L η a round, with the rounding that silos allow; or α times the clips."""
    objective = load_task(small_cell()).objective
    rounds_per_epoch, alpha = 5, 0.2
    for algorithm in (REDUCED, ALIGNED):
        plan = momentum_plan(algorithm)
        mechanism, step = plan.mechanism, movement_bound(0.0001)
        assert isinstance(mechanism, SlidingDifferences | AlignedDifferences)
        assert mechanism.movement == step
        assert mechanism.residual == pytest.approx(alpha * objective.smoothness * step, rel=1e-12)
        assert mechanism.difference == pytest.approx(rounds_per_epoch * mechanism.residual, rel=1e-12)
        assert plan.optimizer == NormalizedSGD(0.0001)
        assert plan.estimator.round(3).clip == pytest.approx(alpha * objective.lipschitz, rel=1e-12)
    plan = momentum_plan(IN_PARTS)
    assert isinstance(plan.mechanism, AlignedDifferences)
    assert isinstance(plan.estimator, SplitGradient)
    assert plan.mechanism.movement is None
    assert plan.mechanism.difference == plan.estimator.difference_clip == pytest.approx(alpha * 0.5)
    assert plan.mechanism.residual == plan.estimator.residual_clip == pytest.approx(alpha * 0.2)
    assert plan.mechanism.decay == plan.estimator.decay == 1.0 - alpha


def test_the_gradient_difference_sensitivity_is_capped_at_two_clip_norms() -> None:
    """Guarantee: α min(LηN, 2G); with long steps α g_t is C at one epoch's start and -C at the next, no more."""
    row = {"name": "momentum-tree-reduced", "clip": 2.0, "alpha": 0.5}
    plans = [momentum_plan({**row, "step": step}) for step in (1e-6, 100.0)]
    short, long = (plan.mechanism for plan in plans)
    assert isinstance(short, SlidingDifferences)
    assert isinstance(long, SlidingDifferences)
    assert short.difference == pytest.approx(short.residual * plans[0].schedule.rounds_per_epoch)
    assert long.difference == 2.0 * plans[1].max_clip == 2.0 * 0.5 * 2.0


def test_a_model_of_unknown_smoothness_requires_clipped_gradient_differences() -> None:
    model = {"name": "mlp", "hidden": 4}
    assert momentum_plan({**IN_PARTS, "clip": 1.0}, model=model).noise.sources
    for algorithm in (REDUCED, ALIGNED):
        with refusal("smoothness"):
            momentum_plan({**algorithm, "clip": 1.0}, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [REDUCED, ALIGNED])
@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
def test_rounding_of_float32_queries_does_not_exceed_the_movement_bound(
    tmp_path: Path, algorithm: dict[str, Any], engine: str
) -> None:
    """400 rounds in the default type: steps that are rounded to float32 stay below the movement charged.

    With few features a step's rounding is not averaged out.
    """
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 80)
    features = generator.standard_normal((80, 3)) + 2.0 * labels[:, None]
    path, images = tmp_path / "own.npz", {f"{split}_images": features for split in ("train", "test")}
    np.savez(path, **images, train_labels=labels, test_labels=labels, classes=2)
    cell = momentum_cell(
        algorithm,
        data={"name": str(path)},
        model={"name": "softmax-regression", "feature_norm": 1.0},
        federation={"silos": 2, "rounds": 400, "epochs": 10},
        run={"dtype": "float32", "evaluations": 1},
    )
    assert np.isfinite(run_cell(engine, cell).model).all()


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
def test_every_engine_stops_an_optimizer_that_exceeds_the_movement_bound(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """A run whose noise rests on short steps, and takes longer ones, would claim what it does not keep."""
    honest = NormalizedSGD.update

    def longer(optimizer: NormalizedSGD, state: Any, released: Tensor, current: Any) -> Any:
        return honest(NormalizedSGD(2.0 * optimizer.step, optimizer.output_round), state, released, current)

    monkeypatch.setattr(NormalizedSGD, "update", longer)
    with refusal(r"round 2: the query moved by 0\.0002", RunError):
        run(engine, momentum_cell(REDUCED))


@pytest.mark.parametrize(("algorithm", "assumed"), MOVEMENT_MATTERS)
def test_a_mechanism_states_its_smoothness_assumption_in_the_claim(
    algorithm: dict[str, Any], assumed: bool
) -> None:
    """And so does the description of its noise in every report: such a claim is none for any loss."""
    plan = momentum_plan(algorithm)
    assumption = plan.mechanism.assumption
    assert (assumption is not None) == assumed
    assert ("rests on the loss's smoothness" in loss_assumption(make_release_streams(plan, 20)[0])) == assumed
