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

import numpy as np
import torch

import fedpriv
from benchmarks.record import as_text, digest, recorded
from benchmarks.reduced import SCENARIOS, reduced
from fedpriv.cli import main as command_line
from tests.attacks.guards import KEPT_STATE, cards, guard_for, random_records, scenario, write_policy
from tests.clients.evaluated import MODEL, SCENARIO, evaluator, write_tested
from tests.clients.guarded import UNACCOUNTABLE, guard_of
from tests.conftest import small_tree
from tests.data.tables import rows as table_rows
from tests.data.tables import table_tree, write_csv
from tests.engines.test_every_mechanism import NAMES, NOISY, VARIANTS
from tests.engines.test_every_row import SCHEDULES, SETTINGS, tree_of

Entries = Iterator[tuple[str, str]]
Wanted = "re.Pattern[str]"
TRUSTS = ("untrusted", "trusted", "secure-aggregation", "curator")


def _mine(named: Iterator[tuple[str, Callable[[], str]]], piece: int, pieces: int, wanted: Wanted) -> Entries:
    """Every `pieces`-th entry that is wanted, computed in an empty folder of its own."""
    chosen = [(name, make) for name, make in named if wanted.search(name)]
    for number, (name, make) in enumerate(chosen[piece::pieces]):
        folder = Path(f"entry-{number}")
        folder.mkdir()
        with contextlib.chdir(folder):
            yield name, _told(make)
        shutil.rmtree(folder)


def _told(make: Callable[[], str]) -> str:
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


def _run(tree: Mapping[str, Any], engine: str) -> str:
    """What a run of the scenario writes."""
    fedpriv.run({**tree, "name": "recorded"}, engine=engine, out="run", progress=False)
    return recorded(Path("run"))


def _small(tree: Mapping[str, Any], engine: str) -> Callable[[], str]:
    def make() -> str:
        _problem()
        return _run(tree, engine)

    return make


# Rows and mechanisms


def rows(piece: int, pieces: int, wanted: Wanted) -> Entries:
    """Every row × participation × trust: integers and floats in process, floats by replicates, and without noise."""

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

    return _mine(named(), piece, pieces, wanted)


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

    return _mine(named(), piece, pieces, wanted)


# Guards


