"""What `fedpriv tune` refuses before a run: grids over the promise or the problem, and what it cannot try."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fedpriv.accounting.selection import NegativeBinomialRunCount
from fedpriv.addons.tune import tune as search
from fedpriv.addons.tune.grids import HeldOut, TuningRow, check_grid, hold_out, list_settings, make_trial
from fedpriv.addons.tune.tune import check_promise, tune_privately
from fedpriv.claims.ledger import make_release_streams
from fedpriv.claims.outcome import make_outcome
from fedpriv.core.errors import InputError
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.load import Scenario, load_scenario, resolve_cell
from tests.cli.command import fedpriv, refusal
from tests.conftest import small_tree
from tests.data.tables import rows, table_tree, write_csv

SCENARIO = """
name = "plain"
[data]
name = "synthetic"
[federation]
silos = 5
rounds = 20
[algorithm]
name = "dp-sgd"
trust = "trusted"
clip = 1.0
step = 0.5
[privacy]
relation = "zero-out"
epsilon = 2.0
[run]
evaluations = 1
"""
PROMISE = [
    "privacy.epsilon=[1,200]",
    "privacy.delta=[1e-5,0.1]",
    'privacy.mode=["none"]',
    'privacy.relation=["zero-out","replace-one"]',
    'privacy.unit=["record"]',
    'algorithm.trust=["trusted","untrusted"]',
    'federation.sampling=["fixed","poisson"]',
    "federation.groups=[1,2]",
]
PROBLEM = [
    'data.name=["synthetic"]',
    "data.validation=[10,20]",
    "federation.silos=[2,5]",
    "federation.clients=[10]",
    "federation.samples=[1000]",
    "federation.drop_out=[0.1]",
    "evaluation.mu=[1.0]",
    'run.dtype=["float32"]',
    "run.evaluations=[1,2]",
    "label.a=[1]",
    "privacy=[1]",
]
Refused = Callable[..., str]


def plain(folder: Path, *changes: str) -> Scenario:
    """`plain.toml`, which this function writes."""
    (folder / "plain.toml").write_text(SCENARIO)
    return load_scenario(folder / "plain.toml", changes)


def choose(scenario: Scenario, row: TuningRow, settings: Any, held_out: HeldOut, *fixed: str) -> None:
    """Choose settings privately, with two trials on average."""
    count, draw = NegativeBinomialRunCount(2.0, 0.0), np.random.default_rng(1)
    tune_privately(scenario, [(row, settings)], held_out, list(fixed), count, draw)


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """The one line that `fedpriv tune plain.toml WORDS` ends with; nothing was run and nothing written."""
    monkeypatch.chdir(tmp_path)
    plain(tmp_path)
    for name in ("run_sweep", "make_engine"):
        monkeypatch.setattr(search, name, Mock(side_effect=AssertionError("a trial was run")))

    def command(*words: str) -> str:
        line = refusal(["tune", "plain.toml", *words])
        assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".toml") == []
        return line

    return command


@pytest.mark.parametrize("private", [[], ["--private"]], ids=["open", "private"])
@pytest.mark.parametrize("given", [*PROMISE, *PROBLEM])
def test_tuning_refuses_a_grid_over_privacy_trust_or_data_keys(
    given: str, private: list[str], refused: Refused
) -> None:
    """Guarantee: no setting that is compared differs in what is protected, against whom, or in the records."""
    line = refused("--grid", "algorithm.step=[0.1,1]", "--grid", given, *private)
    key = given.partition("=")[0]
    assert f"--grid {key}: " in line
    assert ("which is given and not chosen" in line) == (given in PROMISE or key == "privacy")
    assert "A grid is over algorithm.KEY, model.KEY and federation.rounds" in line


@pytest.mark.parametrize(
    "key", ["algorithm.step", "algorithm.mechanism", "model.width", "federation.rounds", "federation.batch",
            "federation.batches", "federation.cohort", "federation.epochs"]
)  # fmt: skip
def test_a_tuning_grid_may_contain_training_keys(key: str) -> None:
    check_grid({key: [1, 2]}, "--grid")


def test_a_tuning_file_with_a_grid_over_privacy_or_a_malformed_grid_is_refused(
    refused: Refused, tmp_path: Path
) -> None:
    for grid, said in (
        ('[grid.dp-sgd]\n"privacy.epsilon" = [1, 200]\n', "grid.dp-sgd: privacy.epsilon: says what is protected"),
        ("[grid.dp-sgd.privacy]\nepsilon = [1, 200]\n", "grid.dp-sgd: privacy: says what is protected"),
        ('[grid.dp-sgd]\n"algorithm.step" = 3\n', "grid.dp-sgd: algorithm.step: expected a list of values"),
        ("[grid]\ndp-sgd = 3\n", "grid.dp-sgd: expected keys with lists of values"),
        ("grid = 3\n", "grid: expected a table [grid.VALUE]"),
    ):
        scenario = tmp_path / "plain.toml"
        (tmp_path / "mine.toml").write_text(SCENARIO)
        scenario.write_text(f'scenario = "mine.toml"\n{grid}')
        assert said in refused()


@pytest.mark.parametrize(
    "fixed", ["privacy.relation=replace-one", "privacy.epsilon=200.0", "algorithm.trust=untrusted",
              "federation.sampling=poisson"]
)  # fmt: skip
def test_private_tuning_refuses_other_privacy_settings_during_its_trials(fixed: str, refused: Refused) -> None:
    line = refused("--private", "--grid", "algorithm.step=[0.1,1]", "--while-tuning", fixed)
    assert f"--private: {fixed.partition('=')[0]} = " in line
    assert "but the choice is charged for" in line


@pytest.mark.parametrize("how", ["--set", "--while-tuning"])
@pytest.mark.parametrize(
    ("partition", "key"), [("dirichlet", "data.concentration=0.3"), ("shards", "data.shards=2")]
)
def test_private_tuning_refuses_partitions_that_depend_on_labels(
    partition: str, key: str, how: str, refused: Refused
) -> None:
    """Guarantee of `tune_privately`: one label moved silo or batch of 1,326 of 4,000 records with "dirichlet"."""
    line = refused("--private", "--grid", "algorithm.step=[0.1,1]", how, f"data.partition={partition}", how, key)
    assert (
        f'--private: data.partition = "{partition}" looks at labels, so that one record moves others to other '
        'silos and batches; use "iid", or "site"'
    ) in line


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, "split"),
        ({"split": None, "person": "patient"}, "person"),
        ({"split": None, "missing": "drop"}, "drop"),
    ],
)
def test_private_tuning_refuses_a_held_out_count_that_depends_on_record_values(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    """Guarantee: a held-out record moves a score by 1 in the number that is charged for."""
    table = table_tree(write_csv(tmp_path / "t.csv", rows()), **changes)
    cell = resolve_cell({**table, "federation": {"silos": 2, "rounds": 2, "batches": [2, 2]}}, "test")
    with pytest.raises(InputError, match=rf"--private: by table\..*{key}.* the number of held-out records"):
        choose(plain(tmp_path), TuningRow({}, cell, {}), [{}], HeldOut(5, 40, ((5,),)))


def test_private_tuning_refuses_any_trial_with_another_relation_trust_or_validation_size(tmp_path: Path) -> None:
    """Guarantee: every trial has the relation, the target and the trust that the price is for."""
    scenario = plain(tmp_path)
    cell = scenario.points[0].cell
    for key, value, *fixed in (
        ("privacy.relation", "replace-one"),
        ("algorithm.trust", "untrusted"),
        ("data.validation", 50, "data.validation=50"),
    ):
        row = TuningRow({"algorithm.name": "dp-sgd"}, cell, {"algorithm.step": [1.0]} if fixed else {key: [value]})
        with pytest.raises(InputError, match=f"--private: {key} = {value!r} while tuning"):
            choose(scenario, row, list_settings(row.grid), hold_out(cell, 100), *fixed)


def test_private_tuning_of_a_regression_is_refused_before_a_run(tmp_path: Path) -> None:
    scenario = plain(tmp_path, "model.name=linear-regression")
    row = TuningRow({}, scenario.points[0].cell, {})
    with pytest.raises(InputError, match="which a regression or a loss of your own does not have"):
        choose(scenario, row, [{}], HeldOut(100, 6000, ((100,),)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trials", "0"], "--trials 0: at least 1 setting of every row is tried"),
        (["--trials", "-3"], "--trials -3: at least 1 setting of every row is tried"),
        (["--trials", "inf"], "--trials inf: a whole number"),
        (["--private", "--trials", "0"], "trials = 0.0: on average from 1"),
        (["--metric", "foo"], "--metric foo: the runs have test_loss, test_accuracy"),
        (["--metric", "foo", "--set", 'run.metrics=[["auc"]]'], "have test_loss, test_accuracy, test_auc"),
        (["--grid", "step"], "--grid 'step': expected KEY=[VALUE, …], such as algorithm.step=[0.1,1,10]"),
        (["--grid", "=[1]"], "--grid '=[1]': expected KEY=[VALUE, …]"),
        (["--grid", "step=[1]"], "--grid step: no key of a scenario; did you mean 'algorithm.step'?"),
        (["--grid", "seeds=[1,2]"], "--grid seeds: no setting to choose; give --seeds"),
        (["--grid", 'algorithm.name=["dp-sgd","dp-ftrl"]'], "--grid algorithm.name: every algorithm is a row"),
        (["--grid", "algorithm.step=[1]", "--grid", "algorithm.step=[2]"],
         "--grid 'algorithm.step=[2]': algorithm.step has a grid already"),
        (["--while-tuning", "rounds"], "--while-tuning 'rounds': expected KEY=VALUE"),
        (["--while-tuning", "data.validation=50"], "how many records are held out; give --held-out"),
        (["--while-tuning", 'data={name="synthetic"}'], "would hide data.validation, which the trials set"),
        (["--set", "federation.rounds=[20,2000]"], "one pass is 2000 batches of 5 records"),
        (["--grid", "federation.batch=[1,300]"], "a run with federation.batch = 300: federation: one pass is"),
    ],
)  # fmt: skip
def test_invalid_tuning_options_are_refused_before_the_first_trial(
    words: list[str], said: str, refused: Refused
) -> None:
    line = refused(*words)
    assert said in line
    assert "--set" not in line


def test_a_tuning_setting_that_cannot_run_is_refused_by_name_in_one_line(refused: Refused) -> None:
    line = refused("--grid", "algorithm.step=[1,-2]")
    assert line == "fedpriv: while tuning: algorithm.step = -2: expected a number above 0\n"
    line = refused("--grid", "algorithm.step=[1]", "--grid", "algorithm.stop=[3]")
    setting = "algorithm.step = 1, algorithm.stop = 3"
    assert line.startswith(f"fedpriv: while tuning, {setting}: algorithm.stop: unknown key")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["federation.batch", "federation.epochs"])
def test_tuning_states_how_many_held_out_records_the_tuned_scenario_assigns_to_silos(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence is of the tuned scenario, on all its seeds, and not of the scenario as it was."""
    monkeypatch.chdir(tmp_path)
    swept = SCENARIO.replace("rounds = 20", "rounds = 20\nbatch = 7") + "[sweep]\nseeds = 2\n"
    Path("plain.toml").write_text(swept)
    value = 50 if key == "federation.batch" else 4
    words = ["--grid", f"{key}=[{value}]", "--grid", "algorithm.step=[0.5]", "--out", "out"]
    done = fedpriv("tune", "plain.toml", *words, cwd=tmp_path)
    said = " ".join(done.stdout.split())
    assert done.returncode == 0
    points = load_scenario(Path("out/scenario.toml")).points
    runs = [[int((order >= 5400).sum()) for order in partition_records(point.cell)] for point in points]
    assert len(runs) == 2
    reads = sorted({sum(run) for run in runs})
    counts = sorted({count for run in runs for count in run})
    read = f"{reads[0]}" if len(reads) == 1 else f"{reads[0]} to {reads[-1]}"
    spread = f"{counts[0]} to {counts[-1]} to each of 5"
    sentence = f"in a run of the tuned scenario {read} of them belong to its silos, {spread}"
    assert sentence in said
    assert sentence in json.loads(Path("out/tuning.json").read_text())["held_out"]["words"]


def test_trials_of_larger_batches_have_fewer_rounds(tmp_path: Path) -> None:
    """What is left of the records is shared out by the setting's own batch."""
    cell = plain(tmp_path).points[0].cell
    held_out = hold_out(cell, 600)
    for batch, rounds in ((54, 20), (60, 18)):
        assert make_trial(cell, {"federation.batch": batch}, held_out, [], 1).federation.rounds == rounds


@pytest.mark.parametrize(("times", "refused_"), [(1.0, False), (0.999, True), (0.5, True)])
def test_a_trial_that_released_more_than_is_charged_is_refused(times: float, refused_: bool) -> None:
    """A trial whose noise is half of what was calibrated is 2 mu-GDP, and its choice is charged for mu."""
    cell = resolve_cell(small_tree(), "test")
    plan = make_plan(cell, load_task(cell).objective)
    released = [dataclasses.replace(stream, std=times * stream.std) for stream in make_release_streams(plan, 8)]
    tried = dataclasses.replace(make_outcome(plan, 8, np.zeros(7850), {}, None, 0.0), releases=tuple(released))
    with pytest.raises(InputError, match="--private") if refused_ else nullcontext():
        check_promise(tried, 4.0)
