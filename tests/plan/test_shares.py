"""A budget for each silo: `privacy.shares`, its noise, its weights, its claim and what its guard charges."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedpriv.accounting.gaussian import mu_of
from fedpriv.addons.statistics.plan import read_plan
from fedpriv.addons.statistics.tables import Statistics
from fedpriv.claims.claim import compute_claim, describe_silo_budgets
from fedpriv.claims.entries import read_ledger
from fedpriv.claims.ledger import make_release_streams, make_silo_stream, stream_from_data, stream_to_data
from fedpriv.claims.outcome import RunObserver
from fedpriv.cli.app import app
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.random import SERVER, integer_noise_key
from fedpriv.engines.table import make_engine
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.rounds.integers import IntegerSteps
from fedpriv.scenario.load import parse_scenario, resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.scenario.sections import PrivacySection
from fedpriv.silo.demo import prepare_silos
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import read_policy
from fedpriv.study.results import RunFolder
from tests.conftest import small_tree
from tests.data.tables import SCHEMA, rows, write_csv
from tests.engines.test_engines import run
from tests.silo.guarded import ZERO, guard_of, write_silo

SHARES = (0.1, 0.5, 1.0)
ROWS: dict[str, dict[str, Any]] = {
    "correlated increments": {},
    "a tree": {"algorithm": {"name": "dp-ftrl", "trust": "untrusted", "clip": 1.0, "step": 0.5}},
    "secret rounds": {
        "algorithm": {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        "federation": {"silos": 3, "rounds": 8, "batch": 4, "sampling": "poisson"},
    },
}


def cell_of(**overrides: Any) -> Cell:
    privacy = {"relation": "replace-one", "epsilon": 2.0, "shares": list(SHARES)}
    return resolve_cell(small_tree(**{"privacy": privacy, **overrides}), "test")


def planned(cell: Cell, released: bool = False) -> Plan:
    return make_plan(cell, load_task(cell).objective, for_release=released)


@pytest.mark.slow
@pytest.mark.parametrize("difference", [1e-15, 1e-12])
def test_silos_with_nearly_equal_shares_release_integers_under_random_allocation(difference: float) -> None:
    """Calibrations of such shares differ by more than the shares, and in any direction."""
    shares = [1.0, 1.0 - difference, 1.0 - difference / 2]
    cell = cell_of(
        algorithm=ROWS["secret rounds"]["algorithm"],
        federation={"silos": 3, "rounds": 8, "sampling": "allocation"},
        privacy={"relation": "replace-one", "epsilon": 1.0, "shares": shares},
    )
    exact = planned(cell, released=True).required_exact_plan
    assert [claim.mu for claim in exact.party_claims] == pytest.approx([exact.claim.mu] * 3, rel=1e-8)


def test_a_list_of_privacy_targets_gives_each_silo_its_own_target() -> None:
    """Reshef & Levy's ρ_i (Theorem 5.1): σ_i = 2 S √T/ρ_i, and each target in its own unit."""
    cell = cell_of(privacy={"relation": "replace-one", "rho": [4.0, 1.0, 2.5]})
    noise, rounds = planned(cell).noise, cell.schedule.rounds
    clip = planned(cell).estimator.round(1).clip
    assert [noise.std_of(silo) for silo in range(3)] == pytest.approx(
        [2.0 * clip * math.sqrt(rounds) / rho for rho in (4.0, 1.0, 2.5)], rel=1e-9
    )
    epsilons = cell_of(privacy={"relation": "replace-one", "epsilon": [1.0, 0.3, 0.7], "delta": 1e-6})
    assert epsilons.target_mus == pytest.approx([mu_of(epsilon, 1e-6) for epsilon in (1.0, 0.3, 0.7)])


