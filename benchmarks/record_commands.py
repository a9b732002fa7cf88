"""The commands of a recording: what accounting prints, how runs are shown, and what is written to start from."""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record_guards import known_secrets, query_of, scaled_tree
from benchmarks.record_parts import Entries, Wanted, as_text, command, digest, mine, run_of
from benchmarks.reduced import SCENARIOS
from tests.attacks.guards import random_records, scenario, write_policy
from tests.conftest import small_tree
from tests.data.tables import rows as table_rows
from tests.data.tables import table_tree, write_csv
from tests.silo.guarded import guard_of

_TARGETS = {"mu": ["--mu", "1"], "zcdp": ["--zcdp", "0.5"], "epsilon": ["--epsilon", "2", "--delta", "1e-6"]}
_PROBLEMS: dict[str, list[str]] = {
    "plain": [],
    "trusted": ["--silos", "100", "--trust", "trusted", "--clip", "118.1", "--batch", "4"],
    "masked": ["--silos", "10", "--trust", "secure-aggregation"],
    "zero-out": ["--relation", "zero-out", "--silos", "3"],
    "ten epochs": ["--epochs", "10"],
    "apart": ["--max-participations", "3", "--min-separation", "10"],
    "decay": ["--decay", "0.9", "--epochs", "4"],
    "persons": ["--unit", "user", "--records", "4"],
    "clients": ["--unit", "client", "--records", "20", "--trust", "trusted"],
    "poisson": ["--epochs", "10", "--sampling", "poisson", "--decay", "0"],
    "allocation": ["--epochs", "10", "--sampling", "allocation", "--decay", "0"],
    "groups": ["--epochs", "10", "--sampling", "allocation", "--groups", "5"],
}
_NOISES: dict[str, list[str]] = {
    "independent": [],
    "tree": ["--mechanism", "tree"],
    "banded": ["--mechanism", "banded", "--set", "bands=5"],
    "bisr": ["--mechanism", "bisr", "--set", "bands=5"],
    "lambda-cgd": ["--mechanism", "lambda-cgd"],
    "blt": ["--mechanism", "blt"],
    "scheduled": ["--mechanism", "scheduled"],
    "auto": ["--mechanism", "auto"],
}
_CHOICES = [["--mu", "1", "--trials", "10"], ["--mu", "0.5", "--trials", "40", "--eta", "1"]]


def privacy(piece: int, pieces: int, wanted: Wanted) -> Entries:
    """Every `fedpriv privacy` command, as JSON and as text."""

    def named() -> Iterator[tuple[str, tuple[str, ...]]]:
        for (target, goal), (problem, keys), (noise, of) in itertools.product(
            _TARGETS.items(), _PROBLEMS.items(), _NOISES.items()
        ):
            if target == "mu" or noise == "independent":
                yield f"noise/{target}/{problem}/{noise}", ("noise", "--rounds", "100", *goal, *keys, *of)
        for (problem, keys), (noise, of) in itertools.product(_PROBLEMS.items(), _NOISES.items()):
            yield f"spent/{problem}/{noise}", ("spent", "--rounds", "100", "--std", "3", *keys, *of)
        for problem, keys in _PROBLEMS.items():
            yield f"compare/{problem}", ("compare", "--rounds", "40", "--mu", "1", "--dimension", "0", *keys)
        for row in ("dp-ftrl", "accelerated-dp-srgd", "momentum-tree"):
            yield (
                f"compare/{row}",
                ("compare", "--rounds", "40", "--mu", "1", "--dimension", "0", "--algorithm", row),
            )
        for target, goal in _TARGETS.items():
            for extra in ([], ["--relation", "zero-out"], ["--unit", "user", "--records", "3"]):
                yield f"convert/{target}/{' '.join(extra)}", ("convert", *goal, *extra)
        for sampling in ("poisson", "allocation"):
            drawn = ("--sampling", sampling, "--rounds", "60", "--multiplier", "1")
            yield f"convert/{sampling}", ("convert", *drawn)
            yield (
                f"convert/{sampling}/replace-one",
                ("convert", *drawn, "--epochs", "3", "--relation", "replace-one"),
            )
        for number, keys in enumerate(_CHOICES):
            yield f"selection/{number}", ("selection", *keys)
        for path in sorted(SCENARIOS.glob("*.toml")):
            yield f"theorem/{path.stem}", ("theorem", str(path))

    def both() -> Iterator[tuple[str, Callable[[], str]]]:
        for name, words in named():
            yield f"{name}/json", lambda w=words: command("privacy", *w, "--json")
            if not name.startswith(("noise", "spent")) or name.endswith("independent"):
                yield f"{name}/text", lambda w=words: command("privacy", *w)

    return mine(both(), piece, pieces, wanted)


