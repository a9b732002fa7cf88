"""The parts of a recording: what each runs, and under which names.

Everything goes through scenarios, `fedpriv.run`, the command line and guards as the tests make them, so that code
can be moved without a change here.  Every entry is computed by itself, from public seeds and a fixed key.
"""

import contextlib
import hashlib
import io
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fedpriv
from benchmarks.reduced import SCENARIOS, reduced
from fedpriv.cli import main as command_line
from tests.engines.test_every_mechanism import NAMES, NOISY, VARIANTS
from tests.engines.test_every_row import SCHEDULES, SETTINGS, tree_of

Entries = Iterator[tuple[str, str]]
Wanted = re.Pattern[str]
TRUSTS = ("untrusted", "trusted", "secure-aggregation", "curator")
_LEFT_OUT = frozenset({"wall_seconds", "seconds", "versions", "rerun", "date"})


def recorded(folder: Path) -> str:
    """What a run wrote, as text: results and history without what differs from run to run, digests of models."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    models = {path.name: digest(path.read_bytes()) for path in sorted((folder / "models").iterdir())}
    return as_text(without({"results": results, "history": history, "models": models}))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def as_text(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def without(value: Any) -> Any:
    """`value` without the keys that differ from run to run."""
    if isinstance(value, Mapping):
        return {key: without(entry) for key, entry in value.items() if key not in _LEFT_OUT}
    return [without(entry) for entry in value] if isinstance(value, list) else value


def mine(named: Iterator[tuple[str, Callable[[], str]]], piece: int, pieces: int, wanted: Wanted) -> Entries:
    """Every `pieces`-th entry that is wanted, computed in an empty folder of its own."""
    chosen = [(name, make) for name, make in named if wanted.search(name)]
    for number, (name, make) in enumerate(chosen[piece::pieces]):
        folder = Path(f"entry-{number}")
        folder.mkdir()
        with contextlib.chdir(folder):
            yield name, told(make)
        shutil.rmtree(folder)


def told(make: Callable[[], str]) -> str:
    """The entry's text without paths; that of an exception, too, since a refusal is as good as a result."""
    try:
        said = make()
    except Exception as error:
        said = f"{type(error).__name__}: {error}\n"
    return said.replace(str(Path.cwd()), "FOLDER").replace(str(SCENARIOS), "SCENARIOS")


def _problem(shape: tuple[int, ...] = (20,)) -> None:
    """Three classes of 20 numbers, 1,200 records, as problem.npz in the working directory."""
    draw = np.random.default_rng(10)
    labels = draw.integers(0, 3, 1500)
    images = draw.standard_normal((3, 20))[labels] + draw.standard_normal((1500, 20))
    images = images.reshape(-1, *shape)
    np.savez(
        "problem.npz", train_images=images[:1200], train_labels=labels[:1200], test_images=images[1200:],
        test_labels=labels[1200:], classes=np.array(3),
    )  # fmt: skip


def run_of(tree: Mapping[str, Any], engine: str) -> str:
    """What a run of the scenario writes."""
    fedpriv.run({**tree, "name": "recorded"}, engine=engine, out="run", progress=False)
    return recorded(Path("run"))


def _small(tree: Mapping[str, Any], engine: str) -> Callable[[], str]:
    def make() -> str:
        _problem()
        return run_of(tree, engine)

    return make


# Rows and mechanisms


def rows(piece: int, pieces: int, wanted: Wanted) -> Entries:
    """Every row × participation × trust: integers and floats in process, floats together, and without noise."""

    def named() -> Iterator[tuple[str, Callable[[], str]]]:
        for name, schedule, trust in itertools.product(SETTINGS, SCHEDULES, TRUSTS):
            for engine, arithmetic, private in (
                ("inprocess", "integers", True),
                ("inprocess", "float", True),
                ("vectorized", "float", True),
                ("vectorized", "float", False),
            ):
                tree = tree_of(name, schedule, trust, private)
                tree["run"] = {**tree["run"], "arithmetic": arithmetic}
                noise = "private" if private else "quiet"
                yield f"{name}/{schedule}/{trust}/{engine}/{arithmetic}/{noise}", _small(tree, engine)
        for name, schedule in (("dp-sgd", "one epoch"), ("dp-fedavg", "clients, fixed")):
            tree = tree_of(name, schedule, "trusted", True)
            tree["run"] |= {"arithmetic": "integers", "metrics": ["balanced_accuracy"], "goldstein_radius": 0.1}
            yield f"{name}/{schedule}/measured/inprocess/integers/private", _small(tree, "inprocess")

    return mine(named(), piece, pieces, wanted)


def mechanisms(piece: int, pieces: int, wanted: Wanted) -> Entries:
    """Every mechanism × variant × trust under three rows, on integers and in floats; fits are part of it."""

    def named() -> Iterator[tuple[str, Callable[[], str]]]:
        for row, name, variant, trust in itertools.product(NOISY, NAMES, VARIANTS, TRUSTS[:3]):
            for arithmetic, epochs in (("integers", 1), ("float", 1), ("integers", 3)):
                tree = tree_of(row, "several epochs" if epochs > 1 else "one epoch", trust, True)
                tree["algorithm"] |= {"mechanism": name, **VARIANTS[variant]}
                tree["privacy"] = {"relation": "zero-out", "mu": 1.5}
                tree["run"] = {**tree["run"], "arithmetic": arithmetic}
                yield f"{row}/{name}/{variant}/{trust}/{arithmetic}/{epochs}", _small(tree, "inprocess")

    return mine(named(), piece, pieces, wanted)


def copies(piece: int, pieces: int, wanted: Wanted) -> Entries:
    """Copies of pictures under every sampling of records: integers and floats in process, floats together."""

    def made(tree: Mapping[str, Any], engine: str) -> Callable[[], str]:
        def make() -> str:
            _problem((4, 5))
            return run_of(tree, engine)

        return make

    def named() -> Iterator[tuple[str, Callable[[], str]]]:
        of_records = [name for name in SCHEDULES if not name.startswith("clients")]
        for schedule, trust in itertools.product(of_records, TRUSTS[:3]):
            for engine, arithmetic in (("inprocess", "integers"), ("inprocess", "float"), ("vectorized", "float")):
                tree = tree_of("dp-sgd", schedule, trust, True)
                tree["model"] = {"name": "mlp", "hidden": 4, "augment": {"copies": 3, "shift": 1, "flip": True}}
                tree["run"] = {**tree["run"], "arithmetic": arithmetic}
                yield f"{schedule}/{trust}/{engine}/{arithmetic}", made(tree, engine)

    return mine(named(), piece, pieces, wanted)


# Commands


def command(*arguments: str) -> str:
    """What `fedpriv ARGUMENTS` prints, and its exit code."""
    out, before = io.StringIO(), sys.argv
    code: Any = 0
    sys.argv = ["fedpriv", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            command_line()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = before
    return f"{out.getvalue()}exit code {code}\n"


def shipped(piece: int, pieces: int, wanted: Wanted) -> Entries:
    """The shipped scenarios at reduced size, as `fedpriv run` runs them."""

    def made(path: Path) -> str:
        fedpriv.run(path, set=reduced(path), out="run", progress=False)
        return recorded(Path("run"))

    named = ((path.stem, lambda p=path: made(p)) for path in sorted(SCENARIOS.glob("*.toml")))
    return mine(named, piece, pieces, wanted)


PARTS: dict[str, Callable[[int, int, Wanted], Entries]] = {
    "rows": rows,
    "mechanisms": mechanisms,
    "copies": copies,
    "shipped": shipped,
}
