"""`fedpriv privacy theorem` through the real command."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

import fedpriv
from fedpriv.accounting.gaussian import mu_of
from fedpriv.core.errors import InputError
from fedpriv.papers.choquette_choo import non_realizable_parameters, realizable_parameters
from fedpriv.papers.kornowski_bounds import NonsmoothProblem, explicit_bound, plan_multi_pass, plan_single_pass
from fedpriv.papers.noisy_minibatch import parameters_by_moments
from fedpriv.papers.tran_cutkosky import tree_gradient_bound
from fedpriv.plan.plan import make_plan, make_problem
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import load_scenario
from tests.cli.command import answer_of, output_of, refusal

theorem = pytest.importorskip("fedpriv.addons.rates.theorem")  # the command is of an add-on

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


SLOW = "accelerated-dp-srgd", "unaccelerated-dp-srgd"
STEP = "beta = 20.0", "step = 0.1"
GOLDSTEIN = """trust = "trusted"
smoothing = 0.1
radius = 0.01
period = 5
anchor_clip = 1.0
clip = 0.5
window = 2"""


def test_the_mu_of_a_silo_is_rounded_up() -> None:
    assert theorem._format_number("mu", 1.2345641) == "1.23457"


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    return write(tmp_path)


def write(folder: Path, *changes: tuple[str, str]) -> Path:
    """The scenario in a file, after these changes of its text."""
    text = SCENARIO
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "small.toml"
    file.write_text(text)
    return file


def text_of(file: Path, *options: str) -> str:
    return output_of("privacy", "theorem", file, *options)


def points_of(file: Path, *options: str) -> Any:
    return answer_of("privacy", "theorem", file, *options)["points"]


def test_both_theorems_are_printed_beside_the_parameters_of_the_run(scenario: Path) -> None:
    (point,) = points_of(scenario)
    cell = load_scenario(scenario).points[0].cell
    objective = load_task(cell).objective
    plan = make_plan(cell, objective)
    used = {key: point["scenario"][key] for key in ("rounds", "batch", "clip", "beta", "noise std")}
    assert list(used.values()) == [10, 600, 4.0, 20.0, plan.noise.std_in_mean]
    problem = make_problem(cell, objective)
    assert (problem.records, problem.epsilon) == (6000, point["problem"]["epsilon"])
    formulas = realizable_parameters(problem, 3.0), non_realizable_parameters(problem, 3.0)
    corollaries = "Corollary 9", "Corollary 13"
    for theorem, formula, corollary in zip(point["theorems"], formulas, corollaries, strict=True):
        expected = {
            "beta": formula.beta, "noise std": formula.sigma, f"noise std of {corollary}": formula.printed_sigma,
            f"epsilon of {corollary}": formula.printed_epsilon,
        }  # fmt: skip
        assert expected.items() <= theorem["numbers"].items()
        holds = [condition["holds"] for condition in theorem["conditions"]]
        assert holds == [condition.holds for condition in formula.conditions]
    assert "asks for" in point["theorems"][0]["refusal"]
    assert point["theorems"][1]["refusal"] is None


def test_silos_with_their_own_privacy_targets_have_their_own_lines(scenario: Path) -> None:
    (point,) = points_of(scenario, "--set", "algorithm.trust=untrusted", "--set", "privacy.shares=[[1.0, 0.25]]")
    assert [(silo["silo"], silo["mu"]) for silo in point["silos"]] == [(0, 2.0), (1, 0.5)]
    assert point["silos"][1]["noise std"] == pytest.approx(4.0 * point["silos"][0]["noise std"])
    assert points_of(scenario)[0]["silos"] == []


def test_theorem_numbers_for_the_whole_target_are_not_called_runnable_beside_smaller_shares(
    scenario: Path,
) -> None:
    """Before: noise of a theorem, too little for a silo with a fourth of the target, could be run."""
    less = "these numbers are for the whole target at every silo, and privacy.shares gives some less"
    for shares, reason in (("[[1.0, 0.25]]", less), ("[[1.0, 1.0]]", None)):
        changes = ("--set", "algorithm.trust=untrusted", "--set", f"privacy.shares={shares}")
        (point,) = points_of(scenario, *changes)
        refusals = {section["theorem"]: section["refusal"] for section in point["theorems"]}
        assert refusals["theorem-non-realizable"] == reason


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_theorem_numbers_are_not_called_runnable_for_persons_in_several_silos(tmp_path: Path, trust: str) -> None:
    """Before: noise without the factor √2 or 2 for persons in two silos could be run, at the same ε."""
    rows = "".join(f"{number % 40},{number % 2},p{number // 2}\n" for number in range(80))
    (tmp_path / "t.csv").write_text(f"x,y,p\n{rows}")
    columns = (
        'table = {public = true, target = "y", classes = ["0", "1"], person = "p", columns.x.range = [0, 40]}'
    )
    scenario = tmp_path / "persons.toml"
    scenario.write_text(
        f'name = "persons"\n[data]\nname = "{tmp_path}/t.csv"\n{columns}\n[model]\nname = "softmax-regression"\n'
        "feature_norm = 1.0\n[federation]\nsilos = 2\nrounds = 16\nbatches = [1, 1]\n[algorithm]\n"
        f'name = "dp-mu2-fl"\ntrust = "{trust}"\ndiameter = 0.1\n[privacy]\nmu = 1.0\nrelation = "replace-one"\n'
        'unit = "user"\nrecords = 2\n'
    )
    one, two = (points_of(scenario, "--set", f"privacy.shared={shared}")[0] for shared in (1, 2))
    assert [section["refusal"] for section in one["theorems"]] == [None, None]
    reason = "these numbers are for persons with records in one silo, and privacy.shared = 2"
    assert [section["refusal"] for section in two["theorems"]] == [reason, reason]


def test_the_theorem_command_lists_only_options_of_the_mechanism_in_use(scenario: Path) -> None:
    assert not {"bands", "max_vectors"} & points_of(scenario)[0]["scenario"].keys()
    banded = points_of(scenario, "--set", "algorithm.mechanism=banded", "--set", "algorithm.bands=4")
    assert banded[0]["scenario"]["bands"] == 4.0


def test_theorem_figures_are_printed_with_conservative_rounding(scenario: Path) -> None:
    """Guarantee: ε and noise that is asked for are printed no smaller than they are, noise of a run no larger."""
    (point,) = points_of(scenario)
    rows = {line.split("  ")[0]: line.split()[-4:] for line in text_of(scenario).splitlines() if line}
    (*_, epsilon), noise = rows["epsilon"], rows["noise std"]
    assert point["problem"]["epsilon"] <= float(epsilon) <= point["problem"]["epsilon"] * (1 + 1e-5)
    own, *theirs = (float(figure) for figure in noise if figure != "-")
    exact = point["scenario"]["noise std"]
    assert exact * (1 - 1e-5) <= own <= exact
    for figure, theorem in zip(theirs, point["theorems"], strict=True):
        exact = theorem["numbers"]["noise std"]
        assert exact <= figure <= exact * (1 + 1e-5)


def test_the_theorem_command_names_conditions_that_do_not_hold(scenario: Path) -> None:
    text = text_of(scenario)
    assert "DOES NOT HOLD" in text
    assert "theorem-realizable: the realizable theorem asks for" in text
    assert "theorem-non-realizable: can be run with these numbers" in text


def test_a_scenario_that_cannot_run_still_gets_the_numbers_of_its_theorems(tmp_path: Path) -> None:
    (point,) = points_of(write(tmp_path, ("clip = 4.0\nbeta = 20.0", 'parameters = "theorem-realizable"')))
    assert "asks for" in point["scenario"]["refusal"]
    assert point["theorems"][1]["numbers"]["rounds"] == pytest.approx(6000**0.5)


def test_the_theorem_command_prints_the_authors_noisy_minibatch_parameters(tmp_path: Path) -> None:
    changes = ("accelerated-dp-srgd", "noisy-minibatch"), STEP, ('"trusted"', '"untrusted"')
    (point,) = points_of(write(tmp_path, *changes))
    moments = parameters_by_moments(3000, 10, point["problem"]["epsilon"], 1e-5, 4.0)
    assert point["theorems"][0]["numbers"]["noise std"] == pytest.approx(moments.sigma / 2**0.5)
    assert point["theorems"][0]["numbers"]["batch"] == 2 * moments.batch


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        (
            [("accelerated-dp-srgd", "dp-sgd"), STEP], [],
            "no theorem with explicit numbers is known for dp-sgd",
        ),
        ([SLOW], [], "no theorem with explicit numbers is known for unaccelerated-dp-srgd"),
        (
            [SLOW, ("clip = 4.0\nbeta = 20.0", 'parameters = "theorem-non-realizable"')], [],
            "algorithm.parameters",
        ),
        (
            [("accelerated-dp-srgd", "momentum-tree"), ("clip = 4.0\nbeta = 20.0\nradius = 3.0", "")],
            ["--gap", "0"], "gap = 0",
        ),
    ],
    ids=["DP-SGD", "the unaccelerated row", "with parameters of the accelerated one", "a gap of 0"],
)  # fmt: skip
def test_algorithms_without_a_theorem_and_a_gap_of_zero_are_refused_in_one_line(
    tmp_path: Path, changes: list[tuple[str, str]], options: list[str], reason: str
) -> None:
    with pytest.raises(InputError, match=re.escape(reason)) as raised:
        text_of(write(tmp_path, *changes), *options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("theorem", [0, 1])
def test_replace_one_takes_twice_the_noise(scenario: Path, theorem: int) -> None:
    """The noise of zero-out was shown under either relation: half of what replace-one needs."""
    (one,), (other,) = (points_of(scenario, "--set", f"privacy.relation={r}") for r in ("zero-out", "replace-one"))
    stds = [point["theorems"][theorem]["numbers"]["noise std"] for point in (one, other)]
    assert stds[1] == pytest.approx(2.0 * stds[0], rel=1e-12)


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize(("trust", "index", "name"), [("untrusted", 0, "5.2"), ("trusted", 1, "6.2")])
def test_a_dp_mu2_fl_run_with_the_papers_parameters_matches_its_theorem(
    tmp_path: Path, relation: str, trust: str, index: int, name: str
) -> None:
    """5.2 and 6.2 are explicit: the run with the paper's parameters has exactly their noise, clip and step."""
    row = ("accelerated-dp-srgd", "dp-mu2-fl"), ("clip = 4.0\nbeta = 20.0\nradius = 3.0", "diameter = 0.1")
    words = ("samples = 6000\n", ""), ('"zero-out"', f'"{relation}"'), ('"trusted"', f'"{trust}"')
    (point,) = points_of(write(tmp_path, *row, *words))
    theorem = point["theorems"][index]
    assert theorem["theorem"].startswith(f"Theorem {name} ({trust}")
    assert theorem["refusal"] is None
    numbers, used = (
        {key: numbers[key] for key in ("rounds", "batch", "clip", "noise std", "step", "radius")}
        for numbers in (theorem["numbers"], point["scenario"])
    )
    assert numbers == pytest.approx(used, rel=1e-8)


