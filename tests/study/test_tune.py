"""`fedpriv tune`: as many settings for every row, on held-out records, and what is said of the choice."""

import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpriv.accounting.selection import NegativeBinomialRunCount, PoissonRunCount, PrivateSelection
from fedpriv.addons.tune.command import complete_request, default_metric
from fedpriv.addons.tune.grids import (
    HeldOut,
    choose_settings,
    find_positions,
    hold_out,
    is_better,
    list_settings,
    make_default_grid,
    make_trial,
    pair_grids,
    parse_grid,
)
from fedpriv.addons.tune.options import TuneRequest
from fedpriv.addons.tune.tune import _read_score, noisy_score
from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.core.errors import InputError
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.load import load_scenario, parse_scenario, resolve_cell
from fedpriv.scenario.published import TunedChoice, Tuning
from fedpriv.show.statement import make_statements
from fedpriv.show.summary import describe_tuning
from fedpriv.study.results import Results, read_results
from tests.cli import command
from tests.cli.command import refusal
from tests.conftest import small_tree

SCENARIO = """
# A line that stays.
name = "mine"
title = "Two algorithms, two levels"
[data]
name = "synthetic"
[federation]
silos = 3
rounds = 10
samples = 6000
[algorithm]
name = "dp-sgd"
trust = "trusted"
clip = 1.0
step = 0.5
[privacy]
relation = "replace-one"
mu = 1.0
[run]
evaluations = 1
[sweep]
"algorithm.name" = ["dp-sgd", "dp-ftrl"]
"privacy.mu" = [1.0, 4.0]
seeds = 2
"""
GRID = ["--grid", "algorithm.step=[0.1, 10, 1]", "--grid", "algorithm.clip=[1.0, 4.0]"]
Command = Callable[..., tuple[str, str]]


