"""The claim of a run is recomputed from what it released, and from nothing else."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedpriv.accounting.gaussian import compose
from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.claims.claim import compute_claim
from fedpriv.claims.entries import LedgerEntry, read_ledger
from fedpriv.claims.ledger import FIRST_STEP, ReleaseStream, make_release_streams, stream_from_data, stream_to_data
from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.cli.app import app
from fedpriv.core.errors import InputError, RunError
from fedpriv.engines.table import make_engine
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.registry import USER_MECHANISMS
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.noise.trust import Noise, Trust, make_unit
from fedpriv.participation.orders import FixedOrder
from fedpriv.participation.registry import USER_PARTICIPATIONS
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import parse_scenario
from fedpriv.scenario.schema import Cell
from fedpriv.study.results import RunFolder
from fedpriv.study.stored import privacy_data
from tests.conftest import small_tree
from tests.data.tables import rows, table_tree, write_csv
from tests.participation.own import WithoutReplacement

MakeCell = Callable[..., Cell]

STREAM = ReleaseStream(
    "silo 0", IndependentGaussian(), FixedOrder(16, 16), 1.0, (2.0,) * 16, 0.5, "replace-one", std=4.0
)


def finish(cell: Cell, engine: str = "vectorized") -> CellOutcome:
    (outcome,) = make_engine(engine)([cell], RunObserver())
    return outcome.cell_outcome


def write_run(folder: Path, tree: dict[str, Any] | None = None) -> Path:
    """Write the results of a real run, and return their file."""
    scenario = parse_scenario(tree or small_tree(), "test")
    run = RunFolder(folder / "run", scenario, "vectorized", resume=False)
    run.finished(0, finish(scenario.points[0].cell))
    return folder / "run" / "results.json"


def edit_cell(results: Path, edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Edit the first cell of a run's results, and return it."""
    tree = json.loads(results.read_text())
    edit(tree["cells"][0])
    results.write_text(json.dumps(tree))
    return dict(tree["cells"][0])


def check(results: Path, *options: str) -> Result:
    """Have the command check a run's claims."""
    return CliRunner().invoke(app, ["privacy", "ledger", str(results.parent), *options])


def guarantee_of(streams: Sequence[ReleaseStream]) -> Any:
    claim = compute_claim(streams)
    assert claim is not None
    return claim.guarantee


def test_mu_of_one_release_stream_matches_a_hand_calculation() -> None:
    """μ = 2 · (1/2) · 2 · √16 / 4 = 2; zero-out is half of replace-one; no noise has no price but infinity."""
    assert STREAM.mu == pytest.approx(2.0)
    assert dataclasses.replace(STREAM, relation="zero-out").mu == pytest.approx(1.0)
    assert dataclasses.replace(STREAM, std=0.0).mu == math.inf


def test_claim_is_that_of_the_worst_stream_and_absent_without_noise() -> None:
    quieter = dataclasses.replace(STREAM, party_name="silo 1", std=1.0)
    assert guarantee_of([STREAM, quieter]).mu == pytest.approx(8.0)
    assert compute_claim([]) is None
    assert compute_claim([STREAM, dataclasses.replace(STREAM, std=0.0)]) is None


PERSONS = dataclasses.replace(STREAM, unit=make_unit("user", 1))


@pytest.mark.parametrize(
    ("streams", "reason"),
    [
        ([STREAM, dataclasses.replace(STREAM, relation="zero-out")], "one neighbouring relation"),
        ([dataclasses.replace(STREAM, step=FIRST_STEP), PERSONS], "one neighbouring relation and one unit"),
    ],
)
def test_steps_of_different_units_do_not_compose(streams: list[ReleaseStream], reason: str) -> None:
    """A first step that protects records says nothing of persons, whom the rounds protect."""
    with pytest.raises(InputError, match=reason):
        compute_claim(streams)


