"""The distance of two increments below 2 clips: where it holds, and that no ledger invents one."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import fedpriv
from fedpriv.accounting.gaussian import APART, factor_of, moved_by
from fedpriv.addons.statistics.indicators import Indicators
from fedpriv.claims.entries import make_entry
from fedpriv.claims.ledger import make_release_streams, stream_from_data, stream_to_data
from fedpriv.claims.recomputed import _is_equal
from fedpriv.core.errors import InputError
from fedpriv.loss.objective import EvaluationView, Objective
from fedpriv.loss.scores import ScoreView
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.participation.orders import FixedOrder
from fedpriv.participation.registry import ClientAvailability
from fedpriv.plan.calibration import make_exact_plan, make_workload
from fedpriv.plan.plan import find_increment_diameter, make_plan
from fedpriv.plan.task import load_public_task, make_schema_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from tests.conftest import small_tree
from tests.data.tables import rows, table_tree, write_csv
from tests.silo.test_statistics import TABLES, plan, scenario

OTHERWISE: dict[str, dict[str, Any]] = {
    "two rounds of a running sum": {
        "federation": {"rounds": 2, "epochs": 2},
        "algorithm": {"name": "dp-ftrl", "mechanism": "independent"},
    },
    "a coin for each record": {"federation": {"sampling": "poisson"}},
    "noise of a tree": {"algorithm": {"name": "dp-ftrl", "mechanism": "tree"}},
    "a clip far below": {"algorithm": {"clip": 0.25}},
    "momentum": {"algorithm": {"name": "momentum-tree", "alpha": 0.5}},
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_other_runs_on_the_same_tables_have_an_increment_diameter_of_two_clip_norms(
    tmp_path: Path, what: str
) -> None:
    """Guarantee: `apart` is below 2 only for public vectors in rounds with noise of their own."""
    tree = json.loads(scenario(plan(tmp_path), **OTHERWISE[what]))
    cell = resolve_cell(tree, "test")
    assert cell.data.table_schema is not None
    found = make_plan(cell, make_schema_task(cell, cell.data.table_schema).objective)
    assert found.increment_diameter == APART == 2.0
    assert all(
        "apart" not in stream_to_data(stream) for stream in make_release_streams(found, found.schedule.rounds)
    )


@dataclass(frozen=True)
class Liar(Indicators):
    """A model that says of itself that its increments lie close together."""

    @property
    def diameter(self) -> float:
        return 1.0


def test_a_subclass_cannot_claim_a_smaller_increment_diameter(tmp_path: Path) -> None:
    """Guarantee: a distance is one that fedpriv proves."""
    asked = plan(tmp_path)
    honest = asked.make_plan().objective
    assert isinstance(honest, Indicators)
    assert make_plan(asked.cell, honest).increment_diameter < APART
    assert make_plan(asked.cell, Liar(honest.settings, honest.dtype)).increment_diameter == APART


def test_a_ledger_stores_the_increment_diameter_and_reproduces_mu(tmp_path: Path) -> None:
    for stream in make_release_streams(plan(tmp_path).make_plan(for_release=True), 1):
        data = json.loads(json.dumps(stream_to_data(stream)))
        assert data["apart"] == stream.increment_diameter < APART
        assert stream_from_data(data).mu == stream.mu
        assert stream_from_data({**data, "apart": 2.0}).mu > 1.2 * stream.mu


@pytest.mark.parametrize("apart", [0.5, 0.0, -1.0, 2.5, float("nan"), float("inf")])
def test_a_ledger_with_an_impossible_increment_diameter_is_refused(tmp_path: Path, apart: float) -> None:
    data = stream_to_data(make_release_streams(plan(tmp_path).make_plan(), 1)[0])
    with pytest.raises(InputError, match="clips apart"):
        stream_from_data({**data, "apart": apart})


@pytest.mark.parametrize(
    "changes", [{"decay": 1.0}, {"mechanism": {"name": "tree", "decay": 0.0, "period": None}}]
)
def test_a_ledger_of_running_sums_or_tree_noise_with_a_smaller_increment_diameter_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    data = stream_to_data(make_release_streams(plan(tmp_path).make_plan(), 1)[0]) | {"clips": [[1.0, 2]]}
    data["participation"] = {**data["participation"], "rounds": 2}
    assert stream_from_data(data).increment_diameter < APART
    with pytest.raises(InputError, match="clips apart"):
        stream_from_data({**data, **changes})


def test_two_rounds_on_the_same_tables_cost_root_two_times_the_mu_of_one_round(tmp_path: Path) -> None:
    tree = json.loads(scenario(plan(tmp_path), federation={"rounds": 2, "epochs": 2}))
    cell = resolve_cell(tree, "test")
    assert cell.data.table_schema is not None
    found = make_plan(cell, make_schema_task(cell, cell.data.table_schema).objective)
    once, twice = (make_release_streams(found, rounds)[0] for rounds in (1, 2))
    assert found.increment_diameter < APART
    assert twice.mu == pytest.approx(2**0.5 * once.mu)


@pytest.mark.parametrize("sampling", ["poisson", "allocation", "balanced"])
def test_a_ledger_of_secret_rounds_with_a_smaller_increment_diameter_is_refused(
    tmp_path: Path, sampling: str
) -> None:
    """Guarantee: with a coin for each record its distance from zeros leaks, too, which is a whole clip.

    Poisson, one round, rate .1, noise .5 of the clip: ε 1.79 was claimed at δ = 1e-5, and the truth is δ = 5.9e-3.
    """
    stream = make_release_streams(plan(tmp_path).make_plan(), 1)[0]
    data = {**stream_to_data(stream), "participation": {"name": sampling, "rounds": 1, "rounds_per_epoch": 10}}
    if sampling != "poisson":
        data["participation"]["rounds_per_epoch"] = 1
    whole = stream_from_data({**data, "apart": 2.0})
    assert whole.schedule.secret
    with pytest.raises(
        InputError, match=r"clips apart with .*: where rounds are secret or up to clients they are 2"
    ):
        stream_from_data(data)


def test_clients_that_decide_when_they_come_have_an_increment_diameter_of_two_clip_norms(tmp_path: Path) -> None:
    """Guarantee: a client may be exchanged for one that comes in another round, √2 clips away.

    Moments of two clients are closer than that, so that with the charge for their distance μ would be too small.
    """
    moments = {"of": ["age"], "kind": "means", "edges": {"age": [0, 100]}}
    found = plan(tmp_path, tables=[moments]).make_plan()
    parts = found.objective, found.estimator, found.mechanism
    assert find_increment_diameter(*parts, FixedOrder(2, 2)) < 2**0.5
    order = ClientAvailability(rounds=2, max_participations=1, min_separation=1, rounds_per_epoch=2)
    assert find_increment_diameter(*parts, order) == APART
    data = stream_to_data(make_release_streams(found, 1)[0]) | {"clips": [[1.0, 2]]}
    data["participation"] = order.to_data()
    assert stream_from_data({**data, "apart": 2.0}).schedule == order
    with pytest.raises(
        InputError, match=r"clips apart with .*: where rounds are secret or up to clients they are 2"
    ):
        stream_from_data(data)


@pytest.mark.parametrize("mu", [1.0, 4.3e-4])
def test_a_trusted_server_that_scores_the_model_plans_the_lattice_of_the_guards(tmp_path: Path, mu: float) -> None:
    """Gains: noise for two clips reaches 2^48 units earlier, and on a coarser lattice it is too little for guards.

    A server's objective has the metrics of the scenario, and a guard's has none.
    """
    tree = table_tree(write_csv(tmp_path / "t.csv", rows(100))) | {
        "model": {"name": "ridge-statistics", "penalty": 0.1, "feature_norm": 2.0},
        "algorithm": {"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 1.0},
        "federation": {"silos": 2, "rounds": 1, "batches": [20, 10]},
        "privacy": {"relation": "replace-one", "mu": mu},
        "run": {"metrics": ["auc"]},
    }
    cell = resolve_cell(tree, "test")
    assert cell.data.table_schema is not None
    scored = load_public_task(cell).objective
    assert isinstance(scored, EvaluationView)
    server, guard = (
        make_plan(cell, objective, for_release=True).required_exact_plan
        for objective in (scored, make_schema_task(cell, cell.data.table_schema).objective)
    )
    (norm,) = guard.norms(1)
    assert math.sqrt(2.0) * norm / server.claim.sigma <= mu  # records are √2 clips apart
    assert (server.lattice, server.claim) == (guard.lattice, guard.claim)


@dataclass(frozen=True)
class OwnScores(EvaluationView):
    """A view of the user's, which may change increments after all."""


