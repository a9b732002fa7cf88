"""`fedpriv privacy theorem` through the real command."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedpriv.cli.app import app
from fedpriv.federation import task_of_cell
from fedpriv.parameters.accelerated import Problem, non_realizable, realizable
from fedpriv.parameters.noisy_minibatch import by_moments
from fedpriv.plan import plan_of
from fedpriv.scenario import load_scenario

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
    objective = task_of_cell(cell).objective
    plan = plan_of(cell, objective)
    used = point["scenario"]
    assert (used["rounds"], used["batch"], used["clip"], used["beta"]) == (10, 600, 4.0, 20.0)
    assert used["noise std"] == plan.noise.std_in_mean
    problem = Problem(
        6000,
        objective.dimension,
        point["problem"]["epsilon"],
        1e-5,
        objective.lipschitz,
        objective.smoothness,
        3.0,
    )
    for theorem, formula in zip(point["theorems"], (realizable(problem), non_realizable(problem)), strict=True):
        assert theorem["numbers"]["beta"] == formula.beta
        assert theorem["numbers"]["noise std"] == formula.sigma
        assert [condition["holds"] for condition in theorem["conditions"]] == [
            condition.holds for condition in formula.conditions
        ]
    assert "asks for" in point["theorems"][0]["refusal"]
    assert point["theorems"][1]["refusal"] is None


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
    moments = by_moments(3000, 10, point["problem"]["epsilon"], 1e-5, 4.0)
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
