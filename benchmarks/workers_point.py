"""One measurement for `benchmarks.workers`, in a process of its own: seconds, and what was computed, as JSON."""

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.engines.workers import Workers
from fedpriv.scenario.load import Scenario, parse_scenario
from fedpriv.study.sweep import RunOptions, run_sweep

GROUPS = 4


class _Clock(RunObserver):
    """From the first progress to the last result: what starting takes is told apart."""

    def __init__(self) -> None:
        self.first = self.last = 0.0

    def advanced(self, rounds: int) -> None:
        self.first = self.first or time.perf_counter()

    def finished(self, place: int, finished: CellOutcome) -> None:
        self.last = time.perf_counter()


def scenario(silos: int, rounds: int) -> Scenario:
    """Equal groups of three cells: they differ in their mechanisms' lengths by one round each."""
    return parse_scenario(
        {
            "name": "workers",
            "data": {"name": "mnist"},
            "federation": {"silos": silos},
            "algorithm": {"name": "dp-mu2-fl", "trust": "untrusted", "diameter": 0.1},
            "privacy": {"relation": "replace-one", "rho": 4.0},
            "run": {"evaluations": 2},
            "sweep": {"federation.rounds": [rounds + more for more in range(GROUPS)], "seeds": 3},
        },
        "workers",
    )


@contextmanager
def _workers(how: str) -> Iterator[Workers | None]:
    """ "0": none; a number of processes; "cluster": two nodes of one processor each, gone afterwards."""
    if how != "cluster":
        yield Workers(int(how)) if how != "0" else None
        return
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(2):
            node = cluster.add_node(num_cpus=1, object_store_memory=2**27, include_dashboard=False)
        assert node is not None
        yield Workers(address=cluster.address)
    finally:
        cluster.shutdown()


def main(words: Sequence[str]) -> None:
    how, silos, rounds = words[0], int(words[1]), int(words[2])
    clock, started = _Clock(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, _workers(how) as workers:
        target, cells = Path(folder) / "run", scenario(silos, rounds)
        out = run_sweep(cells, RunOptions(out=target, workers=workers), [clock])
        whole = time.perf_counter() - started
        digest = hashlib.sha256(_without_times(out).encode()).hexdigest()
    print(json.dumps({"computing": clock.last - clock.first, "whole": whole, "results": digest}))


def _without_times(folder: Path) -> str:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    del results["date"]
    for cell in results["cells"]:
        del cell["wall_seconds"]
    return json.dumps(results, sort_keys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