def test_theorem_numbers_are_called_runnable_only_if_the_silos_can_share_the_batch(
    scenario: Path, tmp_path: Path
) -> None:
    """77 records a round cannot be shared by 100 silos; a T that is no number of epochs can be had."""
    (point,) = points_of(scenario, "--set", "federation.silos=100")
    assert "less than one of each of the 100 silos" in point["theorems"][1]["refusal"]
    momentum = ("\nbeta = 20.0\nradius = 3.0", ""), ("accelerated-dp-srgd", "momentum-tree")
    (point,) = points_of(write(tmp_path, *momentum, ("silos = 2", "silos = 1")))
    (theorem,) = point["theorems"]
    assert theorem["numbers"]["rounds"] % 6000
    assert theorem["refusal"] is None


def with_algorithm(folder: Path, name: str, settings: str, **sections: str) -> Path:
    """The scenario with another [algorithm], and sections added or replaced by their text."""
    text = SCENARIO
    for section, lines in {"algorithm": f'name = "{name}"\n{settings}', **sections}.items():
        before, _, after = text.partition(f"[{section}]\n")
        text = f"{before}[{section}]\n{lines}\n{after[after.index('[') :] if '[' in after else ''}"
    file = folder / "other.toml"
    file.write_text(text)
    return file


def nonsmooth(problem: dict[str, Any]) -> NonsmoothProblem:
    return NonsmoothProblem(problem["dimension"], problem["lipschitz"], 2.3, 0.1, "first", 8, True)


