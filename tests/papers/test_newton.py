"""Noisy Newton: what a record adds, in integers; what the server solves; what its intervals cover."""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import Generator
from scipy import optimize
from torch.autograd.functional import hessian

from fedpriv.addons.statistics.command import compute_coefficients
from fedpriv.claims.ledger import make_release_streams
from fedpriv.core.errors import InputError, RunError
from fedpriv.data.schema import TableSchema
from fedpriv.loss.estimators import PlainGradient, Round
from fedpriv.loss.linear import LogisticRegression
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.loss.ridge import MeanStatistics
from fedpriv.noise.integers.increments import sum_integer_increments
from fedpriv.papers.newton import NOISY_NEWTON, GradientAndHessian, NoisyNewton, symmetric_matrix
from fedpriv.papers.table import ALGORITHMS, add_algorithm
from fedpriv.participation.secret import PoissonSampling
from fedpriv.plan.plan import ROUNDING_ALLOWANCE, Plan, find_increment_diameter, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import parse_scenario, resolve_cell
from fedpriv.silo.demo import format_policy
from fedpriv.study.results import read_results
from fedpriv.study.sweep import RunOptions, run_sweep
from tests.data.tables import SCHEMA, rows, table_tree, write_csv
from tests.silo.test_table_silo import guard_at

NORM = 2**36
EXACT = "donot_use_mm_for_euclid_dist"
NEWTON = {"name": "noisy-newton", "trust": "untrusted", "clip": 1.0, "curvature_clip": 0.5, "penalty": 0.1}


def asked(clip: float = 2.0, curvature_clip: float = 1.0, share: float = 0.25) -> GradientAndHessian:
    kappa = clip / curvature_clip * math.sqrt(share / (1.0 - share))
    return GradientAndHessian(LogisticRegression(3, 2.0), clip, curvature_clip, kappa, 0.02)


def drawn(count: int, draw: Generator) -> Records:
    z = np.hstack([draw.uniform(-1.0, 1.0, (count, 2)), np.ones((count, 1))])
    chance = 1.0 / (1.0 + np.exp(-z @ np.array([1.2, -0.8, 0.3])))
    return Records(torch.from_numpy(z), torch.from_numpy((draw.random(count) < chance).astype(np.float64)))


def solved(of: GradientAndHessian, records: Records, rounds: int, std: float, draw: Generator) -> torch.Tensor:
    server = NoisyNewton(3, of.kappa, of.penalty)
    weights = torch.full((len(records.labels),), 1.0 / len(records.labels), dtype=torch.float64)
    state = server.start(of.initial())
    for t in range(1, rounds + 1):
        exact = of.increment(Query((state,)), Batch(records, weights), 10.0).total
        noise = torch.from_numpy(std * draw.normal(size=of.dimension))
        state = server.update(state, exact + noise, Round(t, (1.0,), 0.0, 10.0, 1.0))
    return server.output(state)


def test_an_increment_of_noisy_newton_is_the_gradient_and_hessian_of_a_record() -> None:
    of, records = asked(1e6, 1e6), drawn(1, np.random.default_rng(0))
    at = torch.tensor([0.4, -2.0, 0.7], dtype=torch.float64, requires_grad=True)

    def loss(point: torch.Tensor) -> torch.Tensor:
        return of.base.losses(point, records).sum()

    (slope,) = torch.autograd.grad(loss(at), at)
    point = torch.cat([at.detach(), torch.full((6,), 7.0, dtype=torch.float64)])  # whatever the matrix is
    found = of.per_record(Query((point,)), Batch(records, torch.ones(1).double()), torch.zeros(1), 1e9)[0]
    torch.testing.assert_close(found[:3], slope)
    torch.testing.assert_close(symmetric_matrix(found[3:] / of.kappa, 3), hessian(loss, at.detach()))


