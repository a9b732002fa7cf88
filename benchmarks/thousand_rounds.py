"""Memory, descriptors and files of a deployment's processes over 1,000 rounds of one run, and how they grow.

    python -m benchmarks.thousand_rounds [ROUNDS]      nine minutes on one idle core

A SuperLink and two silos, each a guard and a SuperNode, train softmax regression of 10 numbers (a table that is
made here) by DP-SGD in 1,000 rounds, or in ROUNDS.  Every 50th round has a row in the first table.  The second
table has the slope of each figure from a fifth of the rounds on, when everybody has made plans and filled caches,
up to the last row but one: least squares, and a 95 % interval by Student's t, which takes deviations from the line
for independent.  They are not, so that intervals are somewhat narrow.  Root has to set FEDPRIV_ALLOW_ROOT=1.

Memory is RSS, of guards and SuperNodes the sum over silos; a SuperNode's supervisor and server count as what they
belong to.  `ledger` is that of silo 0 with SQLite's journal, `mark` its mark, `trail` its guard's log.
"""

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from scipy.stats import t as student

from benchmarks.deployment import _role_of
from fedpriv.claims.outcome import RunObserver
from fedpriv.engines.table import make_engine
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import load_scenario
from fedpriv.silo.policy import read_policy

SILOS, RECORDS, EVERY = 2, 60, 50
ROLES = ("guard", "SuperNode", "SuperLink", "server", "run")
FILES = ("ledger", "mark", "trail")
SCENARIO = """name = "thousand"
[data]
name = "records.csv"
partition = "site"
[data.table]
public = true
target = "outcome"
classes = ["well", "ill"]
site = "hospital"
sites = ["0", "1"]
test_share = 0.25
[data.table.columns]
a = { range = [0.0, 1.0] }
b = { range = [0.0, 1.0] }
c = { range = [0.0, 1.0] }
d = { range = [0.0, 1.0] }
[model]
name = "softmax-regression"
feature_norm = 2.0
[federation]
silos = 2
rounds = ROUNDS
epochs = ROUNDS
[algorithm]
name = "dp-sgd"
trust = "untrusted"
clip = 1.0
step = 1.0
[privacy]
relation = "zero-out"
epsilon = 4.0
delta = 1e-5
[run]
evaluations = 2
"""


class Growth(RunObserver):
    """Observer that notes memory, descriptors and files at every 50th round."""

    def __init__(self) -> None:
        self.rounds, self.next_round = 0, EVERY
        self.rows: list[dict[str, float]] = []

    def advanced(self, rounds: int) -> None:
        self.rounds += rounds
        if self.rounds >= self.next_round:
            self.next_round = self.rounds - self.rounds % EVERY + EVERY
            self.rows.append({"round": self.rounds, **measure()})
            print_row(self.rows[-1], title=len(self.rows) == 1)


def measure() -> dict[str, float]:
    """Return MB and descriptors by role, and kB by file of silo 0."""
    figures: dict[str, float] = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error, OSError):
            role = "run" if process.pid == psutil.Process().pid else _role_of(process)
            for name, value in (("MB", process.memory_info().rss / 1e6), ("fd", process.num_fds())):
                figures[f"{name} {role}"] = figures.get(f"{name} {role}", 0.0) + value
            if role == "guard" and (policy := Path(process.cmdline()[-1])).parent.name == "silo-0":
                figures |= file_sizes(policy)
    return figures


def file_sizes(policy_file: Path) -> dict[str, float]:
    policy = read_policy(policy_file)
    files = {
        "ledger": [policy.ledger, policy.ledger.with_name(f"{policy.ledger.name}-journal")],
        "mark": [policy.mark_path],
        "trail": [policy_file.with_name("guard.log")],
    }
    return {
        f"kB {name}": sum(path.stat().st_size for path in paths if path.exists()) / 1e3
        for name, paths in files.items()
    }


def columns() -> list[str]:
    return [f"{name} {role}" for name in ("MB", "fd") for role in ROLES] + [f"kB {name}" for name in FILES]


def print_row(row: dict[str, float], title: bool) -> None:
    if title:
        print(f"| round | {' | '.join(columns())} |\n|{'---|' * (1 + len(columns()))}")
    values = " | ".join(f"{row.get(name, np.nan):.{0 if name.startswith('fd') else 1}f}" for name in columns())
    print(f"| {row['round']:.0f} | {values} |", flush=True)


def slope(rounds: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Return the slope per 1,000 rounds, and half the width of its 95 % interval."""
    x = rounds / 1000.0 - (rounds / 1000.0).mean()
    by_least_squares = float(x @ values / (x @ x))
    rest = values - values.mean() - by_least_squares * x
    free = len(values) - 2
    return by_least_squares, float(student.ppf(0.975, free) * np.sqrt(rest @ rest / free / (x @ x)))


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generator = np.random.default_rng(1)
        values, site = generator.random((SILOS * RECORDS, 4)).round(3), np.repeat(range(SILOS), RECORDS)
        rows = [
            f"{where},{','.join(map(str, row))},{'ill' if row.sum() > 2.0 else 'well'}"
            for where, row in zip(site, values, strict=True)
        ]
        (folder / "records.csv").write_text("\n".join(["hospital,a,b,c,d,outcome", *rows]) + "\n")
        (folder / "thousand.toml").write_text(SCENARIO.replace("ROUNDS", str(rounds)))
        (point,) = load_scenario(folder / "thousand.toml", []).points
        load_task(point.cell)
        growth = Growth()
        for _ in make_engine("deployment", folder / "run")([point.cell], growth):
            pass
    table = {name: np.array([row.get(name, np.nan) for row in growth.rows]) for name in ("round", *columns())}
    late = (table["round"] >= rounds / 5) & (table["round"] < rounds)  # as the run ends, its ledger shrinks
    print("\n| figure | before the end | slope per 1,000 rounds | 95 % |\n|---|---|---|---|")
    for name in columns():
        by, half = slope(table["round"][late], table[name][late])
        print(f"| {name} | {table[name][late][-1]:.1f} | {by:+.2f} | {by - half:+.2f} to {by + half:+.2f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