@given(st.floats(1e-3, 30.0), st.floats(1e-3, 30.0))
def test_no_silo_gets_a_larger_mu_than_its_entry_in_a_list_of_targets(one: float, other: float) -> None:
    """Guarantee: shares of the largest are rounded down."""
    privacy = PrivacySection.model_validate({"relation": "zero-out", "mu": [one, other]})
    for silo, target in enumerate((one, other)):
        assert (privacy.silo_target_mu(silo) or math.inf) <= target


@pytest.mark.parametrize(
    ("privacy", "named"),
    [
        ({"mu": [1.0, 2.0, 1.0], "shares": [1.0, 1.0, 1.0]}, "mu has a number for each silo"),
        ({"mu": [1.0, 2.0]}, "privacy.shares has 2 numbers; give one for each of 3 silos"),
        ({"mu": [1.0, -2.0, 1.0]}, "privacy.mu"),
        ({"mu": []}, "privacy.mu"),
        ({"mu": [1.0, 2.0, 1.0], "epsilon": 1.0}, "needs exactly one of mu, rho, zcdp and epsilon"),
    ],
)
def test_invalid_lists_of_privacy_targets_are_refused(privacy: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        cell_of(privacy={"relation": "replace-one", **privacy})


@pytest.mark.every(6)
@pytest.mark.parametrize("released", [False, True], ids=["floats", "integers"])
@pytest.mark.parametrize("row", ROWS)
def test_the_releases_of_each_silo_guarantee_its_own_share_of_epsilon(row: str, released: bool) -> None:
    """Guarantee: by the accountant, from the noise that the plan gives each silo; shares of ε are ε, not μ."""
    plan = planned(cell_of(**ROWS[row]), released)
    for streams in ([make_silo_stream(plan, silo, 8) for silo in range(3)], make_release_streams(plan, 8)):
        assert len(streams) == 3
        for stream, share in zip(streams, SHARES, strict=True):
            assert stream.guarantee is not None
            found = stream_from_data(json.loads(json.dumps(stream_to_data(stream)))).guarantee
            assert found is not None
            assert 0.995 * share * 2.0 < found.epsilon_of(1e-5) <= share * 2.0
    claim = compute_claim(make_release_streams(plan, 8))
    assert claim is not None
    assert claim.guarantee.epsilon_of(1e-5) > 1.99  # of the silo that is protected least


def test_the_integer_noise_of_each_silo_has_the_standard_deviation_of_its_own_budget() -> None:
    """Guarantee: of integers; 5 standard errors of a standard deviation of 7,850 × 4 values."""
    cell = cell_of(algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1})
    plan = planned(cell, released=True)
    steps = IntegerSteps(plan, integer_noise_key(1))
    for silo in range(3):
        state, drawn = steps.initial_state(silo), []
        for t in range(1, 5):
            noisy, state = steps.add_noise(state, t, steps.empty_sums(state, t), silo, ZERO)
            drawn.append(noisy.numpy().astype(np.float64))
        values = np.concatenate(drawn)
        claimed = make_silo_stream(plan, silo, 8).integer_release
        assert claimed is not None
        assert abs(values.std() / claimed.sigma - 1.0) < 5.0 / math.sqrt(2.0 * values.size)
    sigmas = [plan.required_exact_plan.party_claim(silo).sigma for silo in range(3)]
    mus = [mu_of(2.0 * share, 1e-5) for share in SHARES]
    np.testing.assert_allclose([sigmas[0] / sigma for sigma in sigmas], np.array(mus) / mus[0], rtol=1e-6)


def test_the_planned_silo_weights_minimize_the_noise_of_the_mean() -> None:
    """Batches of different sizes; brute force over 2,000 weightings near and far."""
    plan = planned(cell_of(federation={"silos": 3, "rounds": 8, "batches": [2, 9, 4]}))
    stds = np.array([float(source.std) for source in plan.noise.sources])
    least = plan.noise.std_in_mean
    assert math.isclose(sum(plan.weights), 1.0)
    assert math.isclose(least, math.hypot(*(stds * plan.weights)), rel_tol=1e-12)
    draw = np.random.default_rng(0)
    for _ in range(2000):
        others = draw.dirichlet(np.array(plan.weights) * 10.0 ** draw.uniform(0, 4) + 1e-3)
        assert math.hypot(*(stds * others)) >= least * (1.0 - 1e-12)