@pytest.mark.parametrize("mechanism", [IndependentGaussian(), BinaryTree(0.5, period=4), BandedSquareRoot(0.9, 3)])
def test_release_streams_survive_json(mechanism: object) -> None:
    varied = dataclasses.replace(STREAM, mechanism=mechanism, clips=(1.0, *(2.0,) * 14, 3.0))
    assert stream_from_data(json.loads(json.dumps(stream_to_data(varied)))) == varied


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mechanism": {"name": "Homemade"}}, "mechanism 'Homemade' is none of"),
        *[({"apart": apart}, r"ledger: .*apart") for apart in ("1.5", None, [1], True, 0.5, 2.5, float("nan"))],
        ({"apart": 1.0, "clips": [[2.0, 16], [2.0, -15]]}, "ledger: clips: expected finite numbers above 0"),
        ({"clips": [[2.0, 10**13]]}, "ledger: clips: expected .*, 16 in all"),
        *(
            (
                {"integers": {"exponent": -9, "sigma": 1e6, "dimension": 9, "owners": 1, key: value}},
                "ledger: integers",
            )
            for key, value in (("exponent", None), ("sigma", "1"), ("dimension", 1e308), ("owners", 1.5))
        ),
        *(
            (
                {"participation": {"name": "fixed", "rounds": 16, "rounds_per_epoch": 8, key: count}},
                f"{key} = {count}",
            )
            for key, count in (
                ("rounds_per_epoch", 0),
                ("rounds_per_epoch", 1.5),
                ("rounds", -3),
                ("rounds", True),
            )
        ),
    ],
)
def test_invalid_release_stream_is_refused_with_a_one_line_message(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason) as refusal:
        stream_from_data({**stream_to_data(STREAM), **changes})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_ledger_gives_the_rho_that_the_scenario_targets(small_cell: MakeCell, engine: str, trust: str) -> None:
    cell = small_cell(algorithm__trust=trust, federation__silos=4, federation__batch=2, privacy__rho=3.0)
    finished = finish(cell, engine)
    assert [stream.party_name for stream in finished.releases] == ["server" if trust == "trusted" else "silos 0-3"]
    mu = guarantee_of(finished.releases).mu
    assert mu == pytest.approx(3.0, rel=1e-12)
    statement = privacy_data(cell, finished.releases)
    assert statement["rho"] == statement["mu"] == mu
    assert statement["epsilon"] < statement["epsilon_paper"]


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_halved_noise_doubles_the_claim(small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str) -> None:
    """A bug in the calibration shows in results.json, because the ledger holds the noise that was used."""
    honest = Trust.calibrate_noise

    def halved(self: Trust, *arguments: object) -> Noise:
        sources = honest(self, *arguments).sources  # type: ignore[arg-type]
        return Noise(tuple(source._replace(std=source.std / 2) for source in sources))

    monkeypatch.setattr(Trust, "calibrate_noise", halved)
    finished = finish(small_cell(algorithm__trust=trust, privacy__rho=3.0))
    assert guarantee_of(finished.releases).mu == pytest.approx(6.0)


def test_a_run_without_noise_claims_nothing(small_cell: MakeCell) -> None:
    cell = small_cell(privacy__mode="none", privacy__rho=None)
    statement = privacy_data(cell, finish(cell).releases)
    assert (statement["mu"], statement["epsilon"], statement["noise"]) == (None, None, "none")


def test_fewer_rounds_cost_less(small_cell: MakeCell) -> None:
    """A run that was cut after 2 of 8 rounds is charged √2/√8 of its plan."""
    cell = small_cell(privacy__rho=4.0)
    plan = make_plan(cell, load_task(cell).objective)
    assert guarantee_of(make_release_streams(plan, 2)).mu == pytest.approx(2.0)


def test_doctored_mu_in_the_results_is_detected(tmp_path: Path) -> None:
    results = write_run(tmp_path)
    (entry,) = read_ledger(results.parent)
    assert entry.agrees
    edit_cell(results, lambda cell: cell.update(mu=2.0))
    (entry,) = read_ledger(results.parent)
    assert not entry.agrees
    assert entry.claim is not None
    assert entry.claim.guarantee.mu == pytest.approx(4.0)
    with pytest.raises(InputError, match=r"no results\.json"):
        read_ledger(tmp_path)


def test_a_silo_with_less_noise_than_its_own_budget_asks_for_is_seen(tmp_path: Path) -> None:
    tree = small_tree(privacy={"relation": "replace-one", "epsilon": 2.0, "shares": [0.1, 0.5, 1.0]})
    results, entry = agreeing_run(tmp_path, tree)
    edit_cell(results, lambda cell: cell["releases"][0].update(std=cell["releases"][2]["std"]))
    (entry,) = read_ledger(results.parent)
    assert entry.disagreement == "releases are not those of all rounds, silos and steps of its scenario"


