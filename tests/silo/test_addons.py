"""Add-ons and guards: a guard loads what its policy allows, and a stranger's scenario imports nothing more."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import fedpriv
from fedpriv.core.errors import InputError
from fedpriv.core.extensions import ADD_ON_PARTS, COMMANDS, find_register, load_add_on_part
from fedpriv.scenario.schema import Cell
from fedpriv.silo.admission import Admission, why_unguarded
from fedpriv.silo.policy import Policy
from tests.conftest import small_tree
from tests.forks import ROOT, run_in_forks

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "fedpriv.addons" or name.startswith("fedpriv.addons."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def python(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


CORE = ("fedpriv", "fedpriv.silo.guards", "fedpriv.cli.run", "fedpriv.server.app")
ALLOWED: list[tuple[tuple[str, ...], int | None, list[str]]] = [
    ((), None, []), (("age",), None, ["indicators", "plan"]), ((), 1, ["curves", "indicators", "roc"])
]  # fmt: skip
OUTSIDE: list[tuple[dict[str, Any], str]] = [
    ({"model": {"name": "statistics"}}, "is of an add-on, and allow.statistics allows no run of it"),
    ({"evaluation": {"curves": {}}}, "evaluation.curves: the policy has no section [evaluation]"),
    ({"model": {"name": []}, "evaluation": {"curves": None}}, "None"),
]
COMMAND_NAMES = [name for names in COMMANDS.values() for name in names]
FIND_MODEL = "from fedpriv.loss.models import find_model\nfind_model('statistics')"
SMALL_RUN = (
    *("run", "scenarios/quickstart.toml", "--set", "federation.rounds=4", "--set", "data.name=synthetic"),
    *("--set", "run.evaluations=1", "--set", "seeds=[1]", "--out"),
)


def main_of(*arguments: str) -> str:
    return f"sys.argv = ['fedpriv', *{arguments}]\nfrom fedpriv.cli import main\nmain()"


Answers = dict[str, "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What every program of this file shows, in an interpreter that has imported the core."""
    shared = f"""
import sys
from types import SimpleNamespace as Some

def add_ons():
    return [name for name in sys.modules if name.startswith("fedpriv.addons")]

imported = {{}}
for module in {CORE}:
    __import__(module)
    imported[module] = add_ons()
from fedpriv.silo.admission import Admission
from fedpriv.silo.policy import Policy
"""
    programs = {module: f"print(imported[{module!r}])" for module in CORE}
    for statistics, evaluation, _ in ALLOWED:
        programs[f"{statistics} {evaluation}"] = f"""
allow = Some(statistics={statistics!r}, extensions=(), models=(), algorithms=())
Policy.import_extensions(Some(allow=allow, evaluation={evaluation!r}))
names = [name.split(".") for name in sys.modules]
print(sorted(name[3] for name in names if name[:2] == ["fedpriv", "addons"] and len(name) == 4))
"""
    for tree, _ in OUTSIDE:
        programs[f"{tree}"] = f"""
allow = Some(models=(), algorithms=(), statistics=())
print(Admission._why_unknown_code(Some(policy=Some(allow=allow, evaluation=None)), {tree!r}))
print(add_ons())
"""
    for command in COMMAND_NAMES:
        programs[command] = f"{WITHOUT}\n{main_of(*command.split(), 'x', '--y')}"
    programs["model"] = f"{WITHOUT}\n{FIND_MODEL}"
    programs["run"] = f"{WITHOUT}\n{main_of(*SMALL_RUN, str(tmp_path_factory.mktemp('small') / 'run'))}"
    return dict(zip(programs, run_in_forks(shared, *programs.values()), strict=True))


@pytest.mark.every(4)
@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_no_add_on(module: str, answers: Answers) -> None:
    assert answers[module].stdout == "[]\n"


@pytest.mark.parametrize(("statistics", "evaluation", "loaded"), ALLOWED)
def test_a_guard_imports_exactly_the_add_ons_that_its_policy_allows(
    statistics: tuple[str, ...], evaluation: int | None, loaded: list[str], answers: Answers
) -> None:
    """Before it sees a scenario: afterwards it admits none of another add-on (`Admission._why_unknown_code`)."""
    assert answers[f"{statistics} {evaluation}"].stdout == f"{loaded}\n"