@pytest.fixture
def fedpriv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """Runs a command in a folder with `mine.toml`; what it printed to stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(SCENARIO)

    def run(*words: str) -> tuple[str, str]:
        done = command.fedpriv(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run


def tree_of(path: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(Path(path).read_text())
    return tree


@pytest.mark.slow
def test_tuning_chooses_for_every_row_the_best_of_equally_many_settings_on_held_out_records(
    fedpriv: Command,
) -> None:
    out, err = fedpriv("tune", "mine.toml", *GRID, "--held-out", "500", "--seeds", "7", "--seeds", "8")
    trials = read_results(Path("runs/mine-tuned/trials")).cells
    assert len(trials) == 4 * 6 * 2
    assert {cell["scenario"]["data"]["validation"] for cell in trials} == {500}, "the test set is not looked at"
    assert {cell["records"] for cell in trials} == {5490}, "held-out records are not trained on"
    means: dict[tuple[Any, ...], dict[tuple[float, float], list[float]]] = {}
    for cell in trials:
        algorithm, mu = cell["scenario"]["algorithm"], cell["scenario"]["privacy"]["mu"]
        scores = means.setdefault((algorithm["name"], mu), {})
        scores.setdefault((algorithm["step"], algorithm["clip"]), []).append(cell["test_accuracy"])
    text = Path("runs/mine-tuned/scenario.toml").read_text()
    assert text.startswith(SCENARIO.rstrip()), "the file stays as it was, with its comments"
    rules = tomllib.loads(text)["where"]
    assert len(rules) == 4
    for rule in rules:
        scores = means[rule["when"]["algorithm.name"], rule["when"]["privacy.mu"]]
        assert len(scores) == 6
        assert all(len(of_seeds) == 2 for of_seeds in scores.values())
        chosen = scores[rule["set"]["algorithm.step"], rule["set"]["algorithm.clip"]]
        assert np.mean(chosen) == max(map(np.mean, scores.values()))
    tuned = load_scenario(Path("runs/mine-tuned/scenario.toml"))
    for point in tuned.points:
        (rule,) = (rule for rule in rules if rule["when"] == dict(point.swept_values))
        settings = point.cell.algorithm.settings.model_dump()
        assert rule["set"] == {f"algorithm.{key}": settings[key] for key in ("step", "clip")}
    choices = tree_of("runs/mine-tuned/tuning.json")["choices"]
    warnings = [line for line in err.splitlines() if "at the edge of its grid" in line]
    warned = {line.split(": ")[1].split(" = ")[0] for line in warnings}
    assert warned == {key for choice in choices for key in choice["edge"]}
    assert warned, "with two values of a key one is always at the edge"
    assert "fedpriv run runs/mine-tuned/scenario.toml" in out
    assert "The choice is not private" in out


@pytest.mark.slow
def test_an_override_of_a_tuned_key_is_left_out_of_the_printed_command(fedpriv: Command) -> None:
    """The command that tune prints runs what tune chose."""
    overrides = ["--set", "algorithm.step=3.0", "--set", "privacy.mu=1.0"]
    out, _ = fedpriv("tune", "mine.toml", "--grid", "algorithm.step=[0.1,0.3]", *overrides)
    words = shlex.split(out.splitlines()[-1])
    assert words == ["fedpriv", "run", "runs/mine-tuned/scenario.toml", "--set", "privacy.mu=1.0"]
    chosen = {choice["set"]["algorithm.step"] for choice in tree_of("runs/mine-tuned/tuning.json")["choices"]}
    assert chosen <= {0.1, 0.3}
    points = load_scenario(Path(words[2]), [words[4]]).points
    assert {point.cell.algorithm.settings.step for point in points} == chosen


@pytest.mark.slow
def test_a_run_of_a_tuned_scenario_says_that_its_figures_do_not_cover_the_tuning(fedpriv: Command) -> None:
    fedpriv("tune", "mine.toml", "--trials", "2", "--grid", "algorithm.step=[0.1,1,10]", "--set", "privacy.mu=1.0")
    out, _ = fedpriv("run", "runs/mine-tuned/scenario.toml", "--set", "privacy.mu=1.0", "--out", "done")
    said = "These figures do not cover that choice: it read the records without noise."
    assert said in " ".join(out.split())
    results = read_results(Path("done"))
    assert results.tuning is not None
    assert results.tuning.settings == 2
    (statement,) = make_statements(results)
    assert any(said in line for line in statement.assumptions)
    assert not any("without a look at the data" in line for line in statement.assumptions)
    copy = shutil.copy("runs/mine-tuned/scenario.toml", "again.toml")
    assert load_scenario(Path(copy)).tuning == results.tuning


@pytest.mark.slow
def test_published_values_are_withheld_for_tuned_settings(fedpriv: Command) -> None:
    """The rules of a tuned scenario change what the paper ran."""
    axes = 'rows = "algorithm.name"\ncolumns = "privacy.mu"'
    Path("paper.toml").write_text(f"{SCENARIO}\n[paper]\n{axes}\ntest_accuracy = [[90, 91], [92, 93]]\n")
    whole = load_scenario(Path("paper.toml"))
    assert whole.published is not None
    assert whole.published.tables.published_metrics
    fedpriv("tune", "paper.toml", *GRID, "--trials", "1")
    tuned = load_scenario(Path("runs/mine-tuned/scenario.toml"))
    assert tuned.published is not None
    assert not tuned.published.tables.published_metrics
    assert tuned.published.withheld_keys == ["what `fedpriv tune` chose"]


def test_a_tuning_file_gives_scenario_grids_seeds_and_fixed_keys_of_the_trials(
    fedpriv: Command, tmp_path: Path
) -> None:
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "mine.toml").write_text(
        'scenario = "../mine.toml"\nseeds = [9]\n[fixed]\n"data.validation" = 600\n"federation.rounds" = 5\n'
        '"federation.samples" = 3000\n[grid.dp-sgd]\n"algorithm.step" = [0.1, 1.0, 10.0]\n'
    )
    fedpriv("tune", "tuning/mine.toml", "--out", "out")
    trials = read_results(tmp_path / "out" / "trials").cells
    assert {(cell["seed"], cell["rounds"], cell["records"]) for cell in trials} == {(9, 5, 3000)}
    assert {cell["scenario"]["algorithm"]["name"] for cell in trials} == {"dp-sgd"}, "the row without a grid stays"
    assert len(tomllib.loads((tmp_path / "out" / "scenario.toml").read_text())["where"]) == 2
    assert tree_of("out/tuning.json")["held_out"]["count"] == 600


def test_held_out_records_are_counted_by_silo_as_a_run_assigns_them() -> None:
    """By silo, as a run of the scenario spreads them."""
    cell = resolve_cell(small_tree(federation__rounds=1500, federation__silos=4), "test")
    held_out = hold_out(cell, 1000)
    assert held_out.total_count == len(load_task(cell).train.labels) == 6000
    (by_silo,) = held_out.silo_counts_by_run
    assert sum(by_silo) == 1000, "every record is read once"
    assert by_silo == tuple(int((order >= 5000).sum()) for order in partition_records(cell))
    assert f"{min(by_silo)} to {max(by_silo)} to each of 4" in held_out.description
    clients = small_tree(federation__rounds=750, privacy__unit="client", privacy__records=2)
    held_out = hold_out(resolve_cell(clients, "test"), 1000)
    assert held_out.total_count == 6000
    assert 700 < sum(held_out.silo_counts_by_run[0]) < 800, "three quarters of the records are read"
    with pytest.raises(InputError, match="--held-out 6000: synthetic has 6000 training records"):
        hold_out(cell, 6000)


def test_a_sweep_over_data_of_different_sizes_is_not_tuned_as_one() -> None:
    """Was: an IndexError, or counts of held-out records of another data set."""
    with pytest.raises(InputError, match="'synthetic': has other than 5000 training records"):
        HeldOut(10, 5000, ()).count_in_runs([resolve_cell(small_tree(), "")])


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "federation", [{"silos": 4, "rounds": 1500}, {"silos": 2, "rounds": 10, "samples": 6000},
                   {"silos": 2, "rounds": 10, "batches": [400, 200]}]
)  # fmt: skip
def test_trials_train_only_on_records_that_are_not_held_out(federation: dict[str, Any]) -> None:
    cell = resolve_cell({**small_tree(), "federation": federation}, "test")
    held_out = hold_out(cell, 1500)
    tried = make_trial(cell, {"algorithm.diameter": 0.2}, held_out, [], 5)
    assert (tried.data.validation, tried.seed, tried.run.evaluations) == (1500, 5, 1)
    assert len(load_task(tried).train.labels) == 4500
    read = np.concatenate([order.numpy() for order in partition_records(tried)])
    assert 4000 < len(read) <= 4500
    assert read.max() < 4500


def test_grids_of_different_size_need_an_equal_number_of_trials_for_every_row() -> None:
    grids = [{"a": [1, 2, 3]}, {"a": [1, 2], "b": [3, 4, 5, 6]}, {"a": [7, 8, 9]}]
    with pytest.raises(InputError, match="grids of 3 and 8 settings: every row gets as many, so give --trials 3"):
        choose_settings(grids, None, np.random.default_rng(1))
    with pytest.raises(InputError, match="--trials 4: the smallest grid has 3 settings"):
        choose_settings(grids, 4, np.random.default_rng(1))
    chosen = choose_settings(grids, 2, np.random.default_rng(1))
    assert [len({tuple(setting.items()) for setting in settings}) for settings in chosen] == [2, 2, 2]
    assert [setting["a"] + 6 for setting in chosen[0]] == [setting["a"] for setting in chosen[2]]


def test_the_default_tuning_grid_varies_positive_numbers_of_the_algorithm() -> None:
    algorithm = {"name": "dp-sgd", "trust": "trusted", "clip": 2.0, "step": 0.5, "momentum": 0.5}
    tree = small_tree(algorithm=algorithm, privacy={"relation": "zero-out", "mu": 1.0})
    grid = make_default_grid(resolve_cell(tree, "test"))
    assert grid["algorithm.clip"] == [0.2222, 0.6667, 2.0, 6.0, 18.0]
    assert set(grid) == {"algorithm.clip", "algorithm.step"}, "momentum lies between 0 and 1: no scale"
    assert find_positions({"algorithm.b": [True, False]}, {"algorithm.b": True})[0].number == 1, "no numbers"
    (of_two, edge) = find_positions(grid, {"algorithm.clip": 2.0, "algorithm.step": grid["algorithm.step"][-1]})
    assert ((of_two.number, of_two.count, of_two.is_edge), edge.is_edge) == ((3, 5, False), True)
    assert len(make_default_grid(resolve_cell(small_tree(), "test"))["algorithm.diameter"]) == 25


@pytest.mark.slow
def test_private_tuning_writes_no_trials_and_states_the_epsilon_of_the_selection(fedpriv: Command) -> None:
    out, err = fedpriv("tune", "mine.toml", *GRID, "--private", "--trials", "6", "--out", "out")
    assert sorted(path.name for path in Path("out").iterdir()) == ["scenario.toml", "tuning.json", "tuning.md"]
    assert not Path("runs").exists()
    written = "".join(path.read_text() for path in Path("out").iterdir()) + out + err
    assert 'next_best": null' in written
    choices = tree_of("out/tuning.json")["choices"]
    scores = [choice["score"] for choice in choices]
    assert len({f"{score:.4f}" for score in scores} | {"-"}) - 1 >= 1
    law = NegativeBinomialRunCount(6.0, 0.0)
    epsilons = [PrivateSelection(mu, law).epsilon_of(1e-5) for mu in (1.0, 4.0, 1.0, 4.0)]
    assert [choice["epsilon"] for choice in choices] == epsilons
    fedpriv("run", "out/scenario.toml", "--out", "done", "--set", "privacy.mu=4.0", "--quiet")
    (line,) = describe_tuning(read_results(Path("done")))
    alone, both = PrivateSelection(4.0, law).epsilon_of(1e-5), PrivateSelection(4.0, law, 4.0).epsilon_of(1e-5)
    found = re.search(
        r"ε = ([\d.]+) at delta = 1e-05, the choice and a run of the row together ε = ([\d.]+)\.$", line
    )
    assert found is not None
    for text, epsilon in zip(found.groups(), (alone, both), strict=True):
        assert epsilon <= float(text) <= epsilon * 1.001, "rounded up"
    assert "truncated negative binomial number of runs, 6 on average" in line


@pytest.mark.slow
def test_private_tuning_with_a_poisson_number_of_runs_may_leave_rows_untried(fedpriv: Command) -> None:
    options = ["--private", "--poisson", "--trials", "1", "--out", "out", "--seed", "3"]
    out, _ = fedpriv("tune", "mine.toml", *GRID, *options)
    choices = tree_of("out/tuning.json")["choices"]
    untried = [choice for choice in choices if choice["set"] is None]
    assert 0 < len(untried) < 4, "a Poisson number may be 0"
    assert len(tomllib.loads(Path("out/scenario.toml").read_text())["where"]) == 4 - len(untried)
    assert "the scenario's own" in out
    assert choices[0]["epsilon"] == PrivateSelection(1.0, PoissonRunCount(1.0)).epsilon_of(1e-5)


def test_noise_on_held_out_scores_is_one_over_the_record_count_times_mu() -> None:
    """Guarantee: one record moves the accuracy by 1/n; the noise is 1/(n μ)."""
    one = CellOutcome({"test_loss": 1.0, "test_accuracy": 0.5}, 0.0, 0.1, (), 1, np.zeros(2))
    generator = np.random.default_rng(3)
    for held_out, mu in ((100, 0.5), (1000, 4.0)):
        drawn = np.array([noisy_score(one, held_out, mu, generator) for _ in range(20_000)])
        assert np.std(drawn) * held_out * mu == pytest.approx(1.0, rel=0.03)
        assert abs(drawn.mean() - 0.5) < 5.0 / (held_out * mu * 141.0)
    regression = CellOutcome({"test_loss": 1.0}, 0.0, 0.1, (), 1, np.zeros(2))
    with pytest.raises(InputError, match="runs are compared by test_accuracy"):
        noisy_score(regression, 100, 1.0, generator)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([*GRID, "--set", "algorithm.clip=[1.0,2.0]"], ["algorithm.clip is swept by mine.toml"]),
        (["--grid", "algorithm.step=3"], ["--grid 'algorithm.step=3': expected KEY=[VALUE, …]"]),
        (["--grid", "algorithm.stop=[3]"], ["algorithm.stop: unknown key"]),
        ([*GRID, "--trials", "7"], ["--trials 7: the smallest grid has 6 settings"]),
        ([*GRID, "--trials", "2.5"], ["--trials 2.5: a whole number"]),
        ([*GRID, "--metric", "test_auc"], ["--metric test_auc: the runs have test_loss, test_accuracy"]),
        ([*GRID, "--eta", "1"], ["give --private with them"]),
        ([*GRID, "--private", "--poisson", "--eta", "1"], ["--poisson: a Poisson number of runs has no --eta"]),
        ([*GRID, "--private", "--seeds", "7"], ["--private: each run has a secret seed of its own"]),
        (["--grid", "algorithm.step=[0.1,1]",
          "--set", 'algorithm={name="dp-sgd",trust="untrusted",clip=1.0,step=1.0}'],
         ["--set 'algorithm={", "would hide algorithm.step, which the trials set"]),
        (["--grid", "algorithm.step=[0.1,1]", "--while-tuning", "algorithm.step=2"],
         ["--while-tuning 'algorithm.step=2': the grid tries values of this key; leave it out"]),
        (["--grid", "algorithm.step=[0.1,1]", "--while-tuning", 'algorithm={name="dp-sgd",clip=1.0,step=1.0}'],
         ["--while-tuning 'algorithm={", "would hide algorithm.step, which the trials set"]),
        ([*GRID, "--held-out", "7000"], ["--held-out 7000: synthetic has 6000 training records"]),
        ([*GRID, "--private", "--resume"], ["--private: keeps no trials to resume from"]),
        ([*GRID, "--private", "--set", "privacy.mode=none"], ["--private", "adds no noise"]),
        ([*GRID, "--private", "--set", "federation.sampling=poisson", "--set", "algorithm.name=dp-sgd",
          "--set", "privacy.epsilon=2.0", "--set", "federation.epochs=2"], ["--private", "is not mu = "]),
        ([*GRID, "--private", "--set", "privacy.shares=[[1.0, 0.5]]", "--set", "federation.silos=2",
          "--set", "algorithm.trust=untrusted"],
         ["--private", "gives each its own"]),
        ([*GRID, "--private", "--set", "privacy.unit=client", "--set", "privacy.records=2",
          "--set", "federation.samples=3000"],
         ["--private", "only one record is protected"]),
    ],
)  # fmt: skip
def test_invalid_tuning_requests_are_refused_in_one_line(
    words: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(SCENARIO)
    monkeypatch.setattr("fedpriv.addons.tune.command.Progress", lambda *, quiet: RunObserver())
    line = refusal(["tune", "mine.toml", *words])
    assert all(part in line for part in parts), line
    assert not (tmp_path / "runs" / "mine-tuned" / "scenario.toml").exists()


@pytest.mark.parametrize("key", ["model.loss", "model.class_weights", "model.label_smoothing"])
def test_tuning_by_test_loss_refuses_a_grid_over_keys_that_define_the_loss(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the smallest weights, or the mildest of three losses, had won."""
    monkeypatch.chdir(tmp_path)
    module = SCENARIO.replace("[algorithm]", '[model]\nname = "tests.loss.zoo:Wide"\n[algorithm]')
    (tmp_path / "mine.toml").write_text(module)
    values = {
        "model.loss": '["cross-entropy"]',
        "model.class_weights": "[[]]",
        "model.label_smoothing": "[0.0, 0.1]",
    }
    line = refusal(["tune", "mine.toml", "--metric", "test_loss", "--grid", f"{key}={values[key]}"])
    assert f"grid of {key}: it says how test_loss is computed" in line


