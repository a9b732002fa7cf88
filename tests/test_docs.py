"""What the documentation shows is what runs.

Every page is executed from top to bottom in a folder of its own: Python blocks, and the commands of `sh` blocks on
scenarios cut down to small synthetic data.  A command whose comment begins with `long:`, `network:` or `manual:`
is not executed.
`test_commands_marked_as_not_executed_are_skipped_with_their_reason` lists each of them as
skipped, with its reason.
"""

import ast
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fedpriv.addons.statistics.plan import read_plan
from fedpriv.addons.tune.command import TUNING_KEYS
from fedpriv.claims.outcome import RunObserver
from fedpriv.cli.app import app
from fedpriv.engines.table import make_engine
from fedpriv.loss.models import MODELS
from fedpriv.noise.registry import USER_MECHANISMS
from fedpriv.papers.table import ALGORITHMS
from fedpriv.participation import registry as participation
from fedpriv.plan.task import check_record_count
from fedpriv.scenario.load import load_scenario, parse_scenario
from fedpriv.scenario.schema import Cell
from fedpriv.silo.policy import Policy
from tests.conftest import small_tree
from tests.doc_pages import PAGES, ROOT, Block, Command, blocks, commands, commands_in

LANGUAGES = {"python", "sh", "toml", "text", "json"}
FIRST = {"README.md", "index.md", "python.md"}
"""The pages that a newcomer opens: the fast suite runs these."""
ALL = [command for page in PAGES for command in commands(page)]
SMALLER = (
    (r'name = "mnist"', 'name = "synthetic"'),
    (r"^rounds = \d+", "rounds = 6"),
    (r"^samples = \d+", "samples = 600"),
    (r"^seeds = \d+", "seeds = 2"),
)


