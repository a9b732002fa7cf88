"""The README's picture: accuracy against privacy, the paper's points, ours at the same privacy, and without noise.

python -m benchmarks.picture    # fetches MNIST; some minutes; writes docs/figures/privacy.svg
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fedpriv
from fedpriv.scenario.load import load_scenario
from fedpriv.show.charts import Chart, Mark, Panel, Series
from fedpriv.show.looks import nth_look, shade
from fedpriv.show.plots import draw_charts

_OUT = Path(__file__).resolve().parents[1] / "docs" / "figures"
_SEEDS = 3
_FEATURES = {"pixels": "our settings, pixels", "orientations": "our settings, edges in cells"}
_PRESET, _PAPER = "mnist-untrusted-best", "mnist-untrusted"
_METHOD = "dp-mu2-fl, late clips"


def main() -> None:
    """Run DP-μ²-FL with an untrusted server and 100 silos, with the paper's settings and ours; draw both."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        paper = _accuracies(_PAPER, {"federation.silos": 100}, out / "paper")
        ours = {features: _ours(features, out) for features in _FEATURES}
    for path in draw_charts([_chart(paper, ours)], _OUT, "privacy"):
        print(path)


def _ours(features: str, out: Path) -> tuple[dict[float, float], float]:
    """Accuracy in percent by μ, and without noise at the settings of the largest μ."""
    chosen = {"label.method": _METHOD, "model.features": features}
    private = _accuracies(_PRESET, chosen, out / features)
    overrides = [f"{key}={value}" for key, value in chosen.items()]
    settings = load_scenario(Path(_PRESET), [*overrides, f"privacy.mu={max(private)}", "seeds=1"]).points[0].cell
    own = {f"algorithm.{key}": value for key, value in (settings.algorithm.model_extra or {}).items()}
    centre = {"model.centre": 0.13} if features == "pixels" else {}
    without = {**chosen, **own, **centre, "privacy.mode": "none"}
    (limit,) = _accuracies(_PRESET, without, out / f"{features}-0").values()
    return private, limit


def _accuracies(scenario: str, changes: Mapping[str, Any], out: Path) -> dict[float, float]:
    """Mean test accuracy in percent by μ; by 0.0 where there is no noise."""
    results = fedpriv.run(scenario, set={**changes, "seeds": _SEEDS}, out=out, progress=False)
    found: dict[float, list[float]] = {}
    for cell in results:
        found.setdefault(round(cell.privacy.mu or 0.0, 3), []).append(100 * cell.test_accuracy)
    return {mu: sum(values) / len(values) for mu, values in found.items()}


def _chart(paper: Mapping[float, float], ours: Mapping[str, tuple[Mapping[float, float], float]]) -> Chart:
    published = load_scenario(Path(_PAPER)).published
    assert published is not None
    known = {mu: published.value("test_accuracy", {"privacy.rho": mu, "federation.silos": 100}) for mu in paper}
    printed = [Mark(mu, value) for mu, value in known.items() if value is not None]
    measured = [Mark(mu, value) for mu, value in paper.items()]
    series = [Series("the paper's settings, measured", replace(shade(5), dash=3), measured, published=printed)]
    for place, (features, (private, limit)) in enumerate(ours.items()):
        look = nth_look(place)
        ends = [Mark(mu, limit) for mu in (min(private), max(private))]
        series += [
            Series(_FEATURES[features], look, [Mark(mu, value) for mu, value in private.items()]),
            Series(f"the same without noise: {limit:.1f} %", replace(look, dash=2), ends, dots=False),
        ]
    return Chart(
        "privacy",
        "MNIST, 100 silos that trust nobody, 600 rounds, every record used once",
        "μ of Gaussian DP for one record (smaller is more private)",
        "test accuracy (%)",
        [Panel("", series)],
        log_x=True,
        ticks=(1.0, 4.0, 8.0, 16.0),
    )


if __name__ == "__main__":
    main()