def test_goldstein_theorems_print_noise_and_bound_once_a_gap_is_given(tmp_path: Path) -> None:
    file = with_algorithm(tmp_path, "goldstein-single-pass", GOLDSTEIN)
    (point,) = points_of(file)
    assert "--gap" in point["theorems"][0]["refusal"]
    (point,) = points_of(file, "--gap", "2.3")
    numbers = point["theorems"][0]["numbers"]
    plan = plan_single_pass(nonsmooth(point["problem"]), point["problem"]["records"], 2.0 * 2.0)
    assert numbers["bound"] == pytest.approx(plan.bound)
    assert numbers["noise std"] == pytest.approx(plan.difference_std)
    text = text_of(file, "--gap", "2.3")
    assert "Theorem 6.1" in text
    assert "bound" in text


def test_the_multi_pass_theorem_is_evaluated_at_its_best_target_accuracy(tmp_path: Path) -> None:
    federation = "silos = 2\nrounds = 10\nepochs = 10\nbatch = 100\n"
    (point,) = points_of(
        with_algorithm(tmp_path, "goldstein-erm", GOLDSTEIN, federation=federation), "--gap", "2.3"
    )
    problem = point["problem"]
    for target in (0.01, 0.1, 0.5, 1.0, 2.0):
        other = plan_multi_pass(nonsmooth(problem), problem["records"], target * problem["lipschitz"], 4.0)
        assert point["theorems"][0]["numbers"]["bound"] <= other.bound * (1.0 + 1e-3)


