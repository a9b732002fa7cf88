"""The refusals of a recording: one bad value at a time, in scenarios, policies, queries and commands.

What is accepted is told as accepted, so that a value that is refused no longer is seen as well.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record_guards import SECRET, asked, known_secrets
from benchmarks.record_parts import Entries, Wanted, command, mine, run_of, told
from tests.attacks.guards import random_records, write_policy
from tests.conftest import small_tree
from tests.silo.guarded import UNACCOUNTABLE

_BAD: list[Any] = [-1, 0, 1e300, 1e-300, "no-such", True, {}, float("nan")]


def _keys() -> Iterator[tuple[str, Any]]:
    """Scenarios with one bad value, or one key too many: the base for each section is one that needs it."""
    table = {
        "data": ["name", "partition", "concentration", "shards", "validation"],
        "model": ["name", "feature_norm", "hidden", "activation"],
        "federation": ["silos", "rounds", "epochs", "batch", "samples", "sampling", "groups", "clients", "cohort",
                       "drop_out", "away", "size_skew", "min_separation", "max_participations"],
        "algorithm": ["name", "trust", "diameter", "clip", "step", "mechanism", "bands", "momentum", "late_clip",
                      "calibration", "output", "theta", "phi", "scale"],
        "privacy": ["mode", "relation", "unit", "records", "shared", "mu", "rho", "zcdp", "epsilon", "delta"],
        "run": ["dtype", "arithmetic", "word", "device", "evaluations", "metrics", "per_silo", "noise"],
        "evaluation": ["records", "mu", "epsilon", "clip"],
        "deployment": ["patience", "missing"],
    }  # fmt: skip
    for section, keys in table.items():
        for key, bad in itertools.product([*keys, "no_such_key"], _BAD):
            yield f"{section}.{key} = {bad!r}", small_tree(**{f"{section}__{key}": bad})
    for key, bad in itertools.product(["name", "seed", "seeds", "title", "where", "paper"], _BAD):
        yield f"{key} = {bad!r}", {**small_tree(), key: bad}


_BAD_POLICY = ["-1", "0", "1e300", '"no-such"', "true", "[]", "nan"]
_COMMANDS = """
run
run no-such-scenario
run quickstart --engine no-such
run quickstart --set federation.silo=3
run quickstart --set novalue
run quickstart --workers 0
show no-such-run
table no-such-run
plot no-such-run
report no-such-run
compare a b
audit no-such-scenario
export no-such-run
tune no-such-scenario
list no-such
no-such-command
data fetch no-such
data inspect no-such.csv
data split no-such.toml --out o
silo init no-such.toml
silo status no-such.toml
silo run no-such.toml
silo end no-such.toml run
privacy ledger no-such-run
privacy theorem no-such
privacy noise
privacy noise --rounds 10
privacy noise --rounds 10 --mu 1 --zcdp 1
privacy noise --rounds 10 --mu -1
privacy noise --rounds 10 --mu nan
privacy noise --rounds 0 --mu 1
privacy noise --rounds 10 --epsilon 1
privacy noise --rounds 10 --mu 1 --mechanism no-such
privacy noise --rounds 10 --mu 1 --set no_such=1
privacy noise --rounds 10 --mu 1 --trust no-such
privacy noise --rounds 10 --mu 1 --sampling no-such
privacy noise --rounds 10 --mu 1 --epochs 3 --max-participations 3
privacy spent --rounds 10
privacy spent --rounds 10 --std 0
privacy compare --rounds 10
privacy compare --rounds 10 --mu 1 --algorithm no-such
privacy convert
privacy convert --mu 1 --epsilon 1
privacy convert --mu 1 --delta 1
privacy selection
""".strip().splitlines()
_UNWANTED: dict[str, dict[str, Any]] = {
    "a longer clip": {"algorithm__clip": 2.0**21},
    "a tiny clip": {"algorithm__clip": 2.0**-50},
    "more rounds": {"federation__rounds": 201},
    "zero-out": {"privacy__relation": "zero-out"},
    "a person": {"privacy__unit": "user", "privacy__records": 2},
    "more than the budget": {"privacy__rho": 100.0},
    "no noise": {"privacy": {"mode": "none", "relation": "replace-one"}},
    "a trusted server": {"algorithm__trust": "trusted"},
    "masks": {"algorithm__trust": "secure-aggregation"},
    "another model": {"model": {"name": "mlp"}},
    "a regression": {"model": {"name": "least-squares"}, "data": {"name": "linear-regression"}},
    "sampled rounds": SECRET,
    "evaluations": {"evaluation": {"records": 30, "mu": 1.0}},
    "noise that has to be fitted": {
        "algorithm": {"name": "dp-ftrl", "mechanism": "auto", "clip": 1.0, "step": 0.1},
        "privacy": {"relation": "replace-one", "mu": 1.0},
    },
    **{name: overrides for name, (overrides, _) in UNACCOUNTABLE.items()},
}


def refusals(piece: int, pieces: int, wanted: Wanted) -> Entries:
    """What scenarios, policies, guards and commands refuse, word by word; what they accept is told as accepted."""

    def named() -> Iterator[tuple[str, Callable[[], str]]]:
        for name, tree in _keys():
            yield f"scenario/{name}", lambda t=tree: _refused(t)
        for key, bad in itertools.product([*_policy_keys(), "no_such_key"], _BAD_POLICY):
            yield f"policy/{key} = {bad}", lambda k=key, b=bad: _policy(k, b)
        for name, overrides in _UNWANTED.items():
            trust = overrides.get("algorithm__trust", "untrusted")
            rest = {key: value for key, value in overrides.items() if key != "algorithm__trust"}
            yield f"guard/{name}", lambda t=trust, o=rest: asked(t, o, [1], budget=4.0)
        for rounds in ([2], [1, 3], [0], [-1], [9], [1, 1, 2, 1]):
            yield f"guard/rounds {rounds}", lambda r=rounds: asked("untrusted", {}, r, budget=4.0)
        for words in _COMMANDS:
            yield f"command/{words}", lambda w=words: command(*w.split())

    return mine(named(), piece, pieces, wanted)


def _refused(tree: Mapping[str, Any]) -> str:
    said = told(lambda: run_of(tree, "vectorized"))
    return "accepted\n" if said.startswith("{") else said


def _policy_keys() -> list[str]:
    return ["silo", "shard", "classes", "ledger", "mark", "socket", "identity", "peers", "group", "allow.relation",
            "allow.unit", "allow.trust", "allow.clip", "allow.least_clip", "allow.rounds", "allow.budget",
            "allow.slack", "allow.slack_per_run", "allow.silos", "allow.query", "allow.dimension", "allow.models",
            "allow.open_runs", "allow.tick", "allow.runs", "allow.noise_free", "allow.no_such_key",
            "evaluation.budget", "evaluation.runs", "evaluation.evaluations"]  # fmt: skip


def _policy(dotted: str, bad: str) -> str:
    """What `fedpriv silo init` says of a policy with one bad value."""
    path = write_policy(Path("silo"), *random_records(4))
    head, allow = path.read_text(encoding="utf-8").split("[allow]\n")
    section, _, key = dotted.rpartition(".")
    line = f"{key} = {bad}\n"
    kept = {name: re.sub(rf"(?m)^{key} = .*\n", "", text) for name, text in (("", head), ("allow", allow))}
    more = f"[evaluation]\n{line}" if section == "evaluation" else ""
    top, bounds = (kept[""] + line, allow) if not section else (head, kept["allow"] + line if not more else allow)
    path.write_text(f"{top}[allow]\n{bounds}{more}", encoding="utf-8")
    with known_secrets():
        return command("silo", "init", str(path))
