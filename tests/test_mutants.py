"""The lists of mutants fit the code as it is, and `python -m tests.mutants` tells which slips are seen."""

import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.mutants import warm
from tests.mutants.listing import LISTS, ROOT, faults, mutants
from tests.mutants.random_slips import equivalents, in_order, report, stale
from tests.mutants.slips import ROOMS, draw, sites
from tests.mutants.worker import changed

MODULE = (
    "def larger(one, other):\n    return one if one >= other else other\n\n\ndef unused():\n    return 1 + 1\n"
)
TEST = "from module import larger\n\n\ndef test_larger():\n    assert larger(2, 1) == larger(1, 2) == 2\n"
LIST = """
[[mutant]]
id = "seen"
file = "module.py"
before = "one >= other"
after = "one < other"
gain = "The smaller one."
killed_by = "tests/test_module.py::test_larger"
[[mutant]]
id = "no-difference"
file = "module.py"
before = "if one >= other"
after = "if one > other"
gain = "Nothing: of two alike either is the larger."
killed_by = ""
equivalent = true
[[mutant]]
id = "unseen"
file = "module.py"
before = "1 + 1"
after = "1 - 1"
gain = "Nobody looks."
killed_by = "tests/test_module.py"
"""


def test_every_mutant_can_be_applied_and_its_test_exists() -> None:
    """No list is stale: `before` occurs once, the change is Python, and the test is there."""
    assert faults(mutants()) == []
    assert len(mutants()) >= 70


def test_stale_entries_of_a_mutant_list_are_reported(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    broken = LIST.replace("one >= other", "other").replace('"1 - 1"', '"1 +"')
    (tmp_path / "toy.toml").write_text(broken)
    lines = faults(mutants(["toy"], tmp_path), tmp_path)
    assert any("toy.toml, seen: `before` occurs 3 times in module.py" in line for line in lines)
    assert any("toy.toml, seen: there is no test 'tests/test_module.py::test_larger'" in line for line in lines)
    assert any("toy.toml, unseen: invalid syntax" in line for line in lines)


@pytest.mark.slow
def test_an_undetected_mutant_survives_and_ends_with_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "tests" / "mutants" / "lists").mkdir(parents=True)
    for name in ("__main__.py", "listing.py", "worker.py"):
        shutil.copy(LISTS.parent / name, tmp_path / "tests" / "mutants" / name)
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "tests" / "test_module.py").write_text(TEST)
    (tmp_path / "tests" / "mutants" / "lists" / "toy.toml").write_text(LIST)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "killed     toy.toml, seen" in done.stdout
    assert "1 SURVIVED, 1 equivalent, 1 killed\nSURVIVED: unseen\n" in done.stdout
    assert (tmp_path / "module.py").read_text() == MODULE, "nothing is changed in place"
    assert ROOT not in tmp_path.parents


FILE = "fedpriv/loss/toy.py"
OPERATORS = [
    ("x = a < b", "comparison", {"(a <= b)", "(a > b)"}),
    ("x = a == b", "comparison", {"(a != b)"}),
    ("x = a + b", "sign", {"(a - b)"}),
    ("x *= b", "sign", {"x /= b"}),
    ("x = -b", "sign", {"b"}),
    ("x = [0.05]", "constant", {"[0.06]", "[0.04]"}),
    ("x = [0]", "constant", {"[1]", "[-1]"}),
    ("x = f(a, b, *c)", "arguments", {"f(b, a, *c)"}),
    ("x = np.minimum(a, b)", "arguments", set()),
    ("f(a)", "call", {"pass"}),
    ("check_range(a)", "refusal", {"pass"}),
    ("if a:\n    raise ValueError(1 + 1)", "refusal", {"pass"}),
    ("def f():\n    return a", "return", {"return None", "pass"}),
    ("def f():\n    return True", "return", {"return False"}),
    ("x = min(a)", "extreme", {"max(a)"}),
    ("x = math.ceil(a)", "extreme", {"math.floor(a)"}),
    ("x = range(a)", "bound", {"range(a + 1)", "range(a - 1)"}),
    ("x = y[a:]", "bound", {"y[a + 1:]", "y[a - 1:]", "y[a:-1]"}),
    ("x = a and b", "logic", {"(a or b)"}),
    ("x = y if a else z", "condition", {"y if (not a) else z"}),
    ("x = not a", "condition", {"a"}),
]