def test_integer_increments_of_noisy_newton_exceed_neither_gradient_nor_hessian_clip() -> None:
    """Guarantee: norms in integers, for any query and record: of the gradient, of the Hessian, and of both."""
    of, clip = asked(0.5, 0.1), 0.5 / math.sqrt(0.75)
    values = [0.0, 1.0, -1e3, 1e38, 5e-324, math.inf, math.nan]
    seen = list[np.ndarray[Any, Any]]()
    for a, b, y, query in itertools.product(values, values, (0.0, 1.0), (0.0, 0.3, -1e30, math.nan)):
        point = torch.full((of.dimension,), query, dtype=torch.float64)
        record = Records(torch.tensor([[a, b, 1.0]]).double(), torch.tensor([y]).double())
        seen.append(sum_integer_increments(of, Query((point,)), clip, record, NORM, NORM / clip, 0))
    array = np.array(seen, float) / NORM * clip
    assert np.linalg.norm(array, axis=1).max() <= clip
    assert 0.49 < np.linalg.norm(array[:, :3], axis=1).max() <= 0.5 * (1.0 + 1e-9)
    assert 0.099 < np.linalg.norm(array[:, 3:], axis=1).max() / of.kappa <= 0.1 * (1.0 + 1e-9)


def test_the_batch_increment_is_the_sum_of_record_increments_and_counts_clipped_records() -> None:
    records, point = drawn(40, np.random.default_rng(1)), torch.full((9,), 0.2, dtype=torch.float64)
    weights = torch.ones(40).double()
    weights[7:] = 0.5
    for of, beyond in ((asked(9.0, 9.0), 0), (asked(9.0, 0.01), 40), (asked(0.01, 9.0), 40)):
        batch = Batch(records, weights)
        whole = of.increment(Query((point,)), batch, 20.0)
        each = of.per_record(Query((point,)), batch, torch.arange(40), 20.0)
        torch.testing.assert_close(whole.total, each.sum(0))
        assert whole.clipped_count == beyond
        beside = torch.cat([point[:3], torch.full((6,), math.nan).double()])
        assert torch.equal(of.per_record(Query((beside,)), batch, torch.arange(40), 20.0), each)


def test_the_clip_norm_of_the_round_bounds_every_increment() -> None:
    """Guarantee: whatever the settings say, no increment is longer than the clip of the round."""
    of, records = asked(9.0, 9.0), drawn(20, np.random.default_rng(1))
    batch = Batch(records, torch.full((20,), 0.5).double())
    found = of.per_record(Query((torch.zeros(9).double(),)), batch, torch.arange(20), 0.01)
    assert float(found.norm(dim=1).max()) <= 0.005


def test_noisy_newton_without_noise_finds_the_penalized_minimum() -> None:
    of, records = asked(), drawn(400, np.random.default_rng(2))
    z, y = records.features.numpy(), records.labels.numpy()

    def loss(x: Any) -> float:
        score = z @ x
        return float(np.mean(np.logaddexp(0.0, score) - y * score) + 0.01 * x @ x)

    best = optimize.minimize(loss, np.zeros(3), tol=1e-12).x
    found = solved(of, records, 12, 0.0, np.random.default_rng(0))
    np.testing.assert_allclose(found[:3].numpy(), best, atol=1e-3)
    assert of.evaluate(found, records).loss == pytest.approx(loss(best) - 0.01 * best @ best, abs=1e-4)


@functools.cache
def population_weights() -> list[float]:
    draw = np.random.default_rng(5)
    weights: list[float] = solved(asked(), drawn(300_000, draw), 6, 0.0, draw)[:3].tolist()
    return weights


@pytest.mark.every(6)
@pytest.mark.parametrize(("rounds", "std"), [(3, 0.0), (3, 0.02), (5, 0.02), (2, 0.02)])
def test_noisy_newton_intervals_cover_the_weights_of_the_population(rounds: int, std: float) -> None:
    """Guarantee: sampling and the noise of gradients and Hessians are in an interval."""
    draw, of, true = np.random.default_rng(6), asked(), population_weights()
    hits = list[bool]()
    for _ in range(100):
        weights = solved(of, drawn(1000, draw), rounds, std, draw)
        found = of.coefficients(weights, MeanStatistics(std, 1000, 1.0, rounds))
        hits += [each.low <= value <= each.high for each, value in zip(found, true, strict=True)]
    print(f"covered: {100 * float(np.mean(hits)):.1f} %")
    assert 0.95 - 4.5 * math.sqrt(0.0475 / 300) < float(np.mean(hits)) <= 0.995