@pytest.mark.parametrize("order", ["fixed", "fresh"])
def test_theorem_6_prints_its_bound_only_if_a_gap_is_given(tmp_path: Path, order: str) -> None:
    """The bound's order is drawn anew in every epoch: said where a run keeps one, and true where it does not."""
    file = with_algorithm(tmp_path, "momentum-tree", f'trust = "trusted"\norder = "{order}"')
    (without,), (point,) = points_of(file), points_of(file, "--gap", "2.3")
    assert ('order = "fresh" draws it anew' in point["theorems"][0]["assumption"]) == (order == "fixed")
    printed = output_of("privacy", "theorem", file, "--gap", "2.3")
    assert ("drawn anew in every epoch" in printed) == (order == "fixed")
    keys = "lipschitz", "smoothness", "records", "dimension", "epsilon"
    expected = tree_gradient_bound(2.3, *(point["problem"][key] for key in keys), 1e-5)
    assert point["theorems"][0]["numbers"]["bound"] == pytest.approx(expected)
    assert "bound" not in without["theorems"][0]["numbers"]


@pytest.mark.slow
def test_the_measured_excess_risk_is_printed_beside_the_theorems(tmp_path: Path) -> None:
    """The excess risk is exact where the population is known."""
    sections = {"data": 'name = "linear-regression"', "federation": "silos = 2\nrounds = 10\n"}
    file = with_algorithm(tmp_path, "dp-mu2-fl", 'trust = "trusted"\ndiameter = 2.0', **sections)
    file.write_text(file.read_text() + '[model]\nname = "least-squares"\n[sweep]\nseeds = 2\n')
    folder = tmp_path / "run"
    results = fedpriv.run(file, out=folder)
    (point,) = points_of(file, "--run", str(folder))
    measured = sum(cell.metrics["excess_risk"] for cell in results.cells) / 2
    assert point["scenario"]["excess risk"] == pytest.approx(measured)
    (without,) = points_of(file)
    assert "excess risk" not in without["scenario"]


def test_the_samples_command_evaluates_table_1_of_the_goldstein_paper() -> None:
    """As printed by hand; and the explicit bounds hold at the records that they name, and not at half of them."""
    words = ["privacy", "samples", "--target", "0.3", "--radius", "0.5", "--epsilon", "1", "--dimension", "8"]
    (point,) = answer_of(*words)["points"]
    records, (a, b, d) = point["records"], (0.25, 0.3, 8.0)
    assert records["Theorem 3.1, single pass"] == pytest.approx(math.sqrt(d) / (a * b**3) + d / (a * b**2))
    assert records["Zhang, Tran & Cutkosky 2024"] == pytest.approx(d / (a * b**3) + d**1.5 / (a * b**2))
    assert records["Theorem 4.1, multi pass"] == pytest.approx(d**0.75 / (math.sqrt(a) * b**1.5))
    fewest, mu = int(records["explicit bound, single pass"]), mu_of(1.0, 1e-5)
    problem = NonsmoothProblem(8, 1.0, 1.0, a)
    assert plan_single_pass(problem, fewest, mu).bound <= b < plan_single_pass(problem, fewest // 2, mu).bound
    assert explicit_bound(problem, 0.01, 9, 0, 1.0, 1.0) == math.inf  # no window is complete
    for option, part in (("target=nan", "target = nan"), ("dimension=0", "1 to 10^12"), ("epsilon=0", "epsilon")):
        assert part in refusal([*words, f"--{option}"])
    assert "more than 10^18" in output_of(*words, "--target", "1e-6")
