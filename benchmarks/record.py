"""What every scenario gives at reduced size, recorded before the code is moved and compared after.

    python -m benchmarks.record FOLDER            run, and write FOLDER/ENGINE/SCENARIO.json
    python -m benchmarks.record --compare A B     exit code 1 unless both say the same

Times, versions and what an engine says of itself are left out; every other key and digit counts, of results.json,
history.jsonl and the models.  Keys that were renamed on purpose stand in fedpriv/privacy/renamed.py.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fedpriv
from benchmarks.reduced import SCENARIOS, reduced
from fedpriv.privacy.ledger import as_data, from_data
from fedpriv.privacy.renamed import RENAMED
from fedpriv.scenario import resolve_cell

_LEFT_OUT = frozenset({"wall_seconds", "versions", "rerun", "date"})
_TINY = {
    "data.name": "synthetic",
    "federation.silos": 4,
    "federation.rounds": 8,
    "seeds": [0],
}
_TRUSTS = ("untrusted", "trusted", "secure-aggregation")


def recorded(folder: Path) -> dict[str, Any]:
    """A run's results, history and models as plain data without what differs from run to run."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    models = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((folder / "models").iterdir())
    }
    whole: dict[str, Any] = _without({"results": results, "history": history})
    return {**whole, "models": models}


def _without(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(entry) for key, entry in value.items() if key not in _LEFT_OUT}
    return [_without(entry) for entry in value] if isinstance(value, list) else value


def renamed(value: Any) -> Any:
    """`value` with new names for the keys of RENAMED; releases and scenarios as this version writes them."""
    if isinstance(value, Mapping) and "owner" in value:
        value = json.loads(json.dumps(as_data(from_data(value))))
    if isinstance(value, Mapping) and "data" in value.get("scenario", ()):
        value = {**value, "scenario": resolve_cell(value["scenario"], "recorded").canonical()}
    if isinstance(value, Mapping):
        return {RENAMED.get(key, key): renamed(entry) for key, entry in value.items()}
    return [renamed(entry) for entry in value] if isinstance(value, list) else value


def runs() -> Iterator[tuple[str, str, Path, Mapping[str, Any]]]:
    """(engine, name, scenario, overrides) of everything that is recorded."""
    for path in sorted(SCENARIOS.glob("*.toml")):
        yield "vectorized", path.stem, path, reduced(path)
    for engine in ("inprocess", "ray"):
        for trust in _TRUSTS:
            small = {**_TINY, "algorithm.trust": trust, "privacy.rho": 4.0}
            yield engine, f"quickstart-{trust}", SCENARIOS / "quickstart.toml", small


def record(folder: Path, engines: Sequence[str]) -> None:
    for engine, name, path, overrides in runs():
        if engine not in engines:
            continue
        with tempfile.TemporaryDirectory() as out:
            fedpriv.run(path, set=dict(overrides), engine=engine, out=Path(out) / "run")
            text = json.dumps(recorded(Path(out) / "run"), indent=1, sort_keys=True)
        target = folder / engine / f"{name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n", encoding="utf-8")
        print(f"{engine} {name}", flush=True)


def differences(before: Path, after: Path) -> list[str]:
    """One line for each recording that is missing in a folder or is not the same in both."""
    names = sorted({path.relative_to(root) for root in (before, after) for path in root.glob("*/*.json")})
    lines = []
    for name in names:
        if not ((before / name).exists() and (after / name).exists()):
            lines.append(f"{name}: only in one of both")
            continue
        one, other = (json.loads((root / name).read_text(encoding="utf-8")) for root in (before, after))
        lines += [f"{name}{where}" for where in _differing(renamed(one), other, "")]
    return lines


def _differing(one: Any, other: Any, where: str) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            if key not in one or key not in other:
                yield f"{where}.{key}: only in one of both"
            else:
                yield from _differing(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from _differing(*pair, f"{where}[{place}]")
    elif one != other:
        yield f"{where}: {one!r} and {other!r}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--compare", action="store_true", help="compare two recordings")
    parser.add_argument("--engines", default="vectorized,inprocess,ray")
    given = parser.parse_args(arguments)
    if not given.compare:
        record(given.folder[0], given.engines.split(","))
        return 0
    lines = differences(*given.folder)
    print(*lines[:50], sep="\n")
    print(f"{len(lines)} differences")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
