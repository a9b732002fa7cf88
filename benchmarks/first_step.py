"""What a first step does to advised settings: noisy means and deviations for a tenth of the budget, or none.

    python -m benchmarks.first_step [--seeds N]

Tables whose columns have public ranges, untrusted at delta = 1e-5, as `fedpriv advise` writes them; with a first
step also a third and three times their step, since standardized columns are of another length.  Mean and standard
error over seeds (noise, and the partition where it is drawn) of the accuracy, of diabetes R².
"""

import argparse
import math
import statistics
from typing import Any

import fedpriv
from benchmarks.advise import facts_of
from benchmarks.federations import FEDERATIONS
from fedpriv.addons.begin.advise import advise_on_facts

_TABLES = ("wine, 4 silos", "breast cancer, 4 silos", "diabetes, 4 silos", "four hospitals")
_EPSILONS = (1.0, 3.0, 8.0)
_SHARE = 0.1
_STEPS = (1.0, 1.0 / 3.0, 3.0)


def scores(tree: dict[str, Any], metric: str, seeds: int, share: float, factor: float) -> list[float]:
    """Of the last models, a seed each."""
    scale = {"scale": {"share": share}} if share else {}
    changed = tree | {
        "data": tree["data"] | scale,
        "algorithm": tree["algorithm"] | {"step": tree["algorithm"]["step"] * factor},
        "run": {"evaluations": 1, "metrics": ["r2"] if metric == "test_r2" else []},
        "sweep": {"seeds": seeds},
    }
    return [cell.metrics[metric] for cell in fedpriv.run(changed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    print("| table | ε | no first step | first step | a third of the step | three times the step |")
    print("|---|---|---|---|---|---|")
    for name in _TABLES:
        federation = FEDERATIONS[name]()
        scale, digits = (1.0, 2) if federation.metric == "test_r2" else (100.0, 1)
        for epsilon in _EPSILONS:
            tree = advise_on_facts(facts_of(federation, epsilon), federation.data).tree
            told = []
            for share, factor in ((0.0, 1.0), *((_SHARE, factor) for factor in _STEPS)):
                found = [scale * score for score in scores(dict(tree), federation.metric, seeds, share, factor)]
                error = statistics.stdev(found) / math.sqrt(seeds)
                told.append(f"{statistics.fmean(found):.{digits}f} ± {error:.{digits}f}")
            print(f"| {name} | {epsilon:g} | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main()