def named(page: Path | Command) -> str:
    return page.name if isinstance(page, Path) else f"{page.page}: {page.line}"


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the repository's scenarios, made small; rows that a page adds are taken out again."""
    (tmp_path / "scenarios").mkdir()
    for path in (ROOT / "scenarios").glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        for pattern, small in SMALLER:
            text = re.sub(pattern, small, text, flags=re.MULTILINE)
        (tmp_path / "scenarios" / path.name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    tables: list[dict[str, Any]] = [MODELS, ALGORITHMS, USER_MECHANISMS, participation.USER_PARTICIPATIONS]
    before = [dict(table) for table in tables]
    yield tmp_path
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


RUN = [page if page.name in FIRST else pytest.param(page, marks=pytest.mark.slow) for page in PAGES]


@pytest.mark.parametrize("page", RUN, ids=named)
def test_a_page_runs_from_top_to_bottom(
    page: Path, sandbox: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look their module up
    for block in blocks(page):
        if block.language == "python":
            exec(compile(block.text, page.name, "exec"), module.__dict__)
        if block.language == "sh":
            for command in commands_in(page.name, block.text, block.reason):
                execute(command)
    for command in commands(page):
        if not any(command.line in block.text for block in blocks(page)):
            execute(command)


def execute(command: Command) -> None:
    """Run a shown command in this process, unless it is marked."""
    if command.reason:
        return
    program, *arguments = command.words
    if program == "fedpriv":
        done = CliRunner().invoke(app, arguments, prog_name="fedpriv", catch_exceptions=False)
        assert done.exit_code == 0, f"{command.line}\n{done.output}"
    elif program in {"python", "python3"} and arguments[0].startswith("examples/"):
        runpy.run_path(str(ROOT / arguments[0]))
    else:
        pytest.fail(f"{command.page}: no test executes {command.line!r}; say why behind it: '# manual: …'")


@pytest.mark.parametrize("command", [command for command in ALL if command.reason], ids=named)
def test_commands_marked_as_not_executed_are_skipped_with_their_reason(command: Command) -> None:
    program, *arguments = command.words
    if program == "make":
        assert f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    pytest.skip(command.reason)


@pytest.mark.parametrize("command", [each for each in ALL if each.words[0] == "fedpriv"], ids=named)
def test_every_command_that_is_shown_exists_with_its_options(command: Command) -> None:
    """Parsed by the real command line up to the point of running it."""
    group: Any = typer.main.get_command(app)
    with group.make_context("fedpriv", command.words[1:], resilient_parsing=False) as context:
        name, inner, rest = group.resolve_command(context, list(context._protected_args + context.args))
        while hasattr(inner, "resolve_command"):
            with inner.make_context(name, list(rest), parent=context) as below:
                name, inner, rest = inner.resolve_command(below, list(below._protected_args + below.args))
        inner.make_context(name, list(rest), parent=context)


def shown_runs() -> Iterator[tuple[str, list[str]]]:
    """Each scenario file that a page runs, with its overrides, from the command line or from Python."""
    for command in ALL:
        if command.words[:2] == ["fedpriv", "run"]:
            words = command.words
            yield words[2], [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    for block in (block for page in PAGES for block in blocks(page) if block.language == "python"):
        for call in (node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) == "fedpriv.run" and isinstance(call.args[0], ast.Constant):
                keys = [ast.literal_eval(given.value) for given in call.keywords if given.arg == "set"]
                yield str(call.args[0].value), [f"{key}={value}" for each in keys for key, value in each.items()]


@pytest.mark.parametrize(
    ("scenario", "overrides"), [run for run in shown_runs() if "data.name=synthetic" in run[1]]
)
def test_runs_shown_in_the_documentation_have_enough_records(scenario: str, overrides: list[str]) -> None:
    """The pages are executed on scenarios cut down; a reader has the whole ones."""
    path = ROOT / scenario if (ROOT / scenario).exists() else Path(scenario)  # or a name
    whole = load_scenario(path, [each for each in overrides if not each.startswith("model.")])
    for cell in (point.cell for point in whole.points):
        check_record_count(cell)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_has_a_language_that_is_checked(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.language or 'no language'}: {block.text[:60]!r}"


@pytest.mark.parametrize(
    "block",
    [block for page in PAGES for block in blocks(page) if block.language == "toml"],
    ids=lambda block: f"{block.page}: {block.text.splitlines()[0]}",
)
def test_every_toml_block_is_a_valid_scenario_tuning_file_plan_or_policy(block: Block) -> None:
    tree = tomllib.loads(block.text)
    if "allow" in tree:
        Policy.model_validate(tree)
    elif "grid" in tree:
        assert tree.keys() <= TUNING_KEYS.keys()
    elif isinstance(tree.get("table"), list):
        assert read_plan(tree).table
    else:
        parse_scenario({**small_tree(), **tree}, block.page)


def test_the_scenario_of_the_reference_page_is_complete() -> None:
    (source,) = [block.text for block in blocks(ROOT / "docs" / "scenarios.md") if block.language == "toml"][:1]
    assert len(parse_scenario(tomllib.loads(source), "scenarios.md").points) == 10


@pytest.mark.slow
def test_the_algorithm_of_the_guide_runs_on_every_engine(
    small_cell: Callable[..., Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    block, *_ = [b for b in blocks(ROOT / "docs" / "adding-an-algorithm.md") if b.language == "python"]
    assert len([line for line in block.text.splitlines() if line.strip()]) < 60
    module = ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)
    exec(compile(block.text, block.page, "exec"), module.__dict__)
    monkeypatch.setitem(ALGORITHMS, "dp-adagrad-norm", module.DP_ADAGRAD)
    cell = small_cell(
        algorithm={"name": "dp-adagrad-norm", "trust": "trusted", "clip": 5.0, "step": 1.0, "radius": 10.0},
        privacy={"relation": "replace-one", "mu": 8.0},
        federation={"silos": 20, "rounds": 100},
    )
    results = {}
    for engine in ("vectorized", "inprocess"):
        (outcome,) = make_engine(engine)([cell], RunObserver())
        results[engine] = outcome.cell_outcome
    assert results["vectorized"].test_loss == pytest.approx(results["inprocess"].test_loss, rel=1e-9)
    assert results["vectorized"].test_accuracy > 0.5


def test_every_fault_in_the_table_has_its_test() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    _header, _rule, *rows = re.findall(r"^\|.*\|$", page.partition("\n## A game day\n")[0], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(test_\w+)` \|$", row)]
    folders = [ROOT / "tests" / folder for folder in ("e2e", "attacks", "server")]
    files = [path for folder in folders for path in folder.glob("test_*.py")]
    sources = "".join(path.read_text(encoding="utf-8") for path in files)
    assert len(named) == len(rows) >= 12
    assert [name for name in named if f"def {name}(" not in sources] == []


def test_every_linked_file_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_file_of_code_that_is_named_exists() -> None:
    for page in PAGES:
        for name in re.findall(
            r"`((?:fedpriv|server|clients|tests|examples|benchmarks|scenarios)/[\w/.-]+)`",
            page.read_text(encoding="utf-8"),
        ):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


PROOFS = sorted(page for page in (ROOT / "docs" / "proofs").glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("page", PROOFS, ids=named)
def test_a_proof_names_tests_that_exist_and_code_that_links_to_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    checks = re.findall(r"^- `(tests/[\w/]+\.py)::(test_\w+)`$", text, re.MULTILINE)
    assert checks
    for file, test in checks:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{page.name} names {file}::{test}"
    link = str(page.relative_to(ROOT))
    assert any(link in path.read_text(encoding="utf-8") for path in (ROOT / "fedpriv").rglob("*.py")), link


def test_a_proof_that_code_links_to_exists() -> None:
    for path in (ROOT / "fedpriv").rglob("*.py"):
        for link in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8")):
            assert (ROOT / link).exists(), f"{path} names {link}"