def test_noisy_newton_of_one_round_has_no_intervals() -> None:
    """They covered 77 % of weights, and 50 % of constants."""
    draw, of = np.random.default_rng(5), asked()
    found = solved(of, drawn(100, draw), 1, 0.02, draw)
    line = r"^federation\.rounds: 1 round of noisy-newton .*; take 2 rounds or more$"
    with pytest.raises(InputError, match=line):
        of.coefficients(found, MeanStatistics(0.02, 100, 1.0, 1))


def tree_of(folder: Path, **algorithm: Any) -> dict[str, Any]:
    tree = table_tree(write_csv(folder / "t.csv", rows(300)))
    return tree | {
        "model": {"name": "logistic-regression", "feature_norm": 2.0},
        "federation": {"silos": 2, "rounds": 3, "epochs": 3, "batches": [180, 120]},
        "algorithm": NEWTON | algorithm,
        "privacy": {"relation": "replace-one", "mu": 1.0},
        "run": {"dtype": "float64", "evaluations": 1},
    }


@pytest.mark.parametrize("trust", ["untrusted", "secure-aggregation", "trusted"])
def test_a_noisy_newton_run_has_named_coefficients_and_costs_its_target_mu(tmp_path: Path, trust: str) -> None:
    tree = tree_of(tmp_path, trust=trust)
    del tree["seed"]
    (record,) = read_results(run_sweep(parse_scenario(tree, "test"), RunOptions(out=tmp_path / "run"))).cells
    assert record["mu"] == pytest.approx(1.0, rel=1e-9)
    found = compute_coefficients(record, tmp_path / "run")
    assert [name for name, _ in found][-1] == "constant"
    assert len(found) == 7
    assert all(each.low < each.value < each.high for _, each in found)


def test_a_guard_answers_noisy_newton_within_its_budget(tmp_path: Path) -> None:
    write_csv(tmp_path / "own.csv", [row for row in rows(300) if row["hospital"] == "north"])
    (tmp_path / "own.csv").chmod(0o600)
    keys = {"silo": 0, "shard": "own.csv", "ledger": "l.sqlite", "socket": "s.sock"}
    allow = {"relation": "replace-one", "clip": 1.2, "rounds": 3, "budget": 1.0}
    (tmp_path / "policy.toml").write_text(format_policy(keys, allow, TableSchema.model_validate(SCHEMA)))
    guard = guard_at(tmp_path / "policy.toml")
    tree = tree_of(tmp_path)
    tree["federation"]["batches"] = [90, 60]
    cell = resolve_cell(tree, "test")
    text, zero = json.dumps(cell.canonical_data()), torch.zeros(7 + 28).double()
    first = guard.answer("run", text, 1, zero)
    assert torch.equal(first, guard.answer("run", text, 1, zero))
    with pytest.raises(RunError):
        guard.answer("run", text, 2, zero[:7])
    with pytest.raises(RunError, match="budget"):
        guard.answer("again", text, 1, zero)
    plan = make_plan(cell, load_task(cell).objective, for_release=True)
    assert make_release_streams(plan, 3)[0].mu == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.05, 0.25, 0.9])
def test_two_records_are_no_further_apart_than_the_increment_diameter(share: float, dtype: torch.dtype) -> None:
    """Guarantee: records at one query, and a missing one; the farthest pair that is tried attains it."""
    of, draw = asked(0.5, 0.02, share), np.random.default_rng(3)
    z = 10.0 ** draw.uniform(-3.0, 3.0, (60, 1)) * draw.normal(size=(60, 3))
    z[:4] = [[1e4, 0.0, 0.0], [0.0, 1e4, 0.0], [1e4, 1e-3, 0.0], [1e-3, 1e4, 0.0]]
    z[4:8] = -z[:4]
    records = Records(torch.from_numpy(np.vstack([z, z])).to(dtype), torch.arange(120).lt(60).to(dtype))
    batch, farthest = Batch(records, torch.ones(120, dtype=dtype)), 0.0
    for x in ([0.0, 0.0, 0.0], [1e-5, 1e-5, 1e-5], [0.3, -2.0, 1.0]):
        query = Query((torch.tensor([*x, *[0.0] * 6], dtype=dtype),))
        vectors = of.per_record(query, batch, torch.arange(120), 10.0).double()
        vectors = torch.cat([vectors, torch.zeros(1, 9).double()])
        farthest = max(farthest, float(torch.cdist(vectors, vectors, compute_mode=EXACT).max()))
    assert 0.9 * of.diameter < farthest <= of.diameter * (1.0 + ROUNDING_ALLOWANCE)


