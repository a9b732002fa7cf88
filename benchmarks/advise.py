"""What `fedpriv advise` writes, beside tuning, the best in hindsight, each silo alone, no privacy, and a constant.

    python -m benchmarks.advise [--only REGEX] [--epsilon ε] [--out FILE]     measure; rows are added to FILE
    python -m benchmarks.advise --table --out FILE              the table of docs/advise.md

All runs are untrusted at delta = 1e-5.  Accuracy is a share of all test records, R² that of `run.metrics`.

| column | meaning |
|---|---|
| advise | the scenario that `fedpriv advise` writes, mean over seeds (noise and partition) |
| tune | from that scenario, the best of 24 of its default grid on a tenth of the training records |
| oracle | the best of 40 settings by the mean over the same seeds on the test records: too good by its choice |
| alone | `fedpriv.addons.worth.worth`: each silo by itself, its score weighted by test records |
| no privacy | the same model fitted to all records, with a penalty by folds |
| constant | the largest class, or the mean, of the training records |
"""

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.federations import DEVELOPED, FEDERATIONS, Federation
from fedpriv.addons.begin.advise import Advice, Facts, advise_on_facts
from fedpriv.addons.tune.grids import choose_settings, hold_out, make_default_grid, make_trial
from fedpriv.addons.worth.worth import compute_references, find_linear_objective, fit_pooled_model
from fedpriv.claims.outcome import RunObserver
from fedpriv.data.named import load
from fedpriv.data.schema import TableSchema
from fedpriv.engines.table import make_engine
from fedpriv.plan.task import load_task
from fedpriv.scenario.data import DataSection
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell

EPSILONS = (0.1, 0.3, 1.0, 3.0, 8.0)
_TRIALS, _OF_ORACLE = 24, 10
_COLUMNS = ("advise", "tune", "oracle", "alone", "no privacy", "constant")