def test_a_tuned_scenario_is_not_tuned_again(fedpriv: Command) -> None:
    Path("tuned.toml").write_text(SCENARIO + "\n[tuned]\nsettings = 3\nheld_out = 100\nmetric = 'test_accuracy'\n")
    with pytest.raises(AssertionError, match=r"has \[tuned\] already; tune the scenario that it was made from"):
        fedpriv("tune", "tuned.toml", *GRID)
    for keys, line in (
        ("settings = 3\nheld_out = 100\nmetric = 'a'\nlaw = 'poisson'", ": trials = 0"),
        ("settings = 0\nheld_out = 100\nmetric = 'a'", r"\.settings = 0"),
    ):
        Path("wrong.toml").write_text(f"{SCENARIO}\n[tuned]\n{keys}\n")
        with pytest.raises(InputError, match=rf"wrong\.toml: tuned{line}"):
            load_scenario(Path("wrong.toml"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("scenario = 3", "scenario: expected the path of a scenario"),
        ("scenario = 'mine.toml'\nfixed = 3", "fixed: expected a table of dotted keys and values"),
        ("scenario = 'mine.toml'\nseeds = 5", r"seeds: expected a list of whole numbers, such as \[100, 101\]"),
        ("scenario = 'mine.toml'\nmetric = 1.0", "metric: expected the name of a metric"),
        ("scenario = 'mine.toml'\naxis = 3", "axis: expected a dotted key"),
        (
            "scenario = 'mine.toml'\nfixed = {'algorithm.step' = 2026-11-30}",
            r"fixed: algorithm\.step = datetime\.date\(2026, 11, 30\): expected a finite number, a text",
        ),
    ],
)
def test_a_tuning_file_with_a_value_of_another_type_is_refused(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "tuning.toml").write_text(f"{line}\n[grid.dp-sgd]\n'algorithm.step' = [1.0, 2.0]\n")
    with pytest.raises(InputError, match=rf"tuning\.toml: {said}"):
        complete_request(TuneRequest(tmp_path / "tuning.toml"))


