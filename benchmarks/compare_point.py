"""One measurement for `benchmarks.compare`, with whatever fedpriv is on the import path: seconds, as JSON.

It uses what fedpriv promises to keep, so that older commits can be measured with it.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _run(engine: str, **keys: Any) -> Callable[[], float]:
    """Seconds that the cells of a small scenario took, imports and loading left out."""

    def seconds() -> float:
        import fedpriv

        with tempfile.TemporaryDirectory() as folder:
            results = fedpriv.run(_scenario(**keys), engine=engine, out=Path(folder) / "run")
        return sum(cell.wall_seconds for cell in results.cells)

    return seconds


def _scenario(silos: int, rounds: int, trust: str, seeds: int) -> dict[str, Any]:
    return {
        "name": "compare",
        "data": {"name": "synthetic"},
        "federation": {"silos": silos, "rounds": rounds},
        "algorithm": {"name": "dp-mu2-fl", "trust": trust, "diameter": 0.1},
        "privacy": {"relation": "replace-one", "rho": 4.0},
        "run": {"evaluations": 2},
        "sweep": {"seeds": seeds},
    }


def _command(*words: str) -> Callable[[], float]:
    """Seconds of a command of fedpriv's, all of it."""

    def seconds() -> float:
        started = time.perf_counter()
        call = f"import sys; sys.argv = ['fedpriv', *{list(words)!r}]; from fedpriv.cli import main; main()"
        subprocess.run([sys.executable, "-c", call], check=True, capture_output=True)
        return time.perf_counter() - started

    return seconds


POINTS: dict[str, Callable[[], float]] = {
    "help": _command("--help"),
    "convert": _command("privacy", "convert", "--mu", "1"),
    "vectorized-1": _run("vectorized", silos=1, rounds=1000, trust="trusted", seeds=3),
    "vectorized-20": _run("vectorized", silos=20, rounds=100, trust="trusted", seeds=3),
    "untrusted-20": _run("vectorized", silos=20, rounds=100, trust="untrusted", seeds=3),
    "inprocess-20": _run("inprocess", silos=20, rounds=60, trust="untrusted", seeds=1),
}


def main() -> None:
    point = POINTS[sys.argv[1]]
    before = _processor()
    wall = point()
    print(json.dumps({"wall": wall, "processor": _processor() - before}))


def _processor() -> float:
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


if __name__ == "__main__":
    main()