@pytest.mark.parametrize("key", ["mu", "epsilon"])
def test_privacy_ledger_command_fails_where_a_stored_claim_differs_from_the_ledger(
    tmp_path: Path, key: str
) -> None:
    """Exit code 1 and the cell's number: a doctored figure that a script would take for checked."""
    results = write_run(tmp_path)
    assert check(results).exit_code == 0
    edit_cell(results, lambda cell: cell.update({key: 0.5}))
    for options in ([], ["--json"]):
        refusal = check(results, *options).exception
        assert isinstance(refusal, RunError)
        assert "the claim of cell 0 is not what the ledger gives" in str(refusal)
    assert "DIFFERS" in check(results).output


@pytest.mark.slow
def test_doctored_epsilon_of_a_poisson_sampled_run_is_detected(tmp_path: Path) -> None:
    """It has no μ: ε is all there is to check."""
    tree = small_tree(
        federation__epochs=2,
        federation__sampling="poisson",
        algorithm={"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "zero-out", "epsilon": 2.0},
    )
    results = write_run(tmp_path, tree)
    (entry,) = read_ledger(results.parent)
    assert entry.agrees
    assert entry.claimed_mu is None
    assert entry.claimed_epsilon is not None
    edit_cell(results, lambda cell: cell.update(epsilon=cell["epsilon"] / 2.0))
    (entry,) = read_ledger(results.parent)
    assert not entry.agrees


def _fewer_rounds(cell: dict[str, Any]) -> None:
    (stream,) = cell["releases"]
    stream["participation"] |= {"rounds": 4, "rounds_per_epoch": 4}
    stream["clips"] = [[stream["clips"][0][0], 4]]


def _without(key: str, edit: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """The edit, and nothing left that it could be compared with."""

    def edited(cell: dict[str, Any]) -> None:
        edit(cell)
        *sections, last = key.split(".")
        del reduce(dict.__getitem__, sections, cell)[last]

    return edited


def _release(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda cell: cell["releases"][0].update(changes)


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "fewer rounds": _fewer_rounds,
    "one silo of three": _release(owner="silo 0"),
    "a step that no run has": _release(step="third step"),
    "a silo nobody has": _release(owner="silos 1-3"),
    "the server's release beside those of the silos": lambda cell: cell["releases"].append(
        {**cell["releases"][0], "owner": "server", "per_record": cell["releases"][0]["per_record"] / 3.0}
    ),
    "the server's noise, said of silos": lambda cell: cell.update(trust="trusted"),
    "a relation that halves mu": _release(relation="zero-out"),
    "a relation in the heading": lambda cell: cell.update(relation="zero-out"),
    "a unit in the heading": lambda cell: cell.update(unit="all records of one person"),
    "a unit that nobody knows": _release(unit="household"),
    "a unit that the scenario did not ask for": lambda cell: cell["scenario"]["privacy"].update(unit="household"),
    "a simulation that is called a release": lambda cell: cell.update(noise="release"),
    "noise beyond all numbers": _release(std=1e308 * 10),
    "fewer rounds, and nobody says how many": _without("rounds", _fewer_rounds),
    "one silo, and nobody says of how many": _without("silos", _release(owner="silo 0")),
    "a relation that halves mu, and nobody says which": _without(
        "scenario.privacy.relation", _release(relation="zero-out")
    ),
}
UNREADABLE = ("noise beyond all numbers", "a unit that nobody knows")


@pytest.mark.parametrize("edit", EDITS)
def test_doctored_releases_that_do_not_match_the_run_are_detected(tmp_path: Path, edit: str) -> None:
    """Gains: "ok" for a smaller mu, recomputed from releases that leave out rounds, silos or half of a change."""
    cell = edit_cell(results := write_run(tmp_path), EDITS[edit])
    if edit not in UNREADABLE:
        figures = guarantee_of(list(map(stream_from_data, cell["releases"]))).figures(cell["delta"])
        edit_cell(results, lambda cell: cell.update(figures))
    assert check(results).exit_code != 0


def agreeing_run(folder: Path, tree: dict[str, Any]) -> tuple[Path, LedgerEntry]:
    """Path of the results of a run, and its entry in the ledger, which agrees with the scenario."""
    results = write_run(folder, tree)
    (entry,) = read_ledger(results.parent)
    assert entry.disagreement is None
    return results, entry


def disagreement_at_equal_mu(results: Path) -> str | None:
    """What differs from the scenario in a record that claims μ = 1 as before."""
    (entry,) = read_ledger(results.parent)
    assert entry.claim is not None
    assert entry.claim.guarantee.mu == pytest.approx(1.0)
    return entry.disagreement


def _halved(stream: dict[str, Any], key: str) -> None:
    """The same μ of half of the noise."""
    stream["std"] /= 2.0
    stream[key] = [[clip / 2.0, rounds] for clip, rounds in stream[key]] if key == "clips" else stream[key] / 2.0


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("clips", "clips of silo 0 are not those of the scenario"),
        ("per_record", "per_record of silo 0 is 0.125, and the scenario gives 0.25"),
        ("apart", "apart of silo 0 is 1, and the scenario gives 2"),
    ],
)
def test_less_noise_for_smaller_increments_than_the_scenarios_is_seen(
    tmp_path: Path, key: str, reason: str
) -> None:
    """Gains: "ok" for the same μ, of half of the noise."""
    tree = small_tree(
        federation={"silos": 1, "rounds": 1, "batch": 4},
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "replace-one", "mu": 1.0},
    )
    results, _entry = agreeing_run(tmp_path, tree)
    edit_cell(results, lambda cell: cell["releases"][0].setdefault("apart", 2.0))
    edit_cell(results, lambda cell: _halved(cell["releases"][0], key))
    assert disagreement_at_equal_mu(results) == reason