@pytest.mark.parametrize("count", [0, -1, 6000, "100"])
def test_a_held_out_count_of_none_all_or_no_number_is_refused(count: Any) -> None:
    """A tuning file may give any value."""
    with pytest.raises(InputError, match=rf"--held-out {count}: synthetic has 6000 training records; hold out 1"):
        hold_out(resolve_cell(small_tree(), "test"), count)


def test_a_grid_of_a_tuning_file_can_be_named_by_a_numeric_swept_value(tmp_path: Path) -> None:
    """Keys of a file are texts, and no point had the grid of its number."""
    (tmp_path / "mine.toml").write_text(SCENARIO)
    grids = {"1.0": {"algorithm.step": [1.0, 2.0]}, "4.0": {"algorithm.step": [3.0, 4.0]}}
    rows = pair_grids(load_scenario(tmp_path / "mine.toml"), grids, "privacy.mu")
    assert [(when["privacy.mu"], grid) for when, _, grid in rows] == [
        (mu, grids[str(mu)]) for mu in (1.0, 4.0)
    ] * 2


@pytest.mark.parametrize("rest", ["algorithm.clip=[2]", "[privacy]", "value.x = 1"])
def test_a_grid_that_goes_on_behind_a_line_break_is_refused(rest: str) -> None:
    """Before: further lines were parsed as keys of their own, and dropped in silence."""
    assert parse_grid(["algorithm.step=[1,\n2]"]) == {"algorithm.step": [1, 2]}
    with pytest.raises(InputError, match=r"--grid 'algorithm\.step=\[1\]\\n.*expected KEY=\[VALUE"):
        parse_grid([f"algorithm.step=[1]\n{rest}"])