@pytest.mark.parametrize(("tree", "words"), OUTSIDE)
def test_a_scenario_naming_an_add_on_outside_the_policy_imports_no_code(
    tree: dict[str, Any], words: str, answers: Answers
) -> None:
    reason, imported = answers[f"{tree}"].stdout.splitlines()
    assert words in reason
    assert imported == "[]"


def test_repricing_a_past_run_ignores_that_its_add_on_is_no_longer_allowed() -> None:
    """Else its price would be 0 where today's accounting says more than what was charged."""
    policy = cast(Policy, SimpleNamespace(allow=SimpleNamespace(models=(), algorithms=(), statistics=())))
    admission = cast(Admission, SimpleNamespace(policy=policy))
    tree = {"model": {"name": "statistics"}, "evaluation": {"curves": {}}}
    assert Admission._why_unknown_code(admission, tree, recalled=True) is None


def test_a_model_that_reads_raw_table_cells_without_a_registered_guard_check_is_refused() -> None:
    """An add-on that forgets its guard row would be asked nothing: admission fails closed."""

    def reason_of(**row: Any) -> str | None:
        cell = SimpleNamespace(model=SimpleNamespace(row=SimpleNamespace(**row)))
        return why_unguarded(cast(Policy, None), cast(Cell, cell))

    assert reason_of(of_cells=True, guard=None) == "the model reads raw cells, and nothing guards it"
    assert reason_of(of_cells=False, guard=None) is None


def test_a_third_party_model_reusing_the_statistics_guard_check_is_refused() -> None:
    """It would read all raw cells of a policy that names no column."""
    model = SimpleNamespace(
        name="theirs", settings=object(), row=SimpleNamespace(of_cells=True, guard="statistics")
    )
    reason = why_unguarded(cast(Policy, None), cast(Cell, SimpleNamespace(model=model)))
    assert reason == "model.name = 'theirs' reads raw cells, and is none of fedpriv's statistics"


def test_every_registered_add_on_part_and_command_can_be_loaded() -> None:
    for kind, names in ADD_ON_PARTS.items():
        for name in names:
            assert load_add_on_part(kind, name) is not None
    assert all(callable(find_register(module)) for module in COMMANDS)


@pytest.mark.slow
def test_the_documented_add_on_command_works_after_adding_one_file_and_one_line(tmp_path: Path) -> None:
    """The one of the page on the architecture, run by the command line of a copy."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    file = page.partition("\n### An add-on\n")[2].partition("```python\n")[2].partition("```")[0]
    line = '    "weather": ("weather",),'
    assert f"the line `{line.strip()}` in `COMMANDS` of `core/extensions.py`" in page
    shutil.copytree(ROOT / "fedpriv", tmp_path / "fedpriv", ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "fedpriv" / "core" / "extensions.py"
    head, start, tail = table.read_text(encoding="utf-8").partition('    "audit.options": ("audit",),\n')
    table.write_text(f"{head}{line}\n{start}{tail}", encoding="utf-8")
    run = fedpriv.run(small_tree(), out=tmp_path / "run")
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport fedpriv.api.results"
    written = f"open({str(tmp_path / 'fedpriv' / 'addons' / 'weather.py')!r}, 'w').write({file!r})\n"
    weather = main_of("weather", str(run.folder))
    missing, shown, help_ = run_in_forks(start, weather, written + weather, main_of("--help"))
    assert "fedpriv weather: it is of the add-on 'weather', which this installation lacks" in missing.stderr
    assert shown.stdout == f"{run[0].rounds} rounds\n"
    assert "Show the number of rounds of a run." in help_.stdout


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_a_command_of_an_add_on_that_is_not_installed_fails_in_one_line(command: str, answers: Answers) -> None:
    done = answers[command]
    assert done.returncode == InputError.exit_code
    assert done.stdout == ""
    assert "which this installation lacks" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_scenario_naming_an_add_on_that_is_not_installed_says_which_one_is_missing(answers: Answers) -> None:
    words = "model 'statistics': it is of the add-on 'statistics', which this installation lacks"
    assert words in answers["model"].stderr


def test_a_scenario_without_add_ons_runs_where_none_is_installed(answers: Answers) -> None:
    done = answers["run"]
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.splitlines()[-1].removeprefix("results: ")) / "results.json").is_file()
