"""Table one beside the truth: what a plan releases at several ε, in a table of Markdown.

python -m benchmarks.statistics_beside examples/statistics/hospitals.toml    # reads fetched data
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fedpriv
from fedpriv.addons.statistics.indicators import Cells
from fedpriv.addons.statistics.plan import StatisticsPlan, TableRequest, read_plan
from fedpriv.addons.statistics.tables import Statistics, TableEstimate
from fedpriv.data.named import load
from fedpriv.data.partition import counted_mask

EPSILONS = (1.0, 3.0)


def truth(asked: TableRequest, table: Cells, held: NDArray[np.float64]) -> list[float]:
    """What the raw cells (n, columns) of all records give, in the order of the table's estimates."""
    if asked.kind == "counts":
        return np.bincount(table.codes(held), minlength=table.size).astype(float).tolist()
    values, edges = held[:, table.axes[-1].column], np.array(table.axes[-1].edges)
    known = values[~np.isnan(values)].clip(edges[0], edges[-1])
    if asked.kind == "means":
        return [float(len(known)), float(known.mean()), float(known.mean()), float(known.std())]
    below = (known[:, None] < edges).sum(0)
    each = [edges[np.flatnonzero(below >= share * len(known))[0]] for share in asked.quantiles]
    return [float(edge) for edge in each for _ in range(2)]


def _figure(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _shown(each: TableEstimate) -> str:
    return f"{_figure(each.value)} ({_figure(each.low)} – {_figure(each.high)})"


def lines_of(plan: StatisticsPlan) -> list[str]:
    statistics = Statistics.from_plan(plan)
    data = load(plan.data.name, table=plan.data.table, with_cells=True)
    assert data.raw_cells is not None
    held = data.raw_cells[counted_mask(data.train_labels)]
    found = list[Any]()
    for epsilon in EPSILONS:
        tree = plan.model_dump(mode="json", exclude_none=True, exclude_unset=True)
        tree["privacy"]["epsilon"], tree["seed"] = epsilon, int(epsilon)
        with tempfile.TemporaryDirectory(prefix="fedpriv-statistics-") as folder:
            found.append(fedpriv.statistics(tree, out=Path(folder) / "run").tables)
    lines = [
        "| table | cell | true | " + " | ".join(f"ε = {each:g}" for each in EPSILONS) + " |",
        "|---|---|---:|",
    ]
    lines[1] += "---:|" * len(EPSILONS)
    for place, (asked, table) in enumerate(zip(plan.table, statistics.settings.tables, strict=True)):
        known = truth(asked, table, held)
        for number, own in enumerate(zip(*(each[place].estimates for each in found), strict=True)):
            if own[0].covers == "the population" or "missing" in own[0].of or _never(own[0], known[number]):
                continue
            cells = " | ".join(map(_shown, own))
            lines.append(f"| {asked.title} | {', '.join(own[0].of)} | {_figure(known[number])} | {cells} |")
    return lines


def _never(estimate: TableEstimate, true: float) -> bool:
    """Whether a cell is beyond the last edge and empty."""
    return true == 0.0 and estimate.of[-1].startswith(("below", "above"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    print("\n".join(lines_of(read_plan(parser.parse_args().plan))))


if __name__ == "__main__":
    main()