@pytest.mark.parametrize("axis", ["algorithm.name", "privacy.mu", "label.method"])
def test_a_grid_of_no_point_is_refused_unless_an_override_leaves_points_out(
    tmp_path: Path, fedpriv: Command, axis: str
) -> None:
    """Before: a grid whose name no point has, as with a typing error in it, was dropped in silence."""
    rule = '[[where]]\nwhen = { "privacy.mu" = %s }\nset = { "label.method" = "%s" }\n'
    scenario = SCENARIO + rule % ("1.0", "a") + rule % ("4.0", "b")
    (tmp_path / "mine.toml").write_text(scenario)
    names = {"algorithm.name": ["dp-sgd", "dp-ftrl"], "privacy.mu": ["1.0", "4.0"], "label.method": ["a", "b"]}

    def write(*values: str) -> None:
        grid = "".join(f"[grid.'{value}']\n'algorithm.step' = [1.0, 2.0]\n" for value in values)
        (tmp_path / "tuning.toml").write_text(f"scenario = 'mine.toml'\naxis = '{axis}'\n{grid}")

    write(*names[axis], "dp-sdg")
    line = refusal(["tune", "tuning.toml"])
    assert re.search(rf"mine\.toml: no point has the grid for {re.escape(axis)} = dp-sdg; correct this", line)
    if axis == "privacy.mu":
        write("1", "1.0", "4.0")
        assert "no point has the grid for privacy.mu = 1.0;" in refusal(["tune", "tuning.toml"])
    write(*names[axis])
    key = axis if axis != "label.method" else "privacy.mu"
    fedpriv("tune", "tuning.toml", "--set", f"{key}={names[key][0]}", "--seeds", "100")


