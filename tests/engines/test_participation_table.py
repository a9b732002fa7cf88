"""The table of docs/participation.md, made from the registries: what runs, and the words that refuse the rest."""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedpriv.core.errors import InputError
from fedpriv.noise.trust import TRUSTS, UNITS
from fedpriv.papers.table import ALGORITHMS
from fedpriv.participation.registry import SELECTABLE_PARTICIPATIONS
from fedpriv.scenario.load import resolve_cell
from tests.conftest import small_tree
from tests.engines.builders import plan_cell
from tests.engines.test_units import persons_tree
from tests.rough import rough_accounting

rough = pytest.fixture(autouse=True, scope="module")(rough_accounting)
PERSONS = functools.cache(persons_tree)
PAGE = Path("docs/participation.md")
BEGIN, END = "<!-- made by tests/engines/test_participation_table.py -->", "<!-- end -->"

KINDS = SELECTABLE_PARTICIPATIONS
PUBLIC = tuple(name for name, kind in KINDS.items() if not (kind.secret or kind.client_initiated))
AVAILABLE = tuple(name for name, kind in KINDS.items() if kind.client_initiated)
SECRET = tuple(name for name, kind in KINDS.items() if kind.secret)
FRESH = (
    {"name": "dp-sgd", "clip": 1.0, "step": 0.1},
    {"name": "phased-sgd", "step": 0.01, "radius": 2.0},  # the one row of a curator
)
FTRL = {"name": "dp-ftrl", "clip": 1.0, "step": 0.1}
TREE, SUMS = ({**FTRL, "mechanism": "tree"},), ({**FTRL, "mechanism": "independent"},)
BANDED = ({**FTRL, "mechanism": "banded", "bands": 2},)
FADING = ({**FTRL, "mechanism": "lambda-cgd", "theta": (0.8,)},)


class Row(NamedTuple):
    """Combinations that must have the same answers; of `algorithms` it is enough that one runs."""

    title: str
    samplings: Sequence[str]
    units: Sequence[str]
    algorithms: Sequence[Mapping[str, Any]]
    groups: int = 1
    federation: Mapping[str, Any] = {}
    privacy: Mapping[str, Any] = {}


ALL = tuple(UNITS)
SMALL = ("record", "user")
AWAY = {"drop_out": 0.3}
COHORTS = {"clients": 8, "cohort": 2}
TABLE = (
    Row("public order, fresh noise in every round", PUBLIC, ALL, FRESH),
    Row("public order, correlated noise", PUBLIC, ALL, TREE + BANDED),
    Row("secret rounds of records or persons, fresh noise", SECRET, SMALL, FRESH),
    Row("the same, banded noise in as many groups", SECRET, SMALL, BANDED, 2),
    Row("the same, more bands than groups", SECRET, SMALL, BANDED),
    Row("the same by allocation, λ-CGD or buffers", ("allocation", "balanced"), SMALL, FADING, 2),
    Row("the same by Poisson sampling, λ-CGD or buffers", ("poisson",), SMALL, FADING, 2),
    Row("the same, noise on sums that run on", SECRET, SMALL, SUMS),
    Row("the same, a tree's noise", SECRET, SMALL, TREE),
    Row("secret rounds of the clients of a silo, fresh noise", SECRET, ("client",), FRESH),
    Row("the same, banded noise in as many groups", SECRET, ("client",), BANDED, 2),
    Row("clients in cyclic cohorts, fresh noise", PUBLIC, ("client",), FRESH, federation=COHORTS),
    Row("the same, correlated noise", PUBLIC, ("client",), TREE + BANDED, federation=COHORTS),
    Row("clients as they are available, fresh noise", AVAILABLE, ("client",), FRESH, federation=COHORTS),
    Row("the same, correlated noise", AVAILABLE, ("client",), TREE + BANDED, federation=COHORTS),
    Row("clients in secret cohorts, fresh noise", SECRET, ("client",), FRESH, federation=COHORTS),
    Row("the same, banded noise in as many groups", SECRET, ("client",), BANDED, 2, federation=COHORTS),
    Row("persons in two silos, public order", PUBLIC, ("user",), FRESH, privacy={"shared": 2}),
    Row("persons in two silos, secret rounds", SECRET, ("user",), FRESH, privacy={"shared": 2}),
    Row("silos that drop out, public order", PUBLIC, ALL, FRESH, federation=AWAY),
    Row("silos that drop out, secret rounds", SECRET, SMALL, FRESH, federation=AWAY),
)


