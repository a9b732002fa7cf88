"""A stock Flower app on MNIST beside itself with Opacus in the client, and with the silos' guards in its place.

The same network, records, rounds, clip and step for all, FedAvg over three silos of 4,000 images, three server
rounds of an epoch each; noise for (ε, 10^-5) of each silo's records against the server.  Contenders take turns, in
one process as Flower's simulation runs them, and once as SuperNodes.  `make bench-peers` makes the environment in
which they run; root needs FEDPRIV_ALLOW_ROOT=1.

    python -m benchmarks existing_app
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EPSILONS, SEEDS, STEP, TRIALS = (3.0, 8.0), (0, 1, 2), 2.0, 2
WHO = {
    "stock": "stock, no privacy",
    "opacus": "Opacus 1.6.0 in the client",
    "guard": "the guard, secret participation",
    "guard-fixed": "the guard, public order",
}
_ROOT = Path(__file__).resolve().parents[1]
_PYTHON = _ROOT / ".venv-opacus" / "bin" / "python"


def run() -> None:
    if not _PYTHON.exists():
        print("no environment with Opacus here: make bench-peers")
        return
    found: dict[tuple[str, float], list[dict[str, float]]] = {}
    loads = [os.getloadavg()[0]]
    for seed in SEEDS:
        for epsilon in EPSILONS:
            for who in WHO:
                key = who, 0.0 if who == "stock" else epsilon
                if who == "stock" and len(found.get(key, [])) > SEEDS.index(seed):
                    continue  # it has no ε
                found.setdefault(key, []).append(_point("train", who, epsilon, STEP, seed))
                loads.append(os.getloadavg()[0])
    _accuracies(found)
    _seconds(found)
    print(f"\nseeds {SEEDS}; step {STEP}; load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores\n")
    _lies(_point("lies", EPSILONS[0], STEP, TRIALS), EPSILONS[0])
    _supernodes()


def _point(*words: object) -> Any:
    command = [str(_PYTHON), "-m", "benchmarks.existing_app_point", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{' '.join(map(str, words))} failed: {last}")
    found = done.stdout.splitlines()[-1]
    print(*words, found, file=sys.stderr)  # it takes minutes
    return json.loads(found)


def _accuracies(found: dict[tuple[str, float], list[dict[str, float]]]) -> None:
    print("Test accuracy in percent, mean ± sample standard deviation (each seed).\n")
    print("| who | " + " | ".join(f"ε = {epsilon:g}" for epsilon in EPSILONS) + " |")
    print("|---|" + "---:|" * len(EPSILONS))
    for who, title in WHO.items():
        entries = []
        for epsilon in EPSILONS:
            several = [100.0 * each["accuracy"] for each in found[who, 0.0 if who == "stock" else epsilon]]
            seeds = ", ".join(f"{value:.1f}" for value in several)
            spread = f" ± {statistics.stdev(several):.1f}" if len(several) > 1 else ""
            entries.append(f"{statistics.mean(several):.1f}{spread} ({seeds})")
        print(f"| {title} | {' | '.join(entries)} |")


def _seconds(found: dict[tuple[str, float], list[dict[str, float]]]) -> None:
    def median(who: str, key: str) -> float:
        return statistics.median(run[key] for (name, _), runs in found.items() if name == who for run in runs)

    print("\nSeconds of a server round with all silos one after another, and of one silo's ten steps; medians.\n")
    print("| who | per round | × Opacus | per silo |")
    print("|---|---:|---:|---:|")
    for who, title in WHO.items():
        ratio = median(who, "round") / median("opacus", "round")
        print(f"| {title} | {median(who, 'round'):.1f} | {ratio:.1f} | {median(who, 'silo'):.1f} |")


def _supernodes() -> None:
    """The same training and the same lies where a SuperLink, a SuperNode a silo and the guards are processes."""
    print(f"\nAs SuperNodes, ε = {EPSILONS[0]:g}, one run each.\n")
    print("| who | accuracy | seconds a round | a model of NaN | round 1 twice | of twice the rounds |")
    print("|---|---:|---:|---|---|---|")
    for who in ("opacus", "guard"):
        run = _point("deployed", who, EPSILONS[0], STEP, SEEDS[0])
        lies = _point("lies-deployed", who, EPSILONS[0], STEP)
        refused, same = lies["nan"] or "trains on it", "the same bytes" if lies["same"] else "another answer"
        told = f"answers {lies['answered']}" + (f", then: {lies['reason']}" if lies["reason"] else "")
        print(f"| {WHO[who]} | {100 * run['accuracy']:.1f} | {run['round']:.0f} | {refused} | {same} | {told} |")


def _lies(told: dict[str, Any], epsilon: float) -> None:
    opacus, guard = told["opacus"], told["guard"]

    def spent(lie: str) -> str:
        return f"ε = {opacus[lie]['epsilon']:.1f} of one silo by its own accountant, ε = {epsilon:g} was meant"

    def yes(value: bool, one: str, other: str) -> str:
        return one if value else other

    rows: Sequence[tuple[str, str, str]] = (
        (
            "a model of NaN",
            yes(opacus["nan"]["answered"], "trains on it: an epoch is spent for nothing", "refuses"),
            yes(guard["nan"]["answered"], "trains on it", f"refuses, nothing is spent: {guard['nan']['reason']}"),
        ),
        (
            "the same round twice",
            yes(opacus["twice"]["same"], "the same bytes", "another answer: their mean has less noise"),
            yes(guard["twice"]["same"], "the same bytes, charged once", "another answer"),
        ),
        (
            "twice the rounds",
            f"answers {opacus['more']['answered']}: {spent('more')}",
            f"answers {guard['more']['answered']}, and no more",
        ),
        (
            "a scaled model that overflows for one record only",
            f"tells whether the record is there in {100 * opacus['canary']:.0f} % of {2 * TRIALS} silos",
            f"{100 * guard['canary']:.0f} %, a coin's",
        ),
    )
    print("| the server sends | Opacus in the client | the guard |")
    print("|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
