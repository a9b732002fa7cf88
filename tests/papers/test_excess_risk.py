"""Bounds on the excess risk: inequalities against literal transcriptions, and runs whose optimum is known."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedpriv
from fedpriv.cli.app import app
from fedpriv.core.errors import InputError
from fedpriv.noise.series import Floats
from fedpriv.papers.base import Problem, ReleaseNumbers
from fedpriv.papers.choquette_choo import accelerated_bound, non_realizable_parameters, realizable_parameters
from fedpriv.papers.phased import phased_bound
from fedpriv.papers.sgd import projected_bound
from fedpriv.participation.orders import FixedOrder
from tests.papers.builders import printed_theorem

pytest.importorskip("fedpriv.addons.rates.theorem")  # the command is of an add-on

_ROUNDING = 1e-9


def into_ball(point: Floats, radius: float) -> Floats:
    return np.asarray(point * min(1.0, radius / max(float(np.linalg.norm(point)), 1e-300)))


class Quadratic:
    """(x - x*)ᵀ diag(h) (x - x*) / 2 with largest curvature M and x* in the ball, and errors of any kind."""

    def __init__(self, rng: np.random.Generator) -> None:
        dimension = int(rng.integers(1, 6))
        self.rounds, self.radius = int(rng.integers(1, 30)), float(10 ** rng.uniform(-1, 1))
        self.smoothness = float(10 ** rng.uniform(-2, 1))
        self.curvatures = rng.uniform(0, 1, dimension) * self.smoothness
        self.curvatures[0] = self.smoothness
        self.best = into_ball(rng.normal(size=dimension) * self.radius, self.radius)
        self._size = 10 ** rng.uniform(-3, 2) * self.smoothness * self.radius
        self._adverse, self._rng = bool(rng.integers(2)), rng

    def value(self, point: Floats) -> float:
        return float(np.sum(self.curvatures * (point - self.best) ** 2) / 2.0)

    def gradient(self, point: Floats) -> Floats:
        return np.asarray(self.curvatures * (point - self.best))

    def error(self, point: Floats) -> Floats:
        if self._adverse:
            return np.asarray(-self._size * np.sign(self.gradient(point)))
        return np.asarray(self._rng.normal(size=len(self.best)) * self._size)


@given(seed=st.sampled_from(range(150)))
@settings(max_examples=60, derandomize=True)
def test_the_accelerated_method_never_exceeds_its_excess_risk_bound(seed: int) -> None:
    """Whatever the errors are: the exact inequality, of which the bound is the mean."""
    rng = np.random.default_rng(seed)
    problem = Quadratic(rng)
    rounds, smoothness, radius = problem.rounds, problem.smoothness, problem.radius
    beta = smoothness * (rounds + 1) / 2 * float(1 + 10 ** rng.uniform(-4, 1.5))
    ask = mirror = output = np.zeros(len(problem.best))
    sizes, turned, squares = [], 0.0, 0.0
    for t in range(1, rounds + 1):
        error = t * problem.error(ask)
        sizes.append(float(np.linalg.norm(error)))
        turned += float(error @ (problem.best - mirror))
        squares += (t + 1) / (4 * t * (2 * beta / (t + 1) - smoothness)) * sizes[-1] ** 2
        released = t * problem.gradient(ask) + error
        mirror = into_ball(mirror - released / beta, radius)
        output = into_ball(ask - released / (t * beta), radius)
        ask = output + 2 / (t + 2) * (mirror - output)
    total = rounds * (rounds + 1) / 2
    exact = (beta / 2 * float(problem.best @ problem.best) + turned + squares) / total
    bound = accelerated_bound(np.array(sizes), radius, smoothness, beta)
    assert problem.value(output) <= exact * (1 + _ROUNDING) + 1e-12
    assert problem.value(output) <= bound.value * (1 + _ROUNDING)


@given(seed=st.sampled_from(range(150)))
@settings(max_examples=60, derandomize=True)
def test_projected_gradient_descent_never_exceeds_its_excess_risk_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = Quadratic(rng)
    step = float(rng.uniform(0.05, 1.0)) / problem.smoothness
    point = average = np.zeros(len(problem.best))
    sizes = []
    for _ in range(problem.rounds):
        error = problem.error(point)
        sizes.append(float(np.linalg.norm(error)))
        point = into_ball(point - step * (problem.gradient(point) + error), problem.radius)
        average = average + point / problem.rounds
    bound = projected_bound(np.array(sizes), problem.radius, problem.smoothness, step)
    assert problem.value(average) <= bound.value * (1 + _ROUNDING)


def test_a_linear_loss_attains_half_of_each_excess_risk_bound() -> None:
    """One round on a straight line of slope βR/2 (or R/(2η)): half of the bound is really lost."""
    radius, slope, none = 3.0, 2.0, np.zeros(1)
    beta = 2 * slope / radius
    for bound in (accelerated_bound(none, radius, 0.0, beta), projected_bound(none, radius, 0.0, 1 / beta)):
        assert slope * (radius - slope / beta) == pytest.approx(bound.value / 2)


def test_excess_risk_bounds_match_a_calculation_by_hand() -> None:
    """T = 2, β = 10, M = 2, R = 1, s = (3, 4): slacks 8 and 14/3."""
    sizes, squares = np.array([3.0, 4.0]), 2 / (4 * 8) * 9 + 3 / (8 * 14 / 3) * 16
    assert accelerated_bound(sizes, 1.0, 2.0, 10.0).value == pytest.approx((5.0 + 2 * 7 + squares) / 3)
    assert accelerated_bound(sizes, 1.0, 2.0, 10.0, fresh=True).value == pytest.approx((5 + squares) / 3)
    assert projected_bound(sizes, 1.0, 2.0, 0.1).value == pytest.approx(1 / 0.4 + 7)
    assert projected_bound(sizes, 1.0, 2.0, 0.1, fresh=True).value == pytest.approx(2.5 + 12.5 / 16)
    of_phases = phased_bound((4, 2), (0.5, 0.125), (0.2, 0.1), 1.0, 3.0).value
    assert of_phases == pytest.approx(1 / 4 + 0.25 * 9 + 0.04 / 0.5 + 0.125 / 2 * 9 + 0.3)


def test_errors_of_releases_combine_batch_variance_and_noise() -> None:
    released = ReleaseNumbers(10, 4, np.array([1.0, 2.0, 2.0]), np.array([0.5, 0.5, 1.0]))
    assert released.sum_errors == pytest.approx(np.sqrt([0.1 + 1, 0.5 + 1, 0.9 + 4]))
    assert released.gradient_errors == pytest.approx(np.sqrt([0.1 + 1, 0.4 + 1, 0.4 + 4]))


def test_excess_risk_bounds_are_infinite_outside_their_conditions() -> None:
    sizes = np.ones(9)
    assert math.isinf(accelerated_bound(sizes, 1.0, 2.0, 10.0).value)
    assert math.isinf(projected_bound(sizes, 1.0, 2.0, 1.0).value)
    assert math.isinf(projected_bound(sizes, 1.0, 2.0, 0.5, fresh=True).value)
    assert not accelerated_bound(sizes, 1.0, 2.0, 9.0).conditions[0].holds


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_the_excess_risk_of_theorem_14_is_the_accelerated_bound_and_theorem_3_is_refused(relation: Any) -> None:
    """Theorem 14's β is beyond M (T + 1)/2; Theorem 3's is so at sizes that no machine holds."""
    schedule = FixedOrder(10_000, 10_000)
    problem = Problem(50, 2.0, 0.5, True, 1, schedule, epsilon=1.0, delta=1e-5, relation=relation)
    asked = non_realizable_parameters(problem, 3.0)
    errors = [
        math.sqrt(t * asked.clip**2 / asked.whole_batch + 50 * t.bit_count() * asked.sigma**2)
        for t in range(1, asked.whole_rounds + 1)
    ]
    assert asked.excess_risk() == pytest.approx(accelerated_bound(np.array(errors), 3.0, 0.5, asked.beta).value)
    with pytest.raises(InputError, match="asks for"):
        realizable_parameters(problem, 3.0).excess_risk()


SCENARIO = """
name = "known-optimum"
[data]
name = "linear-regression"
[model]
name = "least-squares"
ball = 1.0
[algorithm]
trust = "trusted"
{algorithm}
[privacy]
mu = 2.0
relation = "zero-out"
[federation]
silos = 2
rounds = 12
samples = 2400
[run]
evaluations = 1
[sweep]
seeds = 3
"""
RUNS = {
    "accelerated-dp-srgd": "clip = 25.0\nbeta = 40.0\nradius = 1.0",
    "unaccelerated-dp-srgd": 'clip = 25.0\nbeta = 10.0\nradius = 1.0\noutput = "average"',
    "accelerated-independent": "clip = 8.0\nbeta = 40.0\nradius = 1.0",
    "dp-sgd": 'clip = 8.0\nstep = 0.1\nradius = 1.0\noutput = "average"',
    "noisy-minibatch": "clip = 8.0\nstep = 0.1\nradius = 1.0",
    "dp-mu2-fl": "diameter = 2.0",
}


def write_scenario(folder: Path, name: str, keys: str, changes: Mapping[str, str] = MappingProxyType({})) -> Path:
    text = SCENARIO.format(algorithm=f'name = "{name}"\n{keys}')
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    file = folder / f"{name}.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", RUNS)
def test_printed_excess_risk_bounds_lie_above_the_measured_risk(name: str, tmp_path: Path) -> None:
    file, folder = write_scenario(tmp_path, name, RUNS[name]), tmp_path / "run"
    results = fedpriv.run(file, out=folder)
    assert all(cell.metrics["clipped"] == 0.0 for cell in results.cells if "clipped" in cell.metrics)
    point = printed_theorem(file, "--run", str(folder))
    measured = point["scenario"]["excess risk"]
    if name == "dp-mu2-fl":
        bounds = [found["numbers"]["excess risk"] for found in point["theorems"]]
    else:
        bounds = [point["bound"]["excess risk"]]
        assert all(condition["holds"] for condition in point["bound"]["conditions"])
    assert all(0.001 * bound < measured < bound for bound in bounds), (measured, bounds)
    text = CliRunner().invoke(app, ["privacy", "theorem", str(file), "--run", str(folder)]).output
    assert "excess risk" in text


def test_runs_that_no_theorem_covers_have_no_excess_risk_bound(tmp_path: Path) -> None:
    """The last iterate, a ball beyond the one that the loss is known in, two epochs: each alone."""
    last = write_scenario(tmp_path, "dp-sgd", 'output = "last"\nclip = 8.0\nstep = 0.1\nradius = 1.0')
    with pytest.raises(InputError, match="no theorem with explicit numbers is known for dp-sgd"):
        printed_theorem(last)
    accelerated, epochs = "clip = 25.0\nbeta = 40.0\nradius = ", {"rounds = 12": "rounds = 12\nepochs = 2"}
    for radius, changes in ("1.5", {}), ("1.0", epochs):
        file = write_scenario(tmp_path, "accelerated-dp-srgd", accelerated + radius, changes)
        assert printed_theorem(file)["bound"] is None


def test_phased_sgd_and_online_to_batch_print_the_parameters_of_their_theorems(tmp_path: Path) -> None:
    """A curator's phased SGD on a convex loss; online-to-batch's increments of at most G + 4 H R for weights t."""
    changes = {
        'trust = "trusted"': 'trust = "curator"', '"linear-regression"': '"synthetic"', "silos = 2": "silos = 1",
        '[model]\nname = "least-squares"\nball = 1.0\n': "", "samples = 2400": "batch = 20",
    }  # fmt: skip
    point = printed_theorem(write_scenario(tmp_path, "phased-sgd", "step = 0.02\nradius = 1.0", changes))
    (theorem,), problem = point["theorems"], point["problem"]
    slope, dimension = problem["lipschitz"], problem["dimension"]
    expected = 2.0 / slope * min(4.0 / math.sqrt(problem["records"]), 2.0 * 2.0 / (2.0 * math.sqrt(dimension)))
    assert theorem["numbers"]["step"] == pytest.approx(expected)
    assert theorem["numbers"]["noise std"] == pytest.approx(slope / 2.0)
    assert point["bound"]["excess risk"] > 0.0
    point = printed_theorem(write_scenario(tmp_path, "online-to-batch", "clip = 1.0\nstep = 0.01\nradius = 1.0"))
    most = point["problem"]["lipschitz"] + 4.0 * point["problem"]["smoothness"]
    assert point["theorems"][0]["numbers"]["clip"] == pytest.approx(most)