def tree_of(folder: Path, row: Row, sampling: str, unit: str, trust: str, algorithm: Mapping[str, Any]) -> Any:
    """Two silos and four rounds of one pass; persons from a table of their own."""
    tree = PERSONS(folder) if unit == "user" else small_tree()
    of_unit = {} if unit == "record" else {"unit": unit, "records": 3}
    batch = {"batches": [2, 2]} if unit == "user" else {"batch": 2}
    groups = {"groups": row.groups} if row.groups > 1 else {}
    where = {} if "clients" in row.federation else {"silos": 2, **batch}
    apart = {"min_separation": 2} if SELECTABLE_PARTICIPATIONS[sampling].client_initiated else {}
    return {
        **tree,
        "federation": {"rounds": 4, "sampling": sampling, **where, **groups, **apart, **row.federation},
        "algorithm": {"trust": trust, **algorithm},
        "privacy": {"relation": "zero-out", "epsilon": 4.0, **of_unit, **row.privacy},
    }


def find_refusal(tree: Any, arithmetic: str) -> str | None:
    """The line that refuses a cell; None if it runs."""
    try:
        plan_cell(resolve_cell({**tree, "run": {"dtype": "float64", "arithmetic": arithmetic}}, "test"))
    except InputError as error:
        return str(error).removeprefix("test: ")
    return None


def answer(folder: Path, row: Row, trust: str, arithmetic: str) -> str | None:
    """The refusal of a cell of the table, which all its combinations share but for names; None if they run."""
    answers: dict[str, str | None] = {}
    fitting = [settings for settings in row.algorithms if trust in ALGORITHMS[settings["name"]].trusts]
    for sampling, unit in itertools.product(row.samplings, row.units):
        trees = [
            tree_of(folder, row, sampling, unit, trust, settings) for settings in fitting or row.algorithms[:1]
        ]
        lines = [find_refusal(tree, arithmetic) for tree in trees]
        answers[f"{sampling}, {unit}"] = None if None in lines else lines[0]
    assert len({line is None for line in answers.values()}) == 1, (row.title, trust, answers)
    return next(iter(answers.values()))


def lines_of_table(folder: Path) -> Iterator[str]:
    yield "| | " + " | ".join(f"`{trust}`" for trust in TRUSTS) + " |"
    yield "|---" * (len(TRUSTS) + 1) + "|"
    notes: list[str] = []
    title = ""
    for row in TABLE:
        cells = []
        for trust in TRUSTS:
            marks = []
            for arithmetic in ("float", "integers"):
                line = answer(folder, row, trust, arithmetic)
                if line is not None and line not in notes:
                    notes.append(line)
                marks.append("runs" if line is None else f"no ({notes.index(line) + 1})")
            floating, integers = marks
            cells.append(floating if floating == integers else f"{floating}; on integers {integers}")
        title = title if row.title.startswith("the same") else row.title.rpartition(", ")[0]
        yield f"| {row.title.replace('the same', title)} | " + " | ".join(cells) + " |"
    yield ""
    for number, note in enumerate(notes, start=1):
        yield f"{number}. {note}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return list(lines_of_table(tmp_path_factory.mktemp("persons")))


@pytest.mark.slow
def test_the_documented_participation_table_equals_the_generated_table(made: list[str]) -> None:
    print("\n".join(["", *made]))
    page = PAGE.read_text(encoding="utf-8")
    assert BEGIN in page
    shown = page.split(BEGIN)[1].split(END)[0].strip().splitlines()
    assert shown == made


def test_the_participation_table_covers_every_trust_setting_participation_and_unit(made: list[str]) -> None:
    assert all(f"`{trust}`" in made[0] for trust in TRUSTS)
    assert {name for row in TABLE for name in row.samplings} == set(SELECTABLE_PARTICIPATIONS)
    assert {name for row in TABLE for name in row.units} == set(UNITS)


def test_every_refusal_in_the_participation_table_is_one_line_with_a_remedy(made: list[str]) -> None:
    assert all("\n" not in line for line in made)
    notes = [line for line in made if re.match(r"\d+\. ", line)]
    assert len(notes) >= 6
    remedies = ("use", "take", "set", "leave", "can be run with", "accounted for in public orders only")
    assert all(any(word in note for word in remedies) for note in notes)