@contextlib.contextmanager
def _known_secrets() -> Iterator[None]:
    """Keys and names from a counter instead of the system: replies of guards are then functions of what is asked."""
    real, counter = (secrets.token_bytes, secrets.token_hex), itertools.count()

    def known(count: int | None = None) -> bytes:
        seed = next(counter).to_bytes(8, "big")
        return b"".join(sha256(seed + bytes([block])).digest() for block in range((count or 32) // 32 + 1))[
            : count or 32
        ]

    secrets.token_bytes, secrets.token_hex = known, lambda count=None: known(count).hex()  # type: ignore[assignment]
    try:
        yield
    finally:
        secrets.token_bytes, secrets.token_hex = real


def _query(size: int, t: int) -> torch.Tensor:
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
        with _known_secrets():
            guard = guard_for(Path("silo"), *random_records(), **allow)
            for t in rounds:
                if isinstance(t, str):
                    del guard
                    guard = guard_of(Path("silo/silo-0.toml"))
                    continue
                query = _query(size, t).to(kind)
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
_SECRET = {
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
                yield f"{name}/{trust}/{kind}", lambda o=overrides, t=trust: _asked(t, o, _WHOLE)
            yield f"{name}/{trust}/restarted", lambda o=KEPT_STATE[name], t=trust: _asked(t, o, _RESTARTED)
            patient = {**KEPT_STATE[name], **_PATIENT}
            yield f"{name}/{trust}/absences", lambda o=patient, t=trust: _asked(t, o, [1, 2, 5, "restart", 6, 8])
        for sampling, trust in itertools.product(("poisson", "allocation"), TRUSTS[:3]):
            drawn = {**_SECRET, "federation": {**_SECRET["federation"], "sampling": sampling}}
            yield (
                f"{sampling}/{trust}",
                lambda o=drawn, t=trust: _asked(t, o, _WHOLE, relation="zero-out", slack=1e-5, budget=1e3),
            )
        for trust in TRUSTS[:3]:
            yield (
                f"without noise/{trust}",
                lambda t=trust: _asked(
                    t, {"privacy": {"mode": "none", "relation": "replace-one"}}, _WHOLE, noise_free=True
                ),
            )
        yield "evaluation", _evaluation
        yield "first step and rounds", _first_step

    return _mine(named(), piece, pieces, wanted)


def _asked(trust: str, overrides: Mapping[str, Any], rounds: list[int | str], **allow: Any) -> str:
    return _transcript(scenario(trust, **overrides), rounds, **{"budget": 100.0, **allow})()


def _evaluation() -> str:
    with _known_secrets():
        path = write_tested(Path.cwd())
        guard = evaluator(path)
        replies = [guard.answer("run", SCENARIO, t, MODEL * t) for t in range(1, 5)]
    return "".join(f"{digest(reply.numpy().tobytes())}\n" for reply in replies)


def _scaled_tree() -> dict[str, Any]:
    tree = table_tree(write_csv(Path("t.csv"), table_rows()))
    tree["data"]["scale"] = {"share": 0.25}
    return tree


def _first_step() -> str:
    """The policies of `fedpriv data split`, and the run that a simulation makes of the same scenario on integers."""
    tree = _scaled_tree()
    tree["run"] = {**tree.get("run", {}), "arithmetic": "integers"}
    return _run(tree, "inprocess")


# Commands


def _command(*arguments: str) -> str:
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
_CHOICES = [["--mu", "1", "--mean", "10"], ["--mu", "0.5", "--mean", "40", "--shape", "1"]]


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
            yield f"{name}/json", lambda w=words: _command("privacy", *w, "--json")
            yield f"{name}/text", lambda w=words: _command("privacy", *w)

    return _mine(both(), piece, pieces, wanted)


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
        "first step": _scaled_tree,
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

    for name, text in _mine(named(), piece, pieces, wanted):
        views = json.loads(text) if text.startswith("{") else {"run": text}
        for view, shown in views.items():
            yield f"{name}/{view}", shown


def _viewed(tree: Mapping[str, Any]) -> str:
    shown = {"run": _run(tree, "inprocess")}
    _stand_still(Path("run/results.json"))
    for view, words in _VIEWS.items():
        shown[view] = _command(*words)
    shown["plots"] = "".join(f"{path.name}\n" for path in sorted(Path("run/plots").iterdir()))
    page = Path("run/report.html").read_text(encoding="utf-8")
    shown["page"] = re.sub(r"(?=<)", "\n", page)
    for number, chart in enumerate(re.findall(r"<svg.*?</svg>", page, re.DOTALL)):
        shown[f"chart-{number}"] = re.sub(r"(?=<)", "\n", chart)
    return as_text(shown)


def _stand_still(path: Path) -> None:
    """Put fixed values where a run writes times, dates and versions."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r'("wall_seconds": )[0-9.e+-]+', r"\g<1>1.0", text)
    text = re.sub(r'("date": ")[^"]*', r"\g<1>2000-01-01 00:00 UTC", text)
    text = re.sub(r'("(?:python|torch|numpy|flwr|cryptography|platform)": ")[^"]*', r"\g<1>0", text)
    path.write_text(text, encoding="utf-8")


# Refusals

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
_COMMANDS: list[tuple[str, ...]] = [
    ("run",), ("run", "no-such-scenario"), ("run", "quickstart", "--engine", "no-such"),
    ("run", "quickstart", "--set", "federation.silo=3"), ("run", "quickstart", "--set", "novalue"),
    ("run", "quickstart", "--workers", "0"), ("show", "no-such-run"), ("table", "no-such-run"),
    ("plot", "no-such-run"), ("report", "no-such-run"), ("compare", "a", "b"), ("audit", "no-such-scenario"),
    ("export", "no-such-run"), ("tune", "no-such-scenario"), ("list", "no-such"), ("init", ""), ("no-such-command",),
    ("data", "fetch", "no-such"), ("data", "inspect", "no-such.csv"), ("data", "split", "no-such.toml", "--out", "o"),
    ("silo", "init", "no-such.toml"), ("silo", "status", "no-such.toml"), ("silo", "run", "no-such.toml"),
    ("silo", "end", "no-such.toml", "run"), ("privacy", "ledger", "no-such-run"), ("privacy", "theorem", "no-such"),
    ("privacy", "noise"), ("privacy", "noise", "--rounds", "10"),
    ("privacy", "noise", "--rounds", "10", "--mu", "1", "--zcdp", "1"),
    ("privacy", "noise", "--rounds", "10", "--mu", "-1"), ("privacy", "noise", "--rounds", "0", "--mu", "1"),
    ("privacy", "noise", "--rounds", "10", "--epsilon", "1"), ("privacy", "noise", "--rounds", "10", "--mu", "nan"),
    ("privacy", "noise", "--rounds", "10", "--mu", "1", "--mechanism", "no-such"),
    ("privacy", "noise", "--rounds", "10", "--mu", "1", "--set", "no_such=1"),
    ("privacy", "noise", "--rounds", "10", "--mu", "1", "--trust", "no-such"),
    ("privacy", "noise", "--rounds", "10", "--mu", "1", "--sampling", "no-such"),
    ("privacy", "noise", "--rounds", "10", "--mu", "1", "--epochs", "3", "--max-participations", "3"),
    ("privacy", "spent", "--rounds", "10"), ("privacy", "spent", "--rounds", "10", "--std", "0"),
    ("privacy", "convert"), ("privacy", "convert", "--mu", "1", "--epsilon", "1"),
    ("privacy", "convert", "--mu", "1", "--delta", "1"), ("privacy", "selection"),
    ("privacy", "compare", "--rounds", "10"), ("privacy", "compare", "--rounds", "10", "--mu", "1", "--algorithm", "x"),
]  # fmt: skip
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
    "sampled rounds": _SECRET,
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
            yield f"guard/{name}", lambda t=trust, o=rest: _asked(t, o, [1], budget=4.0)
        for rounds in ([2], [1, 3], [0], [-1], [9], [1, 1, 2, 1]):
            yield f"guard/rounds {rounds}", lambda r=rounds: _asked("untrusted", {}, r, budget=4.0)
        for words in _COMMANDS:
            yield f"command/{' '.join(words)}", lambda w=words: _command(*w)

    return _mine(named(), piece, pieces, wanted)


def _refused(tree: Mapping[str, Any]) -> str:
    said = _told(lambda: _run(tree, "vectorized"))
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
    with _known_secrets():
        said = _command("silo", "init", str(path))
    return said.replace(str(Path.cwd()), "FOLDER")


# Other commands

_HELPED = ["", "run", "tune", "list", "init", "show", "compare", "table", "plot", "report", "audit", "export",
           "superlink", "supernode", "data", "data fetch", "data inspect", "data split", "privacy",
           "privacy compare", "privacy theorem", "privacy ledger", "privacy selection", "privacy convert",
           "privacy noise", "privacy spent", "silo", "silo init", "silo run", "silo status", "silo end"]  # fmt: skip
_LISTED = ["scenarios", "algorithms", "mechanisms", "data", "models"]


def commands(piece: int, pieces: int, wanted: Wanted) -> Entries:
    """Help, lists, what `init`, `data inspect` and `data split` write, and a silo's status."""

    def named() -> Iterator[tuple[str, Callable[[], str]]]:
        for words in _HELPED:
            yield f"help/{words}", lambda w=words: _command(*w.split(), "--help")
        for kind in _LISTED:
            yield f"list/{kind}", lambda k=kind: _command("list", k)
        yield "init", lambda: _command("init", "mine") + _files(Path("mine"))
        yield "data inspect", _inspected
        yield "data split/table", lambda: _split(table_tree(write_csv(Path("t.csv"), table_rows())))
        yield "data split/synthetic", lambda: _split(small_tree())
        yield "silo", _silo

    return _mine(named(), piece, pieces, wanted)


def _files(folder: Path) -> str:
    """Names and texts of all files; bytes as digests."""
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        kept = content.decode() if path.suffix in (".toml", ".py", ".md", ".ipynb") else digest(content)
        lines.append(f"== {path}\n{kept}\n")
    return "".join(lines)


def _inspected() -> str:
    write_csv(Path("t.csv"), table_rows())
    return _command("data", "inspect", "t.csv", "--out", "found") + _files(Path("found"))


def _split(tree: Mapping[str, Any]) -> str:
    """What `fedpriv data split` writes; shards by the digests of their arrays, since archives have dates."""
    Path("scenario.json").write_text(json.dumps(tree), encoding="utf-8")
    Path("scenario.toml").write_text(_toml(tree), encoding="utf-8")
    said = _command("data", "split", "scenario.toml", "--out", "silos")
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
    with _known_secrets():
        path = write_policy(Path("silo"), *random_records(), budget=10.0)
        said = _command("silo", "init", str(path))
        guard = guard_of(path)
        for run in ("first", "second"):
            guard.answer(run, scenario(), 1, _query(7850, 1))
        del guard
        said += _command("silo", "status", str(path)) + _command("silo", "end", str(path), "first")
        said += _command("silo", "status", str(path))
    return said.replace(str(Path.cwd()), "FOLDER")


def shipped(piece: int, pieces: int, wanted: Wanted) -> Entries:
    """The shipped scenarios at reduced size, as `fedpriv run` runs them."""

    def made(path: Path) -> str:
        fedpriv.run(path, set=reduced(path), out="run", progress=False)
        return recorded(Path("run"))

    named = ((path.stem, lambda p=path: made(p)) for path in sorted(SCENARIOS.glob("*.toml")))
    return _mine(named, piece, pieces, wanted)


PARTS: dict[str, Callable[[int, int, Wanted], Entries]] = {
    "rows": rows,
    "mechanisms": mechanisms,
    "guards": guards,
    "privacy": privacy,
    "reports": reports,
    "refusals": refusals,
    "commands": commands,
    "shipped": shipped,
}