def test_equal_budget_shares_of_equal_silos_give_the_noise_of_a_run_without_shares() -> None:
    plain = {"relation": "replace-one", "epsilon": 2.0}
    alike, without = planned(cell_of(privacy={**plain, "shares": [1, 1, 1]})), planned(cell_of(privacy=plain))
    assert alike.noise == without.noise
    assert alike.weights == without.weights
    assert make_release_streams(alike, 8) == make_release_streams(without, 8)


@pytest.mark.parametrize("arithmetic", ["float", "integers"])
def test_engines_agree_on_a_run_with_a_privacy_budget_for_each_silo(arithmetic: str) -> None:
    cell = cell_of(run={"dtype": "float64", "evaluations": 2, "arithmetic": arithmetic, "noise": "per-silo"})
    (inprocess,), _ = run("inprocess", cell)
    assert describe_silo_budgets(inprocess.cell_outcome.releases, 1e-5)
    if arithmetic == "float":
        (vectorized,), _ = run("vectorized", cell)
        np.testing.assert_allclose(
            vectorized.cell_outcome.model, inprocess.cell_outcome.model, rtol=1e-9, atol=1e-13
        )
        assert vectorized.cell_outcome.releases == inprocess.cell_outcome.releases


def test_a_guard_charges_its_own_budget_share_and_refuses_a_larger_share(tmp_path: Path) -> None:
    """Attack: a server that gives a silo a larger share than its policy has a budget for."""
    small = mu_of(0.2, 1e-5)
    path = write_silo(tmp_path, 0, budget=small * (1 + 1e-9))
    guard = guard_of(path)
    asked = json.dumps(cell_of().canonical_data())
    assert torch.isfinite(guard.answer("run", asked, 1, ZERO)).all()
    (charge,) = SiloLedger(read_policy(path).ledger).charges()
    assert 0.999999 * small < charge.mu <= small * (1 + 1e-9)
    greedy = cell_of(privacy={"relation": "replace-one", "epsilon": 2.0, "shares": [1.0, 0.5, 0.1]})
    with pytest.raises(RunError, match="the budget is"):
        guard_of(write_silo(tmp_path / "other", 0, budget=small)).answer(
            "run", json.dumps(greedy.canonical_data()), 1, ZERO
        )


def test_prepared_policies_have_each_silos_own_budget(tmp_path: Path) -> None:
    tree = small_tree(privacy={"relation": "replace-one", "mu": 2.0, "shares": [0.25, 1.0, 0.5]})
    tree.pop("seed")
    folders = prepare_silos(parse_scenario(tree, "test"), tmp_path, run_count=1)
    assert [read_policy(folder / "policy.toml").allow.budget for folder in folders] == [0.5, 2.0, 1.0]


