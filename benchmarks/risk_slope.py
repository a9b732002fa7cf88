"""How the excess risk of a run falls with the number of records: its exponent from each size to the next.

python -m benchmarks.risk_slope RUN_DIR

± is half of a 95 % interval over the seeds, by Student's t; a seed's exponent is from its own two runs.
"""

import math
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from fedpriv.study.results import Results, read_results

_SIZE = "federation.samples"


def exponents(results: Results) -> list[tuple[float, NDArray[np.float64], NDArray[np.float64]]]:
    """Of each size n: the excess risk of every seed, and its exponent in n since the size before."""
    sizes = [float(size) for size in results.axes[_SIZE]]
    risks = [
        np.array([cell["excess_risk"] for cell in results.cells if cell["point"][_SIZE] == size]) for size in sizes
    ]
    found = [(sizes[0], risks[0], np.full(len(risks[0]), math.nan))]
    for before, (size, risk) in enumerate(zip(sizes[1:], risks[1:], strict=True)):
        slopes = np.log(risk / risks[before]) / math.log(size / sizes[before])
        found.append((size, risk, slopes))
    return found


def main() -> None:
    print("| n | excess risk | exponent since the size before |\n|---|---|---|")
    for size, risk, slopes in exponents(read_results(Path(sys.argv[1]))):
        print(f"| {size:,.0f} | {_interval(risk, '.4f')} | {_interval(slopes, '.2f')} |")


def _interval(values: NDArray[np.float64], digits: str) -> str:
    if np.isnan(values).any():
        return ""
    half = float(student.ppf(0.975, len(values) - 1)) * np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{np.mean(values):{digits}} ± {half:{digits}}"


if __name__ == "__main__":
    main()
