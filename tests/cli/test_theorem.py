"""`fedpriv privacy theorem` through the real command."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedpriv
from fedpriv.accounting.gaussian import mu_of
from fedpriv.cli.app import app
from fedpriv.papers.choquette_choo import non_realizable_parameters, realizable_parameters
from fedpriv.papers.kornowski_bounds import NonsmoothProblem, explicit_bound, plan_multi_pass, plan_single_pass
from fedpriv.papers.noisy_minibatch import parameters_by_moments
from fedpriv.papers.tran_cutkosky import tree_gradient_bound
from fedpriv.plan.plan import make_plan, make_problem
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import load_scenario
from tests.cli.command import fedpriv as command
from tests.cli.command import refusal

SCENARIO = """
name = "small"
[data]
name = "synthetic"
[algorithm]
name = "accelerated-dp-srgd"
trust = "trusted"
clip = 4.0
beta = 20.0
radius = 3.0
[privacy]
mu = 2.0
relation = "zero-out"
[federation]
silos = 2
rounds = 10
samples = 6000
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(SCENARIO)
    return file


def asked(file: Path, *options: str) -> Any:
    result = CliRunner().invoke(app, ["privacy", "theorem", str(file), "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)["points"]


def test_both_theorems_stand_beside_the_numbers_of_the_run(scenario: Path) -> None:
    (point,) = asked(scenario)
    cell = load_scenario(scenario).points[0].cell
    objective = load_task(cell).objective
    plan = make_plan(cell, objective)
    used = point["scenario"]
    assert (used["rounds"], used["batch"], used["clip"], used["beta"]) == (10, 600, 4.0, 20.0)
    assert used["noise std"] == plan.noise.std_in_mean
    problem = make_problem(cell, objective)
    assert (problem.records, problem.epsilon) == (6000, point["problem"]["epsilon"])
    formulas = realizable_parameters(problem, 3.0), non_realizable_parameters(problem, 3.0)
    corollaries = "Corollary 9", "Corollary 13"
    for theorem, formula, corollary in zip(point["theorems"], formulas, corollaries, strict=True):
        assert theorem["numbers"]["beta"] == formula.beta
        assert theorem["numbers"]["noise std"] == formula.sigma
        assert theorem["numbers"][f"noise std of {corollary}"] == formula.printed_sigma
        assert theorem["numbers"][f"epsilon of {corollary}"] == formula.printed_epsilon
        assert [condition["holds"] for condition in theorem["conditions"]] == [
            condition.holds for condition in formula.conditions
        ]
    assert "asks for" in point["theorems"][0]["refusal"]
    assert point["theorems"][1]["refusal"] is None


def test_each_silo_has_its_own_line_if_it_has_its_own_target(scenario: Path) -> None:
    (point,) = asked(scenario, "--set", "algorithm.trust=untrusted", "--set", "privacy.shares=[[1.0, 0.25]]")
    assert [(silo["silo"], silo["mu"]) for silo in point["silos"]] == [(0, 2.0), (1, 0.5)]
    assert point["silos"][1]["noise std"] == pytest.approx(4.0 * point["silos"][0]["noise std"])
    assert asked(scenario)[0]["silos"] == []


def test_options_of_other_mechanisms_are_no_numbers_of_a_run(scenario: Path) -> None:
    assert not {"bands", "max_vectors"} & asked(scenario)[0]["scenario"].keys()
    banded = asked(scenario, "--set", "algorithm.mechanism=banded", "--set", "algorithm.bands=4")
    assert banded[0]["scenario"]["bands"] == 4.0


def test_text_rounds_to_the_safe_side(scenario: Path) -> None:
    """Guarantee: ε and noise that is asked for are printed no smaller than they are, noise of a run no larger."""
    (point,) = asked(scenario)
    printed = CliRunner().invoke(app, ["privacy", "theorem", str(scenario)]).output
    rows = {line.split("  ")[0]: line.split()[-4:] for line in printed.splitlines() if line}
    (*_, epsilon), noise = rows["epsilon"], rows["noise std"]
    assert point["problem"]["epsilon"] <= float(epsilon) <= point["problem"]["epsilon"] * (1 + 1e-5)
    own, *theirs = (float(figure) for figure in noise if figure != "-")
    exact = point["scenario"]["noise std"]
    assert exact * (1 - 1e-5) <= own <= exact
    for figure, theorem in zip(theirs, point["theorems"], strict=True):
        exact = theorem["numbers"]["noise std"]
        assert exact <= figure <= exact * (1 + 1e-5)


def test_text_names_what_does_not_hold(scenario: Path) -> None:
    result = CliRunner().invoke(app, ["privacy", "theorem", str(scenario)])
    assert result.exit_code == 0
    assert "DOES NOT HOLD" in result.output
    assert "theorem-realizable: the realizable theorem asks for" in result.output
    assert "theorem-non-realizable: can be run with these numbers" in result.output


def test_a_scenario_that_cannot_be_run_still_sees_its_theorem(scenario: Path, tmp_path: Path) -> None:
    file = tmp_path / "theorem.toml"
    text = SCENARIO.replace("clip = 4.0\nbeta = 20.0", 'parameters = "theorem-realizable"')
    file.write_text(text)
    (point,) = asked(file)
    assert "asks for" in point["scenario"]["refusal"]
    assert point["theorems"][1]["numbers"]["rounds"] == pytest.approx(6000**0.5)


def test_authors_numbers_of_the_noisy_minibatch_method(scenario: Path, tmp_path: Path) -> None:
    file = tmp_path / "minibatch.toml"
    text = (
        scenario.read_text().replace("accelerated-dp-srgd", "noisy-minibatch").replace("beta = 20.0", "step = 0.1")
    )
    file.write_text(text.replace('"trusted"', '"untrusted"'))
    (point,) = asked(file)
    moments = parameters_by_moments(3000, 10, point["problem"]["epsilon"], 1e-5, 4.0)
    assert point["theorems"][0]["numbers"]["noise std"] == pytest.approx(moments.sigma / 2**0.5)
    assert point["theorems"][0]["numbers"]["batch"] == 2 * moments.batch


def test_an_algorithm_without_such_theorems_is_refused_on_one_line(scenario: Path, tmp_path: Path) -> None:
    file = tmp_path / "sgd.toml"
    file.write_text(
        scenario.read_text().replace("accelerated-dp-srgd", "dp-sgd").replace("beta = 20.0", "step = 0.1")
    )
    result = CliRunner().invoke(app, ["privacy", "theorem", str(file)])
    assert result.exit_code != 0
    assert "no theorem with explicit numbers is known for dp-sgd" in str(result.exception or result.output)


@pytest.mark.parametrize("theorem", [0, 1])
def test_replace_one_takes_twice_the_noise(scenario: Path, theorem: int) -> None:
    """The noise of zero-out was shown under either relation: half of what replace-one needs."""
    (one,), (other,) = (asked(scenario, "--set", f"privacy.relation={r}") for r in ("zero-out", "replace-one"))
    stds = [point["theorems"][theorem]["numbers"]["noise std"] for point in (one, other)]
    assert stds[1] == pytest.approx(2.0 * stds[0], rel=1e-12)


def test_the_theorems_of_dp_mu2_fl_stand_beside_its_run(scenario: Path, tmp_path: Path) -> None:
    """5.2 and 6.2 are explicit: the run with the paper's parameters has exactly their noise, clip and step."""
    file = tmp_path / "mu2.toml"
    text = SCENARIO.replace("clip = 4.0\nbeta = 20.0\nradius = 3.0", "diameter = 0.1")
    text = text.replace("accelerated-dp-srgd", "dp-mu2-fl").replace("samples = 6000\n", "")
    for relation in ("zero-out", "replace-one"):
        for trust, place in (("untrusted", 0), ("trusted", 1)):
            file.write_text(text.replace('"zero-out"', f'"{relation}"').replace('"trusted"', f'"{trust}"'))
            (point,) = asked(file)
            found, used = point["theorems"][place], point["scenario"]
            assert found["theorem"].startswith(f"Theorem {('5.2', '6.2')[place]} ({trust}")
            assert found["refusal"] is None
            for name in ("rounds", "batch", "clip", "noise std", "step", "radius"):
                assert found["numbers"][name] == pytest.approx(used[name], rel=1e-8), name


def test_the_unaccelerated_row_has_no_theorem_of_the_accelerated_one(scenario: Path, tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text(scenario.read_text().replace("accelerated-dp-srgd", "unaccelerated-dp-srgd"))
    result = CliRunner().invoke(app, ["privacy", "theorem", str(file)])
    assert "no theorem with explicit numbers is known for unaccelerated-dp-srgd" in str(result.exception)
    text = file.read_text().replace("clip = 4.0\nbeta = 20.0", 'parameters = "theorem-non-realizable"')
    file.write_text(text)
    result = CliRunner().invoke(app, ["privacy", "theorem", str(file)])
    assert "algorithm.parameters" in str(result.exception)


def test_rounds_that_no_scenario_can_have_are_not_called_runnable(scenario: Path, tmp_path: Path) -> None:
    """77 records a round cannot be shared by 100 silos; a T that is no number of epochs can be had."""
    (point,) = asked(scenario, "--set", "federation.silos=100")
    assert "less than one of each of the 100 silos" in point["theorems"][1]["refusal"]
    file = tmp_path / "momentum.toml"
    text = SCENARIO.replace("clip = 4.0\nbeta = 20.0\nradius = 3.0", "clip = 4.0")
    text = text.replace("accelerated-dp-srgd", "momentum-tree").replace("silos = 2", "silos = 1")
    file.write_text(text)
    (point,) = asked(file)
    (found,) = point["theorems"]
    assert found["numbers"]["rounds"] % 6000
    assert found["refusal"] is None


def _with_algorithm(tmp_path: Path, algorithm: str, **sections: str) -> Path:
    """The scenario with another [algorithm], and sections added or replaced by their text."""
    text = SCENARIO
    parts = {"algorithm": algorithm, **sections}
    for name, lines in parts.items():
        head = f"[{name}]\n"
        before, _, after = text.partition(head)
        rest = after[after.index("[") :] if "[" in after else ""
        text = f"{before}{head}{lines}\n{rest}"
    file = tmp_path / "other.toml"
    file.write_text(text)
    return file


def test_goldsteins_theorems_have_their_plans_and_bounds(tmp_path: Path) -> None:
    keys = """name = "goldstein-single-pass"
trust = "trusted"
smoothing = 0.1
radius = 0.01
period = 5
anchor_clip = 1.0
clip = 0.5
window = 2"""
    file = _with_algorithm(tmp_path, keys)
    (point,) = asked(file)
    assert "--gap" in point["theorems"][0]["refusal"]
    (point,) = asked(file, "--gap", "2.3")
    numbers, told = point["theorems"][0]["numbers"], point["problem"]
    known = NonsmoothProblem(told["dimension"], told["lipschitz"], 2.3, 0.1, "first", 8, True)
    plan = plan_single_pass(known, told["records"], 2.0 * 2.0)
    assert numbers["bound"] == pytest.approx(plan.bound)
    assert numbers["noise std"] == pytest.approx(plan.difference_std)
    text = CliRunner().invoke(app, ["privacy", "theorem", str(file), "--gap", "2.3"]).output
    assert "Theorem 6.1" in text
    assert "bound" in text


def test_the_multi_pass_theorem_is_asked_for_its_best_target(tmp_path: Path) -> None:
    keys = """name = "goldstein-erm"
trust = "trusted"
smoothing = 0.1
radius = 0.01
period = 5
anchor_clip = 1.0
clip = 0.5
window = 2"""
    file = _with_algorithm(tmp_path, keys, federation="silos = 2\nrounds = 10\nepochs = 10\nbatch = 100\n")
    (point,) = asked(file, "--gap", "2.3")
    told = point["problem"]
    known = NonsmoothProblem(told["dimension"], told["lipschitz"], 2.3, 0.1, "first", 8, True)
    for target in (0.01, 0.1, 0.5, 1.0, 2.0):
        other = plan_multi_pass(known, told["records"], target * told["lipschitz"], 4.0)
        assert point["theorems"][0]["numbers"]["bound"] <= other.bound * (1.0 + 1e-3)


@pytest.mark.parametrize("order", ["fixed", "fresh"])
def test_theorem_6_has_its_bound_where_the_gap_is_known(tmp_path: Path, order: str) -> None:
    """The bound's order is drawn anew in every epoch: said where a run keeps one, and true where it does not."""
    file = _with_algorithm(tmp_path, f'name = "momentum-tree"\ntrust = "trusted"\norder = "{order}"')
    (without,), (point,) = asked(file), asked(file, "--gap", "2.3")
    assert ('order = "fresh" draws it anew' in point["theorems"][0]["assumption"]) == (order == "fixed")
    printed = CliRunner().invoke(app, ["privacy", "theorem", str(file), "--gap", "2.3"]).output
    assert ("drawn anew in every epoch" in printed) == (order == "fixed")
    told = point["problem"]
    expected = tree_gradient_bound(
        2.3, told["lipschitz"], told["smoothness"], told["records"], told["dimension"], told["epsilon"], 1e-5
    )
    assert point["theorems"][0]["numbers"]["bound"] == pytest.approx(expected)
    assert "bound" not in without["theorems"][0]["numbers"]
    result = CliRunner().invoke(app, ["privacy", "theorem", str(file), "--gap", "0"])
    assert "gap = 0" in str(result.exception or result.output)


def test_what_was_measured_stands_beside_the_theorems(tmp_path: Path) -> None:
    """The excess risk is exact where the population is known."""
    file = _with_algorithm(
        tmp_path,
        'name = "dp-mu2-fl"\ntrust = "trusted"\ndiameter = 2.0',
        data='name = "linear-regression"',
        federation="silos = 2\nrounds = 10\n",
    )
    file.write_text(file.read_text() + '[model]\nname = "least-squares"\n[sweep]\nseeds = 2\n')
    folder = tmp_path / "run"
    results = fedpriv.run(file, out=folder)
    (point,) = asked(file, "--run", str(folder))
    measured = sum(cell.metrics["excess_risk"] for cell in results.cells) / 2
    assert point["scenario"]["excess risk"] == pytest.approx(measured)
    (without,) = asked(file)
    assert "excess risk" not in without["scenario"]


def test_table_1_of_the_goldstein_paper_is_numbers() -> None:
    """As printed by hand; and the explicit bounds hold at the records that they name, and not at half of them."""
    words = ["privacy", "samples", "--target", "0.3", "--radius", "0.5", "--epsilon", "1", "--dimension", "8"]
    (point,) = json.loads(command(*words, "--json", cwd=Path()).stdout)["points"]
    records, (a, b, d) = point["records"], (0.25, 0.3, 8.0)
    assert records["Theorem 3.1, single pass"] == pytest.approx(math.sqrt(d) / (a * b**3) + d / (a * b**2))
    assert records["Zhang, Tran & Cutkosky 2024"] == pytest.approx(d / (a * b**3) + d**1.5 / (a * b**2))
    assert records["Theorem 4.1, multi pass"] == pytest.approx(d**0.75 / (math.sqrt(a) * b**1.5))
    fewest, mu = int(records["explicit bound, single pass"]), mu_of(1.0, 1e-5)
    problem = NonsmoothProblem(8, 1.0, 1.0, a)
    assert plan_single_pass(problem, fewest, mu).bound <= b < plan_single_pass(problem, fewest // 2, mu).bound
    assert explicit_bound(problem, 0.01, 9, 0, 1.0, 1.0) == math.inf  # no window is complete
    refused = (("--target=nan", "target = nan"), ("--dimension=0", "1 to 10^12"), ("--epsilon=0", "epsilon"))
    for option, said in refused:
        assert said in refusal([*words, option])
    assert "more than 10^18" in command(*words, "--target", "1e-6", cwd=Path()).stdout