def test_a_metric_that_is_not_finite_is_reported_as_such_and_not_as_missing() -> None:
    with pytest.raises(
        InputError, match="--metric test_loss: a run has no finite value of it, but test_accuracy; "
    ):
        _read_score({"test_loss": float("nan"), "test_accuracy": 0.1, "seed": 1}, "test_loss")


BY_THEOREM = {
    "momentum-as-printed": {
        "aligned, exact",
        *(f"Algorithm {n}, {how}" for n in "12" for how in ("as printed", "exact")),
    }
}
"""Rows whose numbers a theorem gives, so that nothing is tuned."""
TUNINGS = sorted((Path(__file__).resolve().parents[2] / "scenarios" / "tuning").glob("*.toml"))


def test_a_grid_is_found_by_a_number_in_another_form(tmp_path: Path) -> None:
    """Before: the point of 1.0 was left out in silence, since its grid was named "1"."""
    tree = small_tree()
    tree |= {"privacy": {"relation": "replace-one"}, "sweep": {"privacy.epsilon": [1.0, 4.0]}}
    grids = {"1": {"algorithm.step": [0.1]}, "4.0": {"algorithm.step": [0.2]}}
    pairs = pair_grids(parse_scenario(tree, "scenario"), grids, "privacy.epsilon")
    assert [grid for _, _, grid in pairs] == list(grids.values())