def test_a_view_of_the_users_has_an_increment_diameter_of_two_clip_norms(tmp_path: Path) -> None:
    asked = plan(tmp_path)
    parts = asked.make_plan().estimator, IndependentGaussian(), FixedOrder(1, 1)
    objective = asked.make_plan().objective
    assert find_increment_diameter(ScoreView(objective, ()), *parts) < APART
    assert find_increment_diameter(OwnScores(objective), *parts) == APART


@pytest.mark.parametrize(("mu", "power"), [(1e-3, 24), (5e-4, 23)])
def test_an_exact_release_needs_a_clip_norm_of_enough_lattice_units(tmp_path: Path, mu: float, power: int) -> None:
    """Nine cells in words of 40 bits: 2^22 √9 units, which are fewer than 2^24 and more than 2^23."""
    asked = plan(tmp_path, "secure-aggregation", TABLES[1:2], mu=mu)
    cell = asked.cell.model_copy(update={"run": asked.cell.run.model_copy(update={"word": 40})})
    objective = make_schema_task(cell, asked.schema).objective
    assert objective.dimension == 9
    if power == 24:
        assert min(make_plan(cell, objective, for_release=True).required_exact_plan.norms(1)) == 2**24
    else:
        with pytest.raises(InputError, match=f"9 values with a clip of {2**23} units are too coarse"):
            make_plan(cell, objective, for_release=True)


