"""What the documentation shows is what runs."""

import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.policy import Policy
from fedpriv.algorithms import ALGORITHMS
from fedpriv.cli.app import app
from fedpriv.engines.table import engine_named
from fedpriv.scenario import Cell
from fedpriv.scenario.load import scenario_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Silent:
    def advanced(self, client_rounds: int) -> None: ...

    def evaluated(self, index: int, t: int, test_loss: float, test_accuracy: float) -> None: ...


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def test_the_algorithm_of_the_guide_runs_on_every_engine(
    small_cell: Callable[..., Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = blocks("adding-an-algorithm.md", "python")
    assert len([line for line in source.splitlines() if line.strip()]) < 60
    namespace: dict[str, object] = {"__name__": "guide"}
    monkeypatch.setitem(__import__("sys").modules, "guide", __import__("types").ModuleType("guide"))
    exec(compile(source, "adding-an-algorithm.md", "exec"), namespace)
    monkeypatch.setitem(ALGORITHMS, "dp-adagrad-norm", namespace["DP_ADAGRAD"])
    cell = small_cell(
        algorithm={"name": "dp-adagrad-norm", "trust": "trusted", "clip": 5.0, "step": 1.0, "radius": 10.0},
        privacy={"relation": "replace-one", "mu": 8.0},
        federation={"silos": 20, "rounds": 100},
    )
    results = {}
    for engine in ("vectorized", "inprocess"):
        (outcome,) = engine_named(engine)([cell], Silent())
        results[engine] = outcome.finished
    assert results["vectorized"].test_loss == pytest.approx(results["inprocess"].test_loss, rel=1e-9)
    assert results["vectorized"].test_accuracy > 0.5


def test_the_scenario_of_the_reference_is_valid() -> None:
    source, *_ = blocks("scenarios.md", "toml")
    assert len(scenario_of(tomllib.loads(source), "scenarios.md").points) == 10


def test_the_policy_of_the_privacy_page_is_valid() -> None:
    (source,) = blocks("privacy.md", "toml")
    assert Policy.model_validate(tomllib.loads(source)).allow.budget == 4.0


def commands() -> list[str]:
    lines = [line.strip() for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    found = [line.partition("  #")[0].strip() for line in lines if re.match(r"(\.venv/bin/)?fedpriv ", line)]
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_every_command_that_is_shown_exists_with_its_options(command: str) -> None:
    """Parsed by the real command line up to the point of running it."""
    import typer

    words = shlex.split(command)[1:]
    group = typer.main.get_command(app)
    with group.make_context("fedpriv", list(words), resilient_parsing=False) as context:
        name, inner, rest = group.resolve_command(context, list(context._protected_args + context.args))  # type: ignore[attr-defined]
        while hasattr(inner, "resolve_command"):
            with inner.make_context(name, list(rest), parent=context) as below:
                name, inner, rest = inner.resolve_command(below, list(below._protected_args + below.args))
        inner.make_context(name, list(rest), parent=context)


def test_every_linked_file_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
