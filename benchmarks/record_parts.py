"""The parts of a recording: what each runs, and under which names.

Everything goes through scenarios, `fedpriv.run`, the command line and guards as the tests make them, so that code
can be moved without a change here.  Every entry is computed by itself, from public seeds and a fixed key.
"""

import contextlib
import io
import itertools
import json
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import fedpriv
from benchmarks.record import digest, recorded
from benchmarks.reduced import SCENARIOS, reduced
from fedpriv.cli import main as command_line
from tests.attacks.guards import KEPT_STATE, cards, guard_for, random_records, scenario
from tests.clients.evaluated import MODEL, SCENARIO, evaluator, write_tested
from tests.clients.guarded import guard_of
from tests.data.tables import rows as table_rows
from tests.data.tables import table_tree, write_csv
from tests.engines.test_every_mechanism import NAMES, NOISY, VARIANTS
from tests.engines.test_every_row import SCHEDULES, SETTINGS, tree_of

Entries = Iterator[tuple[str, str]]
Wanted = re.Pattern[str]
TRUSTS = ("untrusted", "trusted", "secure-aggregation", "curator")


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
    """The entry's text; that of an exception, too, since a refusal is as good an entry as a result."""
    try:
        return make()
    except Exception as error:
        return f"{type(error).__name__}: {error}\n"


def _problem() -> None:
    """Three classes of 20 numbers, 1,200 records, as problem.npz in the working directory."""
    draw = np.random.default_rng(10)
    labels = draw.integers(0, 3, 1500)
    images = draw.standard_normal((3, 20))[labels] + draw.standard_normal((1500, 20))
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


# Guards


@contextlib.contextmanager
def known_secrets() -> Iterator[None]:
    """Keys and names from a counter, not from the system: guards' replies are functions of what is asked."""
    counter = itertools.count()

    def known(count: int | None = None) -> bytes:
        seed = next(counter).to_bytes(8, "big")
        blocks = (sha256(seed + bytes([block])).digest() for block in range((count or 32) // 32 + 1))
        return b"".join(blocks)[: count or 32]

    def known_text(count: int | None = None) -> str:
        return known(count).hex()

    with patch.object(secrets, "token_bytes", known), patch.object(secrets, "token_hex", known_text):
        yield


def query_of(size: int, t: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(t + 100).standard_normal(size) * 1e-2)


def _transcript(cell: str, rounds: list[int | str], **allow: Any) -> Callable[[], str]:
    """Digests of a guard's replies to the rounds, or its refusals; "restart" opens ledger and records again."""

    def make() -> str:
        tree, lines = json.loads(cell), []
        trust = tree["algorithm"]["trust"]
        size = tree["model"].get("dimension", 7850) if tree["model"] else 7850
        if trust != "untrusted":
            allow.setdefault("trust", trust)
        if trust == "secure-aggregation":
            allow.setdefault("silos", 3)
        kind = torch.float64 if tree["run"]["dtype"] == "float64" else torch.float32
        with known_secrets():
            guard = guard_for(Path("silo"), *random_records(), **allow)
            for t in rounds:
                if isinstance(t, str):
                    del guard
                    guard = guard_of(Path("silo/silo-0.toml"))
                    continue
                query = query_of(size, t).to(kind)
                try:
                    keys = cards(guard.public_key("run", cell)) if trust == "secure-aggregation" else b""
                    reply = guard.answer("run", cell, t, query, keys)
                    lines.append(f"{t} {reply.dtype} {digest(reply.numpy().tobytes())}")
                except fedpriv.RunError as error:
                    lines.append(f"{t} {error}")
        return "\n".join(lines) + "\n"

    return make


_WHOLE: list[int | str] = list(range(1, 9))
_RESTARTED: list[int | str] = [1, 2, 3, "restart", 3, 4, "restart", 5, 6, 7, 8, 8, "restart", 8]
_PATIENT = {"deployment__missing": "continue"}
SECRET = {
    "algorithm": {"name": "dp-sgd", "clip": 1.0, "step": 0.1},
    "federation": {"silos": 3, "rounds": 8, "batch": 2, "sampling": "poisson"},
    "privacy": {"relation": "zero-out", "epsilon": 4.0},
}


def guards(piece: int, pieces: int, wanted: Wanted) -> Entries:
    """Transcripts of guards with known keys: every kind of kept state × trust, and what is special."""

    def named() -> Iterator[tuple[str, Callable[[], str]]]:
        for name, trust in itertools.product(KEPT_STATE, TRUSTS[:3]):
            for kind in ("float64", "float32"):
                overrides = {**KEPT_STATE[name], "run__dtype": kind}
                yield f"{name}/{trust}/{kind}", lambda o=overrides, t=trust: asked(t, o, _WHOLE)
            yield f"{name}/{trust}/restarted", lambda o=KEPT_STATE[name], t=trust: asked(t, o, _RESTARTED)
            patient = {**KEPT_STATE[name], **_PATIENT}
            yield f"{name}/{trust}/absences", lambda o=patient, t=trust: asked(t, o, [1, 2, 5, "restart", 6, 8])
        for sampling, trust in itertools.product(("poisson", "allocation"), TRUSTS[:3]):
            drawn = {**SECRET, "federation": {**SECRET["federation"], "sampling": sampling}}
            yield (
                f"{sampling}/{trust}",
                lambda o=drawn, t=trust: asked(t, o, _WHOLE, relation="zero-out", slack=1e-5, budget=1e3),
            )
        for trust in TRUSTS[:3]:
            yield (
                f"without noise/{trust}",
                lambda t=trust: asked(
                    t, {"privacy": {"mode": "none", "relation": "replace-one"}}, _WHOLE, noise_free=True
                ),
            )
        yield "evaluation", _evaluation
        yield "first step and rounds", _first_step

    return mine(named(), piece, pieces, wanted)


def asked(trust: str, overrides: Mapping[str, Any], rounds: list[int | str], **allow: Any) -> str:
    return _transcript(scenario(trust, **overrides), rounds, **{"budget": 100.0, **allow})()


def _evaluation() -> str:
    with known_secrets():
        path = write_tested(Path.cwd())
        guard = evaluator(path)
        replies = [guard.answer("run", SCENARIO, t, MODEL * t) for t in range(1, 5)]
    return "".join(f"{digest(reply.numpy().tobytes())}\n" for reply in replies)


def scaled_tree() -> dict[str, Any]:
    tree = table_tree(write_csv(Path("t.csv"), table_rows()))
    tree["data"]["scale"] = {"share": 0.25}
    return tree


def _first_step() -> str:
    """A first step and the rounds after it, on integers, as a simulation makes them."""
    tree = scaled_tree()
    tree["run"] = {**tree.get("run", {}), "arithmetic": "integers"}
    return run_of(tree, "inprocess")


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
    "guards": guards,
    "shipped": shipped,
}