def test_the_weight_that_one_of_several_silos_should_have_is_named(tmp_path: Path) -> None:
    """Gains: "is 0.5, and the scenario gives 0.5", of the first silo, whose weight is right."""
    results = write_run(tmp_path, small_tree(federation={"silos": 3, "rounds": 8, "batches": [2, 3, 5]}))
    edit_cell(results, lambda cell: cell.update(releases=[{**cell["releases"][0], "owner": "silos 0-2"}]))
    (entry,) = read_ledger(results.parent)
    assert entry.disagreement == "per_record of silos 0-2 is 0.5, and the scenario gives 0.333333"


@pytest.mark.parametrize("changes", [{"federation__sampling": "own"}, {"algorithm__mechanism": "own"}])
def test_an_impossible_scenario_that_names_imported_code_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Gains: "ok" for a scenario that nobody can run, whose rounds and weights are then not compared."""
    monkeypatch.setitem(USER_PARTICIPATIONS, "own", WithoutReplacement)
    monkeypatch.setitem(USER_MECHANISMS, "own", BinaryTree)
    algorithm = {"name": "dp-ftrl", "mechanism": "tree", "clip": 1.0, "step": -1.0, "trust": "untrusted"}
    sections = {"algorithm": algorithm, "privacy": {"relation": "zero-out", "mu": 1.5}, "model": {"name": "mlp"}}
    scenario = small_tree(**{**sections, **changes})
    entry = LedgerEntry(0, {}, 1, "untrusted", None, None, 1e-5, (), {"scenario": scenario})
    with pytest.raises(InputError, match=r"algorithm\.step = -1"):
        _ = entry.resolved_cell


def _rarer(stream: dict[str, Any]) -> None:
    stream["participation"] |= {"rounds": 1, "rounds_per_epoch": 1}
    stream["clips"] = [[stream["clips"][0][0], 1]]


def _once_each(stream: dict[str, Any]) -> None:
    """The same μ of half of the noise, where each record takes part in one of the four evaluations."""
    stream["std"] /= 2.0
    stream["participation"]["rounds_per_epoch"] = 4


EVALUATION_EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "nothing": (lambda entry: None, ""),
    "less": (lambda entry: entry.update(mu=0.25), r"evaluation\.mu is 0\.25, and its releases give 0\.[45]"),
    "a silo": (lambda entry: entry["releases"][0].update(owner="silos 0-1"), "are not those of all silos of the"),
    "rounds": (lambda entry: _rarer(entry["releases"][0]), "are not those of 4 evaluations"),
    "relation": (lambda entry: entry["releases"][0].update(relation="zero-out"), "have another relation than the"),
    "distance": (lambda entry: entry["releases"][0].update(apart=1.5), "have an apart below 2, and the scenario"),
    "clips": (
        lambda entry: _halved(entry["releases"][0], "clips"),
        "evaluation.releases: clips of silos 0-2 are not",
    ),
    "weights": (lambda entry: _halved(entry["releases"][0], "per_record"), "per_record of silos 0-2 is 0.01, and"),
    "participation": (lambda entry: _once_each(entry["releases"][0]), "participation of silos 0-2 is not that of"),
    "noise": (
        lambda entry: entry["releases"][0].update(std=entry["releases"][0]["std"] / 2.0),
        "evaluation.mu is 0.5, and its releases give 1",
    ),
}


@pytest.mark.parametrize("edit", EVALUATION_EDITS)
def test_evaluations_that_are_not_those_of_the_run_are_seen(tmp_path: Path, edit: str) -> None:
    change, reason = EVALUATION_EDITS[edit]
    results = write_run(tmp_path, small_tree(evaluation={"records": 50, "mu": 0.5}))
    edit_cell(results, lambda cell: change(cell["evaluation"]))
    (entry,) = read_ledger(results.parent)
    assert re.search(reason, entry.disagreement or "") is not None
    assert entry.agrees == (edit == "nothing")


@pytest.mark.parametrize("there", ["scenario", "record"])
def test_evaluations_are_in_the_scenario_and_in_the_record(tmp_path: Path, there: str) -> None:
    results = write_run(tmp_path, small_tree(evaluation={"records": 50, "mu": 0.5}))

    def change(cell: dict[str, Any]) -> None:
        if there == "scenario":
            cell["evaluation"] = None
        else:
            del cell["scenario"]["evaluation"]

    edit_cell(results, change)
    (entry,) = read_ledger(results.parent)
    other = "record" if there == "scenario" else "scenario"
    assert entry.disagreement == f"evaluation by silos is in the {there}, and not in the {other}"


@pytest.mark.parametrize("key", ["zcdp", "epsilon_paper"])
def test_every_figure_that_is_shown_is_recomputed(tmp_path: Path, key: str) -> None:
    """Gains: "ok" beside a figure that is a hundredth of what was spent."""
    edit_cell(results := write_run(tmp_path), lambda cell: cell.update({key: cell[key] / 100.0}))
    assert check(results).exit_code == 1


def test_cells_that_results_json_does_not_have_yet_are_checked(tmp_path: Path) -> None:
    """Gains: tables and reports read cells.jsonl, the ledger did not: any claim in it passed."""
    results = write_run(tmp_path)
    (cell,) = json.loads(results.read_text())["cells"]
    results.with_name("cells.jsonl").write_text(json.dumps({**cell, "cell": 1, "mu": 0.5}) + "\n{cut short")
    assert check(results).exit_code == 1
    assert [entry.cell for entry in read_ledger(results.parent)] == [0, 1]
    results.with_name("cells.jsonl").write_text("[]\n")
    with pytest.raises(InputError, match=f"^{re.escape(str(results.parent))}: not a ledger of fedpriv"):
        read_ledger(results.parent)


@pytest.mark.parametrize(
    "values",
    [
        {"trust": ["a"]},
        {"point": "x"},
        {"evaluation": "x"},
        {"evaluation": {"releases": 1}},
        {"evaluation": {"releases": [{}]}},
        {"evaluation": {"releases": [], "mu": {"x": 1}}},
        {"releases": [{"line\n\x1b[1m": 1}]},
        {"scenario": {"line\n\x1b[1m": 1}},
    ],
    ids=str,
)
def test_a_record_of_another_form_is_refused_by_the_ledger_in_one_line(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    edit_cell(results := write_run(tmp_path), lambda cell: cell.update(values))
    for command in (
        ["privacy", "ledger", str(results.parent)],
        ["privacy", "ledger", str(results.parent), "--json"],
        ["show", str(results.parent)],
    ):
        ended = CliRunner().invoke(app, command).exception
        assert ended is None or isinstance(ended, SystemExit | InputError | RunError), (command, ended)
        assert "\n" not in str(ended), (command, ended)
        assert "\x1b" not in str(ended), (command, ended)


def test_stream_of_two_equal_silos_counts_twice_for_a_person_in_both() -> None:
    """A person in both of "silos 0-1", each at mu = 1: √2; one stream fewer counted would be 1."""
    both = dataclasses.replace(STREAM, party_name="silos 0-1", unit=make_unit("user", 1, max_silos=2))
    assert guarantee_of([both]) == GaussianDP(compose([both.mu, both.mu]))


def test_persons_in_fewer_silos_than_the_scenario_says_are_seen(tmp_path: Path) -> None:
    """Gains: "ok" for the same μ of half of the noise, charged for persons in one silo in place of four."""
    tree = small_tree(
        data={"name": "visits", "partition": "site"},
        model={"name": "logistic-regression", "feature_norm": 2.5},
        federation={"silos": 4, "rounds": 2, "batches": [50, 50, 50, 50]},
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 0.3, "step": 1.0},
        privacy={"relation": "zero-out", "mu": 1.0, "unit": "user", "records": 8, "shared": 4},
    )
    results, _entry = agreeing_run(tmp_path, tree)

    def charge_one_silo(cell: dict[str, Any]) -> None:
        for stream in cell["releases"]:
            stream["std"] /= 2.0
            stream["unit"]["shared"] = 1

    edit_cell(results, charge_one_silo)
    difference = disagreement_at_equal_mu(results)
    assert difference == "releases are not those of all rounds, silos and steps of its scenario"


def test_less_noise_for_a_smaller_increment_diameter_of_curves_is_seen(tmp_path: Path) -> None:
    """Gains: "ok" for the same μ of less noise, of evaluations whose increments are √(8/3) clips apart, not 1."""
    tree = table_tree(write_csv(tmp_path / "table.csv", rows(600)))
    tree["privacy"] = {"relation": "replace-one", "mu": 1.0}
    tree["federation"] = {"silos": 2, "rounds": 2, "epochs": 2, "batches": [360, 240]}
    tree["evaluation"] = {"records": [360, 240], "mu": 1.0, "curves": {"bins": 16}}
    results, entry = agreeing_run(tmp_path, tree)
    diameter = entry.test_streams[0].increment_diameter
    assert 1.0 < diameter < 2.0

    def move_closer(cell: dict[str, Any]) -> None:
        for stream in cell["evaluation"]["releases"]:
            stream["std"] /= diameter
            stream["apart"] = 1.0

    edit_cell(results, move_closer)
    difference = disagreement_at_equal_mu(results)
    assert difference == f"evaluation.releases: apart of silo 0 is 1, and the scenario gives {diameter:.6g}"


@pytest.mark.parametrize("mechanism", [IndependentGaussian(), BandedSquareRoot(1.0, 4)])
def test_less_noise_for_other_running_sums_or_another_mechanism_is_seen(
    tmp_path: Path, mechanism: IndependentGaussian | BandedSquareRoot
) -> None:
    """Gains: "ok" for the same μ of less noise, of single rounds or of another mechanism than the tree."""
    tree = small_tree(
        federation={"silos": 2, "rounds": 16, "batch": 4},
        algorithm={"name": "dp-ftrl", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "replace-one", "mu": 1.0},
    )
    results, entry = agreeing_run(tmp_path, tree)
    decay = 1.0 if mechanism.name == "banded" else 0.0
    other = dataclasses.replace(entry.streams[0], mechanism=mechanism, decay=decay)
    edit_cell(
        results,
        lambda cell: cell["releases"][0].update(
            stream_to_data(dataclasses.replace(other, std=other.std * other.mu))
        ),
    )
    difference = disagreement_at_equal_mu(results)
    assert difference == "decay, period or mechanism of silos 0-1 is not that of the scenario"


def test_integers_in_a_simulation_in_floating_point_are_seen(tmp_path: Path) -> None:
    """Gains: a claim "for the arithmetic of the program itself" of a run whose releases were floating point."""
    tree = small_tree(
        federation={"silos": 1, "rounds": 1, "batch": 4},
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "replace-one", "mu": 1.0},
    )
    results = write_run(tmp_path, tree)
    (entry,) = read_ledger(results.parent)
    integers = {"exponent": -30, "sigma": entry.streams[0].std * 4.0 * 2.0**30, "dimension": 100, "owners": 1}
    cell = edit_cell(results, lambda cell: cell["releases"][0].update(integers=integers))
    claim = compute_claim([stream_from_data(cell["releases"][0])])
    assert claim is not None
    edit_cell(results, lambda cell: cell.update(claim.figures(cell["delta"])))
    (entry,) = read_ledger(results.parent)
    assert entry.claim is not None
    assert entry.claim.exact
    assert entry.disagreement == "releases are not those of all rounds, silos and steps of its scenario"
