"""`fedpriv list`, `init`, `show` and `compare`, and tables that fit a terminal."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedpriv.cli import explore as tables
from fedpriv.cli.explore import Column, print_rich
from fedpriv.core.errors import InputError
from fedpriv.core.files import list_shipped_scenarios
from fedpriv.loss.models import MODELS
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.registry import USER_MECHANISMS
from fedpriv.papers.table import ALGORITHMS
from tests.cli.command import output_of

SMALL = ["--set", "data.name=synthetic", "--set", "federation.rounds=8", "--set", "federation.silos=4"]


def fedpriv(*words: str) -> str:
    return output_of(*words)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def results_of(run: Path) -> Any:
    return json.loads((run / "results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("kind", "names"),
    [("scenarios", list(list_shipped_scenarios())), ("algorithms", list(ALGORITHMS)), ("models", list(MODELS)),
     ("mechanisms", ["independent", "tree", "banded"]), ("data", ["mnist", "synthetic"])],
)  # fmt: skip
def test_the_list_command_prints_one_line_for_each_part_of_a_kind(kind: str, names: list[str]) -> None:
    said = fedpriv("list", kind)
    for name in names:
        assert re.search(rf"^{re.escape(name)} +\S", said, re.MULTILINE), name


def test_the_list_command_refuses_an_unknown_kind_with_a_suggestion() -> None:
    with pytest.raises(InputError, match="did you mean 'models'"):
        fedpriv("list", "model")


@pytest.mark.slow
def test_a_mechanism_with_an_empty_docstring_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: an IndexError."""
    kind = type("Silent", (IndependentGaussian,), {"__doc__": "", "name": "silent"})
    monkeypatch.setitem(USER_MECHANISMS, "silent", kind)
    assert json.loads(fedpriv("list", "mechanisms", "--json"))["mechanisms"]["silent"] == ""


@pytest.mark.slow
def test_a_folder_written_by_init_runs_unchanged(here: Path) -> None:
    """In another process: what is imported there is imported here by no other test."""
    fedpriv("init", "study")
    run = ["run", "scenario.toml", "--import", "my_algorithm.py", "--import", "my_model.py", "--set", "seeds=1"]
    script = "import sys; from fedpriv.cli import main; sys.argv = ['fedpriv', *sys.argv[1:]]; main()"
    subprocess.run([sys.executable, "-c", script, *run, "--quiet"], cwd="study", check=True)
    results = results_of(here / "study" / "runs" / "study")
    assert results["complete"]
    assert [cell["test_accuracy"] > 0.5 for cell in results["cells"]][-1]
    page = Path(fedpriv("report", "study/runs/study").strip()).read_text(encoding="utf-8")  # without its files
    assert "my-algorithm (your own)" in page
    assert results["rerun"].split() == ["fedpriv", *run[:2], "--set", "seeds=1", *run[2:6]]


@pytest.mark.slow
def test_the_notebook_of_a_folder_written_by_init_runs(here: Path) -> None:
    fedpriv("init", "study")
    cells = json.loads((here / "study" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    shared: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook", "exec"), shared)
    assert len(shared["results"]) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["taken", "Upper", "a b"])
def test_init_refuses_a_folder_name_that_is_taken_or_invalid(name: str, here: Path) -> None:
    (here / "taken").mkdir()
    with pytest.raises(InputError, match=f"fedpriv init {name}"):
        fedpriv("init", name)
    assert [path.name for path in here.iterdir()] == ["taken"]


@pytest.mark.slow
def test_the_compare_command_pairs_two_runs_seed_by_seed(here: Path) -> None:
    losses = []
    for out, diameter, seeds in (("one", "0.1", "3"), ("two", "0.2", "2")):
        settings = ["--set", f"algorithm.diameter={diameter}", "--set", f"seeds={seeds}"]
        fedpriv("run", "quickstart", *SMALL, *settings, "--out", out, "--quiet")
        point = {"algorithm.trust": "untrusted", "privacy.rho": 4.0}
        cells = [cell for cell in results_of(here / out)["cells"] if cell["point"] == point and cell["seed"] < 2]
        losses.append(sum(cell["test_loss"] for cell in cells) / 2)
    difference = losses[1] - losses[0]
    said = fedpriv("compare", "one", "two")
    assert "algorithm.diameter: 0.1 in one, 0.2 in two" in said
    row = next(line for line in said.splitlines() if re.match(r"untrusted +4 +test loss", line))
    assert row.split()[4] == "2"
    assert f"{difference:+.4f}" in row
    assert "DP-μ²-FL" in fedpriv("show", "one")


@pytest.mark.usefixtures("here")
def test_the_compare_command_refuses_runs_without_a_common_sweep_point_and_seed() -> None:
    for out, seed in (("one", "[0]"), ("two", "[1]")):
        fedpriv("run", "quickstart", *SMALL, "--set", f"seeds={seed}", "--out", out, "--quiet")
    with pytest.raises(InputError, match="no finished sweep point and seed in common"):
        fedpriv("compare", "one", "two")


@pytest.mark.parametrize("width", range(88, 122))
def test_no_digit_of_a_table_with_many_columns_is_cut_at_any_terminal_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, an ε of 12.34 could be shown as 12.3: the library keeps three spaces between columns, not two."""
    narrow = Console(width=width, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr(tables, "_make_console", lambda: narrow)
    columns = [Column(f"column {n}", is_numeric=True) for n in range(8)]
    print_rich("", columns, [["1234567890"] * 8])
    assert capsys.readouterr().out.count("1234567890") == 8


@pytest.mark.parametrize("width", [30, 40, 50, 60])
def test_no_character_of_two_columns_is_cut_at_any_terminal_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, such a character counted as one column, and the ends of names and headings were lost."""
    narrow = Console(width=width, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr(tables, "_make_console", lambda: narrow)
    hospital = "北京大学第一医院"
    print_rich("", [Column("silo"), Column(f"loss at {hospital}")], [[hospital, "0.1234 ± 0.0123"]])
    assert re.sub(r"\s", "", capsys.readouterr().out).count(hospital) == 2


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_table_entry_is_cut_at_any_terminal_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = Console(width=width, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr(tables, "_make_console", lambda: narrow)
    figure = "2.2845 ± 0.0012 [2.285, -0.0005]"
    columns = [Column("rho"), *(Column(f"silos {n}", is_numeric=True) for n in (1, 10))]
    print_rich("losses", columns, [["4", figure, figure]])
    said = capsys.readouterr().out
    assert said.count(figure) == 2
    assert max(map(len, said.splitlines())) <= width
