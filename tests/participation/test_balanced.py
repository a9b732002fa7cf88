"""Balanced iteration subsampling: who takes part when; what is charged is never below samples of the truth."""

import itertools
import json
import math
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.gaussian import Relation
from fedpriv.core.errors import InputError
from fedpriv.core.random import simulation_noise
from fedpriv.participation.registry import participation_from_data
from fedpriv.participation.secret import BalancedSubsampling
from fedpriv.scenario.load import resolve_cell
from tests.conftest import small_tree
from tests.engines.test_engines import run

Floats = NDArray[np.float64]


def table_of(order: BalancedSubsampling, batch: int, seed: int = 1, silo: int = 0) -> NDArray[np.bool_]:
    """(records, rounds): who takes part when."""
    coins = simulation_noise(seed, np.float64).sampling_randomness()
    found = np.zeros((order.batches_per_silo * batch, order.rounds), bool)
    for t in range(1, order.rounds + 1):
        found[order.select_rows(t, batch, silo, lambda: coins), t - 1] = True
    return found


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_every_record_takes_part_in_as_many_rounds_as_there_are_epochs(groups: int) -> None:
    order = BalancedSubsampling(24, 6, groups)
    found = table_of(order, 50)
    assert (found.sum(1) == 4).all()
    for group in range(groups):
        others = [place for place in range(24) if place % groups != group]
        assert not found[group::groups][:, others].any()
    assert (table_of(order, 50) == found).all()
    assert (table_of(order, 50, silo=1) != found).any()


def test_every_set_of_rounds_is_as_likely() -> None:
    """Chi-square over the 20 sets of 3 of 6 rounds; at the fixed seed, false alarm rate 1e-6."""
    found = table_of(BalancedSubsampling(6, 2), 10_000)
    counts = Counter(tuple(np.flatnonzero(row)) for row in found)
    expected = len(found) / 20
    assert set(counts) == set(itertools.combinations(range(6), 3))
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 64.0


def test_records_are_drawn_independently_of_each_other() -> None:
    """Of pairs of neighbours a share of 1/20 has the same set of rounds, ± 5 standard errors."""
    found = table_of(BalancedSubsampling(6, 2), 10_000)
    same = (found[1:] == found[:-1]).all(1).mean()
    assert abs(same - 0.05) < 5.0 * math.sqrt(0.05 * 0.95 / len(found))


@cache
def ratios(relation: Relation, z: float, rounds: int, passes: int, draws: int = 40_000) -> tuple[Floats, Floats]:
    """ln of with over without in `draws` samples of either, for k of T rounds; opposite ones under replace-one."""
    draw = np.random.default_rng(rounds * 100 + passes)

    def of_sets(releases: Floats, sign: float) -> Floats:
        sums = np.full((passes + 1, draws), -np.inf)
        sums[0] = 0.0
        for each in (sign * releases / z**2 - 0.5 / z**2).T:
            sums[1:] = np.logaddexp(sums[1:], sums[:-1] + each)
        return np.asarray(sums[-1] - math.log(math.comb(rounds, passes)))

    def sampled(sign: float) -> Floats:
        releases = z * draw.normal(size=(draws, rounds))
        sets = np.argsort(draw.random((draws, rounds)), axis=1)[:, :passes]
        np.put_along_axis(releases, sets, np.take_along_axis(releases, sets, 1) + sign, 1)
        return releases

    other = 0.0 if relation == "zero-out" else -1.0
    with_it, without = sampled(1.0), sampled(other)

    def loss(releases: Floats) -> Floats:
        return of_sets(releases, 1.0) - (of_sets(releases, -1.0) if other else 0.0)

    return loss(with_it), -loss(without)


@pytest.mark.every(12)
@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    ("z", "rounds", "passes"),
    [(2.0, 60, 10), (1.5, 60, 10), (1.0, 60, 4), (1.0, 20, 2), (3.0, 20, 10), (2.0, 8, 4)],
)
def test_what_is_charged_is_never_below_samples_of_the_truth(
    relation: Relation, z: float, rounds: int, passes: int
) -> None:
    """Guarantee: δ at 6 values of ε in both directions, less 4 standard errors; 72 points in all."""
    promise = BalancedSubsampling(rounds, rounds // passes).guarantee_for_noise(z, relation)
    assert promise == AllocatedGaussian(z, rounds // passes, passes, relation)
    curve = promise.curve
    for losses in ratios(relation, z, rounds, passes):
        for epsilon in (0.0, 0.5, 1.0, 2.0, 3.0, 5.0):
            over = np.maximum(0.0, -np.expm1(epsilon - losses))
            error = float(over.std()) / math.sqrt(len(over))
            assert float(over.mean()) - 4.0 * error <= float(curve(np.array([epsilon]))[0])


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_the_bound_is_within_a_few_percent_of_the_truth(relation: Relation) -> None:
    """At δ = 1e-2, where 40,000 samples tell: the bound is at most 6 % above."""
    for z, rounds, passes in ((2.0, 60, 10), (1.0, 20, 2)):
        promise = BalancedSubsampling(rounds, rounds // passes).guarantee_for_noise(z, relation)
        bound = promise.epsilon_of(1e-2)
        for epsilon in (0.94 * bound,):
            deltas = [
                np.maximum(0.0, -np.expm1(epsilon - each)).mean() for each in ratios(relation, z, rounds, passes)
            ]
            assert max(deltas) > 1e-2


def tree(**changes: Any) -> dict[str, Any]:
    return small_tree(
        federation={"silos": 2, "rounds": 8, "epochs": 2, "batch": 4, "sampling": "balanced"},
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "zero-out", "epsilon": 1.0},
        **changes,
    )


@pytest.mark.slow
def test_engines_agree_and_the_ledger_reads_it_back() -> None:
    cell = resolve_cell(tree(run={"dtype": "float64", "evaluations": 2, "noise": "per-silo"}), "test")
    ((vectorized,), _), ((inprocess,), _) = (run(engine, cell) for engine in ("vectorized", "inprocess"))
    np.testing.assert_allclose(vectorized.cell_outcome.model, inprocess.cell_outcome.model, rtol=1e-9, atol=1e-13)
    order = vectorized.cell_outcome.releases[0].schedule
    assert participation_from_data(json.loads(json.dumps(order.to_data()))) == order == BalancedSubsampling(8, 4)
    assert "2 of 8 rounds" in order.words


def test_rounds_that_are_no_whole_epochs_are_refused() -> None:
    with pytest.raises(InputError, match="no whole number of epochs"):
        BalancedSubsampling(10, 4)