@pytest.mark.parametrize("path", TUNINGS, ids=lambda path: path.stem)
def test_every_shipped_tuning_file_gives_all_rows_equally_many_settings_and_fresh_seeds(path: Path) -> None:
    """Every value of the axis has a grid, no grid is for a row that is not there, and seeds are fresh."""
    request, grids = complete_request(TuneRequest(path))
    scenario = load_scenario(request.scenario)
    assert grids.by_value is not None
    assert not set(request.seeds or []) & set(scenario.seeds)
    rows = pair_grids(scenario, grids.by_value, grids.axis)
    printed = BY_THEOREM.get(path.stem, set())
    points = [point for point in scenario.points if point.swept_values.get(grids.axis) not in printed]
    assert len(rows) == len(points) / len(scenario.seeds)
    assert {len(list_settings(grid)) for _, _, grid in rows} == {len(list_settings(rows[0][2]))}
    values = scenario.axes.get(grids.axis)
    assert values is None or set(values) == set(grids.by_value) | printed
    of_theorems = [point.cell.algorithm.settings for point in scenario.points if point not in points]
    assert all(getattr(own, "step") == "paper" for own in of_theorems)  # noqa: B009 - momentum's alone


ERRORS = (
    "test_loss",
    "test_mae",
    "test_integrated_brier",
    "test_calibration_error",
    "excess_risk",
    "gradient_norm",
    "goldstein",
)
SCORES = ("test_accuracy", "test_auc", "test_concordance")