def test_an_exact_release_of_several_batches_needs_enough_lattice_units_in_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 2 reads 2^12 batches, so that its clip has 2^12 times fewer units than that of round 1."""
    asked, order = plan(tmp_path), FixedOrder(2, 2, (1, 2**12))
    estimator, objective = asked.make_plan().estimator, cast(Objective, SimpleNamespace(dimension=10_000))
    monkeypatch.setattr(Cell, "schedule", order)
    parts = estimator, IndependentGaussian(), make_workload(estimator, order)
    least = min(make_exact_plan(asked.cell, objective, *parts).norms(2))
    assert least < 2**22 * 100 < 2**12 * least
    with pytest.raises(InputError, match=f"10000 values with a clip of {least} units are too coarse"):
        make_exact_plan(asked.cell, objective, *parts, increment_diameter=1.5)


def tree_of_one_round() -> dict[str, Any]:
    return small_tree(
        federation={"silos": 1, "rounds": 1, "batch": 4},
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "replace-one", "mu": 1.0},
    )


def test_results_that_understate_the_increment_diameter_or_clip_disagree_with_their_scenario(
    tmp_path: Path,
) -> None:
    """Guarantee: `apart` and the clips of a record are those of its scenario's plan."""
    folder = fedpriv.run(tree_of_one_round(), out=tmp_path / "run").folder
    cell = json.loads((folder / "results.json").read_text())["cells"][0]
    assert make_entry(cell).agrees
    cell["releases"][0].update(
        apart=1.0, std=cell["releases"][0]["std"] / 2.0
    )  # the same claim, half of the noise
    cell.update(json.loads(json.dumps(make_entry(cell).recomputed_record)))
    assert make_entry(cell).claimed_mu == pytest.approx(1.0)
    assert make_entry(cell).disagreement == "apart of silo 0 is 1, and the scenario gives 2"
    del cell["releases"][0]["apart"]
    cell["releases"][0]["clips"] = [[0.5, 1]]
    cell.update(json.loads(json.dumps(make_entry(cell).recomputed_record)))
    assert make_entry(cell).disagreement == "clips of silo 0 are not those of the scenario"


def test_results_that_name_too_many_silos_disagree_with_their_scenario(tmp_path: Path) -> None:
    folder = fedpriv.run(tree_of_one_round(), out=tmp_path / "run").folder
    cell = json.loads((folder / "results.json").read_text())["cells"][0]
    cell["releases"][0]["owner"] = "silos 0-99"
    assert make_entry(cell).disagreement is not None


