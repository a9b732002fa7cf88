"""Kaplan–Meier with and without privacy: patients on dialysis by disease, 67 centres, masks.

python -m benchmarks.survival_picture    # fetches dialysis-survival; writes docs/figures/survival.svg
"""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import fedpriv
from fedpriv.addons.statistics.plan import read_plan
from fedpriv.data.named import load

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "figures" / "survival.svg"
_PLAN = ROOT / "examples" / "statistics" / "dialysis.toml"
_GROUPS = {"diabetes": "#d55e00", "hypert": "#0072b2"}
_DISEASES = ("congen", "diabetes", "hypert", "other", "renal")


def kaplan_meier(times: NDArray[np.float64], died: NDArray[np.bool_]) -> tuple[list[float], list[float]]:
    """The curve of the records themselves, a step an event."""
    at, values = [0.0], [1.0]
    for time in np.unique(times[died]).tolist():
        at.append(time)
        values.append(values[-1] * (1.0 - float((died & (times == time)).sum()) / float((times >= time).sum())))
    return at, values


def _panel(axes: "Axes", epsilon: float, cells: NDArray[np.float64]) -> None:
    tree: dict[str, Any] = read_plan(_PLAN).model_dump(mode="json", exclude_none=True, exclude_unset=True)
    tree["privacy"]["epsilon"], tree["seed"] = epsilon, 1
    with tempfile.TemporaryDirectory(prefix="fedpriv-survival-") as folder:
        (table,) = fedpriv.statistics(tree, out=Path(folder) / "run").tables
    for curve in table.curves:
        if (colour := _GROUPS.get(group := curve.group[0])) is None:
            continue
        axes.fill_between(curve.at, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(curve.at, curve.values, color=colour, marker="o", markersize=3, label=f"{group}, released")
        own = cells[cells[:, 2] == _DISEASES.index(group)]
        axes.step(
            *kaplan_meier(own[:, 3], own[:, 4] == 1.0), where="post", color=colour, linewidth=0.8, label=group
        )
    axes.set(title=f"ε = {epsilon:g}", xlabel="months", xlim=(0, 45), ylim=(0, 1))


def main() -> None:
    from matplotlib import pyplot

    cells = load("dialysis-survival", with_cells=True).raw_cells
    assert cells is not None
    pyplot.rcParams["svg.hashsalt"] = "fedpriv"
    figure, both = pyplot.subplots(1, 2, figsize=(8.0, 3.2), sharey=True, layout="constrained")
    for axes, epsilon in zip(both, (1.0, 3.0), strict=True):
        _panel(axes, epsilon, cells)
    both[0].set_ylabel("alive")
    both[0].legend(fontsize=8, loc="lower left")
    figure.savefig(OUT, metadata={"Date": None})
    print(OUT)


if __name__ == "__main__":
    main()