@pytest.mark.parametrize("metric", [*ERRORS, *SCORES])
def test_a_smaller_error_is_better(metric: str) -> None:
    """The worst setting was chosen by mean absolute error, the Brier score, excess risk and gradient norm."""
    assert is_better(metric, 0.1, 0.2) == (metric in ERRORS)
    assert is_better(metric, 0.2, 0.1) == (metric in SCORES)


def test_survival_is_tuned_by_its_loss_by_default() -> None:
    """Before: by test_accuracy, which no run of survival has."""
    assert default_metric(load_scenario(Path("dialysis-survival"), [])) == "test_loss"


def test_the_cost_of_private_tuning_is_stated_at_the_smallest_delta_of_all_cells() -> None:
    """Guarantee: no ε that holds at one δ stands beside another."""
    rows = (TunedChoice(when={}, mu=1.0),)
    tuned = Tuning(settings=8, held_out=100, metric="test_accuracy", law="poisson", mean=20.0, rows=rows)
    cells = [{"epsilon": 1.0, "delta": delta, "mu": 1.0, "scenario": {}} for delta in (1e-7, 1e-3, 1e-5)]
    results = Results("name", "title", "vectorized", True, {}, [0], None, cells, {}, None, None, tuned)
    (line,) = describe_tuning(results)
    (epsilon,) = re.findall(r"costs ε = ([\d.]+) at delta = 1e-07", line)
    dearest = PrivateSelection(1.0, PoissonRunCount(20.0)).epsilon_of(1e-7)
    assert dearest <= float(epsilon) < dearest * 1.001


def test_the_printed_command_of_a_tuning_repeats_its_import_option(fedpriv: Command, tmp_path: Path) -> None:
    (tmp_path / "my own.py").write_text(
        "import numpy as np\n\nimport fedpriv\n\nimages = np.zeros((7000, 28, 28), np.uint8)\n"
        "labels = np.arange(7000) % 10\n"
        "fedpriv.add_data('mine', lambda: ((images, labels), (images[:100], labels[:100])))\n"
    )
    (tmp_path / "own.toml").write_text(SCENARIO.replace('name = "synthetic"', 'name = "mine"'))
    settings = ["--grid", "algorithm.step=[0.1]", "--set", "sweep.seeds=1", "--set", 'algorithm.name="dp-sgd"']
    out, _ = fedpriv("tune", "own.toml", *settings, "--set", "privacy.mu=1.0", "--import", "my own.py")
    words = shlex.split(out.splitlines()[-1])
    assert words[-2:] == ["--import", "my own.py"]
    fedpriv(*words[1:], "--set", "federation.rounds=5", "--out", "again")