@pytest.mark.parametrize(
    ("record_value", "plan_value", "equal"),
    [
        (1.0, 1.0, True),
        (1.0, 1.0 + 1e-12, True),
        (1, 1.0, False),
        (True, 1.0, False),
        (1.0, True, False),
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0], [1.0, 1.0], False),
        (None, 1.0, False),
    ],
)
def test_ledger_values_are_equal_up_to_rounding_only_if_their_types_are_equal(
    record_value: Any, plan_value: Any, equal: bool
) -> None:
    assert _is_equal(record_value, plan_value) is equal


def test_evaluation_figures_without_their_releases_are_rejected(tmp_path: Path) -> None:
    """Guarantee: figures of evaluations are computed from their releases."""
    folder = fedpriv.run(tree_of_one_round(), out=tmp_path / "run").folder
    cell = json.loads((folder / "results.json").read_text())["cells"][0]
    cell["evaluation"] = {"by": "silos", "published": "with noise", "mu": 0.001, "releases": []}
    assert make_entry(cell).recomputed_record["evaluation"] is None
    assert "evaluation by silos is in the record, and not in the scenario" in (make_entry(cell).disagreement or "")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("per_record", -1.0),
        ("per_record", 0.0),
        ("decay", 1.5),
        ("decay", math.nan),
        ("period", 0),
        ("period", "x"),
    ],
)
def test_a_ledger_with_invalid_release_stream_parameters_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    data = stream_to_data(make_release_streams(plan(tmp_path).make_plan(), 1)[0])
    with pytest.raises(InputError, match=f"ledger: {key} = "):
        stream_from_data({**data, key: value})


@pytest.mark.parametrize(("section", "name"), [("model", "a-net"), ("algorithm", "an-algorithm")])
def test_a_smaller_increment_diameter_is_rejected_if_the_scenario_names_code_that_is_not_imported(
    tmp_path: Path, section: str, name: str
) -> None:
    """Gains: half of the claim.  Only fedpriv's own classes have increments that are closer than 2 clips."""
    folder = fedpriv.run(tree_of_one_round(), out=tmp_path / "run").folder
    cell = json.loads((folder / "results.json").read_text())["cells"][0]
    cell["scenario"][section] = {**cell["scenario"][section], "name": name}
    assert make_entry(cell).agrees
    cell["releases"][0].update(apart=1.0, std=cell["releases"][0]["std"] / 2.0)
    cell.update(json.loads(json.dumps(make_entry(cell).recomputed_record)))
    assert make_entry(cell).disagreement == (
        "apart of silo 0 is 1, and the scenario names code that was not imported"
    )


@pytest.mark.parametrize(
    ("section", "key"), [("algorithm", "foo"), ("federation", "foo"), ("run", "foo"), ("model", "foo")]
)
def test_an_unknown_scenario_key_cannot_hide_a_wrong_number_of_rounds(
    tmp_path: Path, section: str, key: str
) -> None:
    """Gains: half of the claim.  A scenario that names known code only is resolved, or its record is refused."""
    folder = fedpriv.run(tree_of_one_round(), out=tmp_path / "run").folder
    cell = json.loads((folder / "results.json").read_text())["cells"][0]
    cell["scenario"]["federation"]["rounds"] = 4
    assert make_entry(cell).disagreement is not None
    cell["scenario"][section] = {**cell["scenario"][section], key: 1}
    assert key in (make_entry(cell).disagreement or "")


def test_the_increment_diameter_changes_sensitivity_under_replace_one_only() -> None:
    assert factor_of("zero-out", 1.2) == 1.0
    assert factor_of("replace-one", 1.2) == 1.2
    assert factor_of("replace-one", 9.0) == 2.0
    assert moved_by("replace-one", 0.5, 3.0) == 3.0


def test_a_claim_with_a_smaller_increment_diameter_is_not_called_exact(tmp_path: Path) -> None:
    """Guarantee: "exactly" is said of a μ that a pair of records attains; an allowance of 2^-20 is in this one."""
    for stream in make_release_streams(plan(tmp_path).make_plan(), 1):
        assert stream.increment_diameter < APART
        assert not stream.attained
        assert stream_from_data({**stream_to_data(stream), "apart": APART}).attained