def facts_of(federation: Federation, epsilon: float, trust: str = "untrusted") -> Facts:
    """The public facts of a federation: of a table by its description, of images by their size."""
    schema: TableSchema | None = DataSection.model_validate(dict(federation.data)).table_schema
    dataset = load(federation.data["name"], None, schema if "table" in federation.data else None)
    count = len(dataset.train_labels)
    if federation.data.get("partition") == "site":
        assert dataset.sites is not None
        sizes = tuple(np.bincount(dataset.sites.train, minlength=federation.silos).tolist())
    else:
        sizes = (federation.records or count // federation.silos,) * federation.silos
    width = int(np.prod(dataset.train_images.shape[1:]))
    norm = federation.feature_norm if schema is None else schema.max_norm
    return Facts(sizes, width, dataset.class_count, epsilon, trust=trust, feature_norm=norm)


def _cell(advice: Advice, seed: int, algorithm: dict[str, Any] | None = None, rounds: int | None = None) -> Cell:
    tree = {**advice.tree, "seed": seed, "run": {"evaluations": 1, "metrics": _metrics(advice)}}
    tree["algorithm"] = {**tree["algorithm"], **(algorithm or {})}
    if rounds is not None:
        tree["federation"] = {**tree["federation"], "rounds": rounds, "epochs": rounds}
    return resolve_cell(tree, "benchmark")


def _metrics(advice: Advice) -> list[str]:
    return ["r2"] if advice.facts.classes == 0 else []


def _run(cells: Sequence[Cell], metric: str) -> list[float]:
    found = [0.0] * len(cells)
    for outcome in make_engine("vectorized")(cells, RunObserver()):
        found[outcome.index] = outcome.cell_outcome.metrics[metric]
    return found


def _means(cells: Sequence[Cell], metric: str, seeds: int) -> list[list[float]]:
    scores = _run(cells, metric)
    return [scores[start : start + seeds] for start in range(0, len(cells), seeds)]


def tuned(advice: Advice, metric: str, seeds: int) -> list[float]:
    """Scores of the setting that 24 trials choose on a tenth of the training records."""
    cell = _cell(advice, 100)
    held = hold_out(cell, None)
    (settings,) = choose_settings([make_default_grid(cell)], _TRIALS, np.random.default_rng(0))
    trials = _run([make_trial(cell, setting, held, (), 100) for setting in settings], metric)
    best = settings[int(np.argmax(trials))]
    own = {key.removeprefix("algorithm."): value for key, value in best.items()}
    return _run([_cell(advice, seed, own) for seed in range(seeds)], metric)


def oracle(advice: Advice, metric: str, seeds: int) -> list[float]:
    """Scores of the best of 40 settings: two clips, two numbers of rounds, ten travels from 1/2 to 1,000."""
    cells = []
    for rounds in (10, 60):
        for clip in (0.3 * advice.tree["algorithm"]["clip"], 3.0 * advice.tree["algorithm"]["clip"]):
            for travel in np.geomspace(0.5, 1000.0, _OF_ORACLE):
                own = {"clip": clip, "step": float(travel) / (clip * rounds)}
                cells += [_cell(advice, seed, own, rounds) for seed in range(seeds)]
    return max(_means(cells, metric, seeds), key=statistics.fmean)


def referred(advice: Advice, metric: str) -> dict[str, float]:
    """Alone, no privacy and a constant."""
    cell = _cell(advice, 0)
    task, known = load_task(cell), compute_references(cell)
    weights = [silo.test for silo in known.silos]
    alone = float(np.average([silo.score for silo in known.silos], weights=weights))
    fitted = find_linear_objective(cell).evaluate(
        torch.from_numpy(fit_pooled_model(cell)).to(torch.float32), task.test
    )
    labels, tests = task.train.labels, task.test.labels
    if metric == "test_accuracy":
        counts = torch.bincount(labels[labels >= 0])
        constant = float((tests == counts.argmax()).double().mean())
        return {"alone": alone, "no privacy": float(fitted.accuracy), "constant": constant}
    spread = float((tests - tests.mean()).square().mean())
    constant = 1.0 - float((tests - labels[torch.isfinite(labels)].mean()).square().mean()) / spread
    return {
        "alone": 1.0 + 2.0 * alone / spread,
        "no privacy": 1.0 - 2.0 * float(fitted.loss) / spread,
        "constant": constant,
    }


def measure(name: str, epsilons: Sequence[float], trust: str, asked: int | None) -> Iterator[dict[str, Any]]:
    """A row for every ε of a federation; `asked` seeds, or 20, of images 2."""
    federation = FEDERATIONS[name]()
    seeds = asked or (20 if federation.records is None else 2)
    known: dict[str, float] | None = None
    for epsilon in epsilons:
        advice = advise_on_facts(facts_of(federation, epsilon, trust), federation.data)
        metric = federation.metric
        known = known or referred(advice, metric)
        found = {
            "advise": _run([_cell(advice, seed) for seed in range(seeds)], metric),
            "tune": tuned(advice, metric, seeds),
            "oracle": oracle(advice, metric, seeds),
        }
        row = {key: statistics.fmean(values) for key, values in found.items()} | known
        spread = statistics.stdev(found["advise"])
        yield {"federation": name, "trust": trust, "epsilon": epsilon, "seeds": seeds, "metric": metric,
               "spread": spread, "q": advice.forecast.q, "enough": advice.forecast.enough, **row}  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/advise.md, and how many cells are within the targets."""
    lines = [
        f"| federation | ε | q | {' | '.join(_COLUMNS)} | seeds |",
        "|---|---|---|" + "---|" * (len(_COLUMNS) + 1),
    ]
    near = {"within 2 of tune": 0, "within 4 of the oracle": 0, "not below a constant": 0}
    for row in rows:
        scale, digits = (100.0, 1) if row["metric"] == "test_accuracy" else (1.0, 2)
        shown = [f"{scale * row[key]:.{digits}f}" for key in _COLUMNS]
        shown[0] += f" ± {scale * row['spread']:.{digits}f}"
        mark = "" if row["federation"] in DEVELOPED else " *"
        cells = [f"{row['federation']}{mark}", f"{row['epsilon']:g}", f"{row['q']:.3g}", *shown, str(row["seeds"])]
        lines.append(f"| {' | '.join(cells)} |")
        near["within 2 of tune"] += row["advise"] >= row["tune"] - 0.02
        near["within 4 of the oracle"] += row["advise"] >= row["oracle"] - 0.04
        near["not below a constant"] += row["advise"] >= row["constant"] - 1e-6
    told = "; ".join(f"{count} of {len(rows)} {words}" for words, count in near.items())
    return "\n".join(lines) + f"\n\n{told}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="")
    parser.add_argument("--epsilon", type=float, action="append")
    parser.add_argument("--trust", default="untrusted")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--out", type=Path, default=Path("advise.jsonl"))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        rows = [json.loads(line) for line in given.out.read_text(encoding="utf-8").splitlines()]
        order = list(FEDERATIONS)
        print(table(sorted(rows, key=lambda row: (order.index(row["federation"]), row["epsilon"]))), end="")
        return
    for name in FEDERATIONS:
        if re.search(given.only, name):
            for row in measure(name, given.epsilon or EPSILONS, given.trust, given.seeds):
                print(json.dumps(row), flush=True)
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
