"""The guards of a recording: transcripts of what they reply and refuse, with keys from a counter."""

import contextlib
import itertools
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import fedpriv
from benchmarks.record_parts import TRUSTS, Entries, Wanted, command, digest, mine
from fedpriv.data.encode import scaling_from_moments
from fedpriv.plan.evaluation import apply_scaling, first_step_cell
from fedpriv.scenario.load import parse_scenario, resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.demo import prepare_silos
from fedpriv.silo.guard import Guard
from fedpriv.silo.masks import Masker
from tests.attacks.guards import KEPT_STATE, cards, guard_for, random_records, scenario
from tests.data.tables import rows as table_rows
from tests.data.tables import table_tree, write_csv
from tests.silo.evaluated import MODEL, SCENARIO, evaluator, write_tested
from tests.silo.guarded import guard_of


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
        for trust in TRUSTS[:3]:
            yield f"first step/{trust}", lambda t=trust: _guarded_first_step(t)

    return mine(named(), piece, pieces, wanted)


def asked(trust: str, overrides: Mapping[str, Any], rounds: list[int | str], **allow: Any) -> str:
    return _transcript(scenario(trust, **overrides), rounds, **{"budget": 100.0, **allow})()


def _evaluation() -> str:
    with known_secrets():
        path = write_tested(Path.cwd())
        guard = evaluator(path)
        replies = [guard.answer("run", SCENARIO, t, MODEL * t) for t in range(1, 5)]
    return "".join(f"{digest(reply.numpy().tobytes())}\n" for reply in replies)


def scaled_tree(arithmetic: str = "float") -> dict[str, Any]:
    tree = table_tree(write_csv(Path("t.csv"), table_rows()))
    tree["data"]["scale"] = {"share": 0.25}
    tree["run"]["arithmetic"] = arithmetic
    return tree


def _guarded_first_step(trust: str) -> str:
    """A silo as `data split` prepares it: its first step, asked again, another one; then rounds with numbers."""
    tree = scaled_tree()
    tree["algorithm"]["trust"] = trust
    whole = resolve_cell(tree, "recorded")
    first, schema = first_step_cell(whole), whole.data.table_schema
    assert first is not None
    assert schema is not None
    zero = torch.zeros(2, dtype=torch.float64)
    with known_secrets():
        path = prepare_silos(parse_scenario(tree, "recorded"), Path("silos"), 1)[0] / "policy.toml"
        guard = guard_of(path)
        lines = [_line(guard, "first", first, 1, query) for query in (zero, zero, zero + 1.0)]
        del guard
        guard = guard_of(path)
        lines.append(_line(guard, "first", first, 1, zero))
        rounds = apply_scaling(whole, scaling_from_moments(schema.number_features, np.array([0.1, -0.2])))
        lines += [_line(guard, "rounds", rounds, t, _far(t)) for t in (1, 2, 2, 4, 3)]
        lines += [_line(guard, run, cell, 1, _far(1)) for run, cell in (("more", rounds), ("unscaled", whole))]
        del guard
        spent = command("silo", "status", str(path))
    return path.read_text(encoding="utf-8") + "\n".join(lines) + f"\n{spent}"


def _far(t: int) -> torch.Tensor:
    """A model that is right about many records, whose gradients are not all as long as the clip."""
    return 300.0 * query_of(14, t)


def _line(guard: Guard, run: str, cell: Cell, t: int, query: torch.Tensor) -> str:
    """A digest of the reply of the first of two silos, or its refusal."""
    words, keys = json.dumps(cell.canonical_data(), sort_keys=True), b""
    try:
        if cell.algorithm.trust == "secure-aggregation":
            keys = guard.public_key(run, words) + Masker(bytes([1]) * 32, 1).public_key + bytes(64)
        reply = guard.answer(run, words, t, query, keys)
    except fedpriv.RunError as error:
        return f"{run} {t} {error}"
    return f"{run} {t} {reply.dtype} {digest(reply.numpy().tobytes())}"