def test_the_printed_epsilon_of_each_silo_is_computed_from_its_releases() -> None:
    """Guarantee: a ledger in which a silo added less noise is told with the larger ε."""
    streams = make_release_streams(planned(cell_of()), 8)
    said = describe_silo_budgets(streams, 1e-5)
    assert "silo 0 ε = 0.2, silo 1 ε = 1, silo 2 ε = 2" in said
    less = stream_from_data({**stream_to_data(streams[0]), "std": streams[0].std / 4.0})
    assert "silo 0 ε = 0.2" not in describe_silo_budgets([less, *streams[1:]], 1e-5)
    assert not describe_silo_budgets(streams[1:2], 1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"privacy": {"relation": "zero-out", "mu": 1.0, "shares": [1.0, 0.5]}}, "one for each of 3 silos"),
        ({"privacy": {"relation": "zero-out", "mu": 1.0, "shares": [0.9, 0.5, 0.1]}}, "the largest is 0.9"),
        ({"privacy": {"relation": "zero-out", "mu": 1.0, "shares": [1.0, 0.0, 0.1]}}, "shares"),
        ({"privacy": {"relation": "zero-out", "mu": 1.0, "shares": [1.0, math.nan, 0.1]}}, "shares"),
        ({"privacy": {"relation": "zero-out", "mu": 1.0, "shares": [1.0, 2.0, 0.1]}}, "shares"),
        ({"privacy": {"relation": "zero-out", "mode": "none", "shares": [1.0, 0.5, 0.1]}}, "no budget"),
        ({"algorithm": {"name": "dp-mu2-fl", "trust": "trusted", "diameter": 0.1}}, "protects the records of all"),
        (
            {"algorithm": {"name": "dp-mu2-fl", "trust": "secure-aggregation", "diameter": 0.1}},
            "protects the records of all",
        ),
    ],
)
def test_invalid_or_unenforceable_budget_shares_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason) as refused:
        cell_of(**change)
    assert "\n" not in str(refused.value)


def test_private_counts_with_a_budget_share_for_each_silo_are_refused(tmp_path: Path) -> None:
    """Sums are the mean times all records: weights that follow budgets would count one silo's records twice."""
    plan = {
        "data": {"name": str(write_csv(tmp_path / "t.csv", rows())), "table": SCHEMA},
        "privacy": {"relation": "replace-one", "mu": 1.0, "shares": [1.0, 0.5]},
        "table": [{"of": ["hospital"]}],
    }
    with pytest.raises(InputError, match=r"privacy\.shares: a count weighs"):
        Statistics.from_plan(read_plan({"name": "counts", **plan}))


def test_silo_budgets_too_far_apart_for_one_integer_lattice_are_refused() -> None:
    """Noise of the largest budget would lie below what an exact release draws."""
    privacy = {"relation": "replace-one", "mu": 1e3, "shares": [1e-12, 0.5, 1.0]}
    with pytest.raises(InputError, match="cannot be made of integers"):
        planned(cell_of(privacy=privacy), released=True)


MakeCell = Callable[..., Cell]


def test_noise_of_the_server_has_the_claim_of_the_whole_plan(small_cell: MakeCell) -> None:
    plan = planned(small_cell(algorithm__trust="trusted"), released=True)
    assert plan.required_exact_plan.party_claim(SERVER) is plan.required_exact_plan.claim


@pytest.mark.every(2)
@pytest.mark.parametrize("row", ["correlated increments", "secret rounds"])
def test_the_ledger_detects_a_silo_that_released_with_the_noise_of_another_silo(tmp_path: Path, row: str) -> None:
    """Gains: "ok" beside releases of silo 0 with silo 2's noise: the claim is of the silo protected least."""
    privacy = {"relation": "replace-one", "epsilon": 2.0, "shares": list(SHARES)}
    scenario, folder = parse_scenario(small_tree(**{"privacy": privacy, **ROWS[row]}), "test"), tmp_path / "run"
    results = RunFolder(folder, scenario, "vectorized", resume=False)
    (outcome,) = make_engine("vectorized")([scenario.points[0].cell], RunObserver())
    results.finished(0, outcome.cell_outcome)
    assert CliRunner().invoke(app, ["privacy", "ledger", str(folder)]).exit_code == 0
    told = json.loads((folder / "results.json").read_text())
    for silo in (0, 1):
        written = json.loads(json.dumps(told))
        for cell in written["cells"]:
            cell["releases"][silo]["std"] = cell["releases"][2]["std"]
        (folder / "results.json").write_text(json.dumps(written))
        shown = CliRunner().invoke(app, ["privacy", "ledger", str(folder)])
        assert shown.exit_code == 1
        assert "DIFFERS" in shown.stdout
        assert not any(entry.agrees for entry in read_ledger(folder))
