"""A table of 10^6 rows and 30 columns, inspected and run for 50 rounds: processor seconds and the peak of memory.

Each command is a process of its own, start-up and torch included.  `python -m benchmarks.large_table 100000` takes
other than a million rows.
"""

import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory import peak

_MB = 1e6


def write(path: Path, rows: int) -> None:
    """Twenty columns of numbers with three decimals, six of whole numbers, three of words, and a target."""
    import pyarrow
    from pyarrow import csv

    draw = np.random.default_rng(0)
    columns = {f"x{j}": np.round(draw.standard_normal(rows), 3) for j in range(20)}
    columns |= {f"i{j}": draw.integers(0, 100, rows) for j in range(6)}
    words = np.array(["red", "green", "blue", "other"])
    columns |= {f"w{j}": words[draw.integers(0, 4, rows)] for j in range(3)}
    ill = columns["x0"] + columns["x1"] + draw.standard_normal(rows) > 0
    columns["y"] = np.array(["no", "yes"])[ill.astype(int)]
    csv.write_csv(pyarrow.table(columns), path, csv.WriteOptions(quoting_style="none"))


def measure(arguments: list[str]) -> None:
    """Run one command here, or import what runs do, and say what it took."""
    from fedpriv.cli import main

    sys.argv = ["fedpriv", *arguments]
    try:
        main() if arguments else importlib.import_module("fedpriv.cli.run")
    finally:
        print(f"measured: {time.process_time():.1f} {peak() / _MB:.0f}")


def run(rows: str = "1000000") -> None:
    with tempfile.TemporaryDirectory(prefix="fedpriv-") as name:
        folder = Path(name)
        write(folder / "big.csv", int(rows))
        size = (folder / "big.csv").stat().st_size / _MB
        print(f"{int(rows):,} rows x 30 columns, {size:.0f} MB\n")
        print("| command | processor s | peak, MB | x the file |\n|---|---|---|---|")
        changes = {"data.table.public": "true", "federation.rounds": "50", "federation.epochs": "50"}
        of_run = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
        for title, arguments in (
            ("data inspect --out", ["data", "inspect", "big.csv", "--target", "y", "--out", "made"]),
            ("run, 50 rounds of all records", ["run", "made/scenario.toml", *of_run, "--out", "out"]),
            ("import of what a run imports", []),
        ):
            module = [sys.executable, "-m", "benchmarks.large_table", "--", *arguments]
            paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
            asked: dict[str, Any] = {"cwd": folder, "env": {**os.environ, **paths}}
            said = subprocess.run(module, **asked, capture_output=True, text=True, check=True)
            seconds, memory = said.stdout.split("measured: ")[1].split()
            print(f"| `{title}` | {seconds} | {memory} | {float(memory) / size:.1f} |", flush=True)


if __name__ == "__main__":
    measure(sys.argv[2:]) if sys.argv[1:2] == ["--"] else run(*sys.argv[1:])