def test_replace_one_noise_is_calibrated_to_the_increment_diameter(tmp_path: Path) -> None:
    """Noise by √(1 - φ/2) of that for twice the clip, and under zero-out the same as before."""
    plans = dict[tuple[str, bool], Plan]()
    for relation, released in itertools.product(("zero-out", "replace-one"), (False, True)):
        tree = tree_of(tmp_path) | {"privacy": {"relation": relation, "mu": 1.0}}
        cell = resolve_cell(tree, "test")
        plan = plans[relation, released] = make_plan(cell, load_task(cell).objective, for_release=released)
        assert plan.increment_diameter == pytest.approx(2.0 * math.sqrt(1.0 - 0.25 / 2.0), rel=1e-5)
        assert make_release_streams(plan, 3)[0].mu == pytest.approx(1.0, rel=1e-6)
    for released in (False, True):
        ratio = plans["replace-one", released].noise.std_in_mean / plans["zero-out", released].noise.std_in_mean
        assert float(ratio) == pytest.approx(2.0 * math.sqrt(1.0 - 0.25 / 2.0), rel=1e-5)


def test_other_estimators_and_poisson_sampling_use_an_increment_diameter_of_two(tmp_path: Path) -> None:
    cell = resolve_cell(tree_of(tmp_path), "test")
    plan = make_plan(cell, load_task(cell).objective)
    sums = PlainGradient(plan.estimator.round(1).clip, coefficient=0.5)
    poisson = PoissonSampling(3, 1)
    for estimator, schedule in ((sums, plan.schedule), (plan.estimator, poisson)):
        assert find_increment_diameter(plan.objective, estimator, plan.mechanism, schedule) == 2.0


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"name": "softmax-regression", "feature_norm": 2.0}, 'trains only model.name = "logistic-regression"'),
        (
            {"name": "logistic-regression", "feature_norm": 2.0, "penalty": 0.1},
            "give algorithm.penalty, and leave this key out",
        ),
    ],
)
def test_noisy_newton_refuses_models_other_than_unpenalized_logistic_regression(
    tmp_path: Path, model: dict[str, Any], said: str
) -> None:
    cell = resolve_cell(tree_of(tmp_path) | {"model": model}, "test")
    with pytest.raises(InputError, match=said):
        load_task(cell)


def test_noisy_newton_refuses_models_of_more_than_fifty_parameters() -> None:
    assert NOISY_NEWTON.model is not None
    settings = NOISY_NEWTON.settings.model_validate({"clip": 1.0, "curvature_clip": 1.0, "penalty": 0.1})
    assert NOISY_NEWTON.model(settings, LogisticRegression(50, 1.0)).dimension == 1325
    with pytest.raises(InputError, match="at most 50 parameters, and the model has 51; take 'dp-sgd'"):
        NOISY_NEWTON.model(settings, LogisticRegression(51, 1.0))


def test_a_users_algorithm_that_is_replaced_extends_the_model_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first objective stayed in a cache, and a second import trained a model that was no longer named."""
    row = dataclasses.replace(NOISY_NEWTON, name="own-newton")
    monkeypatch.setitem(ALGORITHMS, row.name, row)  # taken out again after the test
    cell = resolve_cell(tree_of(tmp_path, name=row.name), "test")
    kinds = list[type]()
    for own in (row, dataclasses.replace(row, model=lambda _settings, objective: objective)):
        add_algorithm(own)
        kinds.append(type(load_task(cell).objective))
    assert kinds == [GradientAndHessian, LogisticRegression]