# Pages, tables, charts


def _folders() -> dict[str, Callable[[], Mapping[str, Any]]]:
    """Scenarios whose folders are reported: curves, sampled ones, integers, a first step, evaluations."""
    swept = small_tree(run__evaluations=4, seed=None)
    swept["sweep"] = {"seeds": [0, 1, 2], "algorithm.trust": ["untrusted", "trusted"], "privacy.rho": [1.0, 4.0]}
    sampled = small_tree(
        algorithm={"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1},
        federation={"silos": 3, "rounds": 12, "epochs": 3, "sampling": "allocation"},
        privacy={"relation": "zero-out", "epsilon": 2.0},
    )
    noise = small_tree(
        algorithm={
            "name": "dp-ftrl", "trust": "untrusted", "clip": 1.0, "step": 0.1,
            "mechanism": "lambda-cgd",
        },
        privacy={"relation": "replace-one", "mu": 1.0},
    )  # fmt: skip
    return {
        "swept": lambda: swept,
        "sampled": lambda: sampled,
        "integers": lambda: small_tree(run__arithmetic="integers"),
        "mechanisms": lambda: noise,
        "evaluated": lambda: small_tree(evaluation={"records": 60, "mu": 1.0}),
        "first step": scaled_tree,
        "first step of integers": lambda: scaled_tree("integers"),
        "without noise": lambda: small_tree(privacy={"mode": "none", "relation": "replace-one"}),
    }


_VIEWS: dict[str, tuple[str, ...]] = {
    "table/markdown": ("table", "run", "--format", "markdown"),
    "table/csv": ("table", "run", "--format", "csv"),
    "table/latex": ("table", "run", "--format", "latex"),
    "show": ("show", "run"),
    "plot": ("plot", "run"),
    "ledger/text": ("privacy", "ledger", "run"),
    "ledger/json": ("privacy", "ledger", "run", "--json"),
    "compare": ("compare", "run", "run"),
    "report": ("report", "run"),
}


def reports(piece: int, pieces: int, wanted: Wanted) -> Entries:
    """Folders of runs as every command shows them; a page with its charts line by line."""

    def named() -> Iterator[tuple[str, Callable[[], str]]]:
        for name, make in _folders().items():
            yield name, lambda m=make: _viewed(m())

    for name, text in mine(named(), piece, pieces, wanted):
        views = json.loads(text) if text.startswith("{") else {"run": text}
        for view, shown in views.items():
            yield f"{name}/{view}", shown


def _viewed(tree: Mapping[str, Any]) -> str:
    shown = {"run": run_of(tree, "inprocess")}
    _stand_still(Path("run/results.json"))
    for view, words in _VIEWS.items():
        shown[view] = command(*words)
    shown["plots"] = "".join(f"{path.name}\n" for path in sorted(Path("run/plots").iterdir()))
    page = Path("run/report.html").read_text(encoding="utf-8")
    shown["page"] = re.sub(r"(?=<)", "\n", page)
    for number, chart in enumerate(re.findall(r'<svg (?=[^>]*class="chart").*?</svg>', page, re.DOTALL)):
        shown[f"chart-{number}"] = re.sub(r"(?=<)", "\n", chart)
    return as_text(shown)


def _stand_still(path: Path) -> None:
    """Put fixed values where a run writes times, dates and versions."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r'("wall_seconds": )[0-9.e+-]+', r"\g<1>1.0", text)
    text = re.sub(r'("date": ")[^"]*', r"\g<1>2000-01-01 00:00 UTC", text)
    text = re.sub(r'("(?:python|torch|numpy|flwr|cryptography|platform)": ")[^"]*', r"\g<1>0", text)
    path.write_text(text, encoding="utf-8")


# Other commands

_HELPED = ["", "run", "tune", "list", "init", "show", "compare", "table", "plot", "report", "audit", "export",
           "superlink", "supernode", "data", "data fetch", "data inspect", "data split", "privacy",
           "privacy compare", "privacy theorem", "privacy ledger", "privacy selection", "privacy convert",
           "privacy noise", "privacy spent", "silo", "silo init", "silo run", "silo status",
           "silo end"]  # fmt: skip
_LISTED = ["scenarios", "algorithms", "mechanisms", "data", "models"]


def commands(piece: int, pieces: int, wanted: Wanted) -> Entries:
    """Help, lists, what `init`, `data inspect` and `data split` write, and a silo's status."""

    def named() -> Iterator[tuple[str, Callable[[], str]]]:
        for words in _HELPED:
            yield f"help/{words}", lambda w=words: command(*w.split(), "--help")
        for kind in _LISTED:
            yield f"list/{kind}", lambda k=kind: command("list", k)
        yield "init", lambda: command("init", "mine") + _files(Path("mine"))
        yield "data inspect", _inspected
        yield "data split/table", lambda: _split(table_tree(write_csv(Path("t.csv"), table_rows())))
        yield "data split/synthetic", lambda: _split(small_tree())
        yield "silo", _silo

    return mine(named(), piece, pieces, wanted)


def _files(folder: Path) -> str:
    """Names and texts of all files; bytes as digests."""
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        kept = content.decode() if path.suffix in (".toml", ".py", ".md", ".ipynb") else digest(content)
        kept = re.sub(r"(?m)^from fedpriv\.[\w.]+ import .*\n", "", kept)  # modules may be renamed
        lines.append(f"== {path}\n{kept}\n")
    return "".join(lines)


def _inspected() -> str:
    write_csv(Path("t.csv"), table_rows())
    return command("data", "inspect", "t.csv", "--out", "found") + _files(Path("found"))


def _split(tree: Mapping[str, Any]) -> str:
    """What `fedpriv data split` writes; shards by the digests of their arrays, since archives have dates."""
    Path("scenario.json").write_text(json.dumps(tree), encoding="utf-8")
    Path("scenario.toml").write_text(_toml(tree), encoding="utf-8")
    said = command("data", "split", "scenario.toml", "--out", "silos")
    for path in sorted(Path("silos").rglob("*.npz")):
        arrays = dict(np.load(path))
        path.write_text("".join(f"{name} {a.dtype} {a.shape} {digest(a.tobytes())}" for name, a in arrays.items()))
    return said + _files(Path("silos"))


def _toml(tree: Mapping[str, Any], prefix: str = "") -> str:
    """A tree of plain values as TOML."""
    lines, tables = [], []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            tables.append(f"[{prefix}{json.dumps(key)}]\n{_toml(value, f'{prefix}{json.dumps(key)}.')}")
        else:
            lines.append(f"{json.dumps(key)} = {json.dumps(value)}\n")
    return "".join([*lines, *tables])


def _silo() -> str:
    """A silo's ledger from its beginning to two runs, as `fedpriv silo status` tells it."""
    with known_secrets():
        path = write_policy(Path("silo"), *random_records(), budget=10.0)
        said = command("silo", "init", str(path))
        guard = guard_of(path)
        for run in ("first", "second"):
            guard.answer(run, scenario(), 1, query_of(7850, 1))
        del guard
        said += command("silo", "status", str(path)) + command("silo", "end", str(path), "first")
        said += command("silo", "status", str(path))
    return said