@pytest.mark.parametrize(("source", "operator", "expected"), OPERATORS)
def test_each_mutation_operator_generates_the_expected_mutants(
    source: str, operator: str, expected: set[str]
) -> None:
    slips = [slip for site in sites(source, FILE) for slip in site if slip.operator == operator]
    assert {slip.after.removeprefix("x = ") for slip in slips} == expected
    for slip in slips:
        assert slip.changes(source)
        assert slip.applied(source).count("\n") == source.count("\n")


def test_strings_and_type_hints_generate_no_mutants() -> None:
    texts = (
        '"""Doc: 1 < 2."""\n__all__ = ["a" + "b"]\nx: Literal[1, 2]\n_log.info("%d", 1)\nf"{1 + 2}"\nraise E(1)'
    )
    assert sites(texts, FILE) == []
    source = "def f():\n    g()\n    return\n"
    slips = [slip for site in sites(source, FILE) for slip in site]
    assert {slip.operator: slip.changes(source) for slip in slips} == {"call": True, "return": False}


def test_a_random_sample_of_mutants_is_reproducible_and_extends_smaller_samples() -> None:
    file = "fedpriv/accounting/gaussian.py"
    every_site = sites((ROOT / file).read_text(encoding="utf-8"), file)
    drawn = draw(every_site, ROOMS, 12, seed=3)
    assert drawn == draw(every_site, ROOMS, 30, seed=3)[:12] != draw(every_site, ROOMS, 12, seed=4)
    assert draw(every_site, ["loss"], 12, seed=3) == []
    ids = [slip.id for site in every_site for slip in site]
    assert len(ids) == len(set(ids)) > 100


def test_a_mutated_file_is_restored_byte_for_byte(tmp_path: Path) -> None:
    path, before = tmp_path / "toy.py", "é = 1\r\nx = (a <\n     b)  # why\n".encode()
    path.write_bytes(before)
    time = path.stat().st_mtime_ns
    slip = next(slip for site in sites(before.decode(), FILE) for slip in site if slip.operator == "comparison")
    with changed(str(path), slip.applied(before.decode())):
        assert path.read_bytes() != before
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, time)


def test_a_mutant_replaces_loaded_functions_unless_import_ran_them(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "class A:\n    n = 1\n    def f(self):\n        return 1 + 1\n"
    space: dict[str, type] = {}
    exec(compile(source, FILE, "exec"), space)
    key = (FILE, ("A.f", 3))
    monkeypatch.setattr(warm, "_FUNCTIONS", {key: [space["A"].__dict__["f"]]})
    assert not warm.swapped(FILE, source, source.replace("n = 1", "n = 2"))
    assert warm.swapped(FILE, source, source.replace("1 + 1", "1 - 1"))
    assert space["A"]().f() == 0
    monkeypatch.setattr(warm, "_AT_IMPORT", {key})
    assert not warm.swapped(FILE, source, source.replace("1 + 1", "1 - 1"))


def test_a_mutant_runs_the_quickest_tests_of_its_own_package_first() -> None:
    seconds = {"tests/loss/a.py::slow": 9.0, "tests/loss/a.py::quick": 1.0, "tests/data/b.py::quick": 0.1}
    order = ["tests/loss/a.py::quick", "tests/loss/a.py::slow", "tests/data/b.py::quick"]
    assert list(in_order(seconds, seconds, "loss", 20.0)) == order
    assert list(in_order(seconds, seconds, "loss", 2.0)) == [order[0], order[2]]


def test_surviving_mutants_are_reported_unless_marked_equivalent(capsys: pytest.CaptureFixture[str]) -> None:
    slip = {"id": "1", "room": "loss", "file": FILE, "line": 1, "function": "f", "operator": "sign", "all": True}
    lines = [{**slip, "before": "1 + 1", "after": after, "outcome": "SURVIVED"} for after in ("1 - 1", "1 * 1")]
    keys = [(FILE, "f", "sign", "1 + 1", after) for after in ("1 - 1", "1 * 1")]
    assert report(lines, dict.fromkeys(keys, "why"))
    assert not report(lines, {keys[0]: "why"})
    assert [row.split() for row in capsys.readouterr().out.splitlines() if row.startswith("loss")] == [
        ["loss", "2", "0", "0", "0", "2"],
        ["loss", "2", "0", "1", "0", "1"],
    ]


def test_no_mutant_marked_as_equivalent_is_stale() -> None:
    marked = equivalents()
    functions = defaultdict[str, set[str]](set)
    for file, function, *_ in marked:
        functions[file].add(function)
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in functions}
    slips = [slip for file in texts for site in sites(texts[file], file, functions[file]) for slip in site]
    assert stale(slips, marked) == []
    assert all(reason.strip() for reason in marked.values())
    assert stale([], [("gone.py", "", "sign", "1", "2")]) != []
