"""The README's picture: accuracy against privacy, the paper's points, ours at the same privacy, and without noise.

python -m benchmarks.picture    # fetches MNIST; some minutes; writes docs/figures/privacy.svg
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedpriv
from fedpriv.scenario.load import load_scenario
from fedpriv.show.plot_style import HOLLOW, colour, panels
from fedpriv.show.plots import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    for path in draw(lambda: _figure(paper, ours), _OUT, "privacy"):
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


def _figure(paper: Mapping[float, float], ours: Mapping[str, tuple[Mapping[float, float], float]]) -> "Figure":
    figure, ((axes,),) = panels(7.4, 3.9)
    published = load_scenario(Path(_PAPER)).published
    assert published is not None
    known = {mu: published.value("test_accuracy", {"privacy.rho": mu, "federation.silos": 100}) for mu in paper}
    hollow = {"color": "0.2", "linestyle": "none", "marker": "o", **HOLLOW}
    axes.plot(list(known), list(known.values()), label="published", **hollow)
    axes.plot(list(paper), list(paper.values()), **colour(6), label="the paper's settings, measured")
    for place, (features, (private, limit)) in enumerate(ours.items()):
        look = colour(place)
        axes.plot(list(private), list(private.values()), **look, label=_FEATURES[features])
        label = f"the same without noise: {limit:.1f} %"
        axes.axhline(limit, color=look["color"], linestyle=":", linewidth=1.4, label=label)
    axes.set_xscale("log")
    axes.set_xticks([1, 4, 8, 16], ["1", "4", "8", "16"])
    axes.minorticks_off()
    axes.set_xlabel("μ of Gaussian DP for one record (smaller is more private)")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title("MNIST, 100 silos that trust nobody, 600 rounds, every record used once")
    figure.legend(loc="outside right center")
    return figure


if __name__ == "__main__":
    main()
