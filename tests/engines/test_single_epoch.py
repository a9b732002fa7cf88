"""The single-epoch algorithms and their baselines: silos do not matter, refusals."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.participation.orders import Phases
from fedpriv.rounds.ledger import as_data, from_data
from fedpriv.rounds.plan import plan_of
from fedpriv.rounds.task import task_of_cell
from fedpriv.scenario.schema import Cell, FederationSection
from tests.engines.test_engines import run

MakeCell = Callable[..., Cell]

SETTINGS: dict[str, dict[str, Any]] = {
    "accelerated-dp-srgd": {"clip": 11.0, "beta": 40.0, "radius": 2.0},
    "unaccelerated-dp-srgd": {"clip": 11.0, "beta": 40.0, "radius": 2.0},
    "accelerated-independent": {"clip": 11.0, "beta": 40.0, "radius": 2.0},
    "online-to-batch": {"clip": 11.0, "step": 0.01, "radius": 2.0, "power": 2},
    "dp-sgd": {"clip": 11.0, "step": 0.02, "radius": 2.0, "momentum": 0.5, "output": "average"},
    "noisy-minibatch": {"clip": 11.0, "step": 0.02, "radius": 2.0},
    "dp-ftrl": {"clip": 11.0, "step": 0.02, "momentum": 0.5},
    "phased-sgd": {"step": 0.01, "radius": 2.0},
    "momentum-tree": {"alpha": 0.2, "step": 0.05},
    "momentum-tree-reduced": {"alpha": 0.2, "step": 0.005},
    "momentum-tree-aligned": {"alpha": 0.2, "step": 0.05, "difference_clip": 0.5, "residual_clip": 0.2},
}


def single_epoch(name: str, trust: str = "trusted", **federation: Any) -> dict[str, Any]:
    return {
        "algorithm": {"name": name, "trust": trust, **SETTINGS[name]},
        "privacy": {"relation": "zero-out", "mu": 2.0},
        "federation": {"silos": 3, "rounds": 11, "samples": 130, "size_skew": 1.0, **federation},
    }


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "phased-sgd"])
def test_who_holds_a_record_does_not_matter_without_noise(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The same 20 records a round in one silo, in four equal ones, in four unequal ones: the same model."""

    def in_rounds(_: object, sizes: list[int], __: int) -> list[np.ndarray[Any, Any]]:
        of_round = np.split(np.arange(240), 12)
        cuts = np.cumsum([size // 12 for size in sizes])[:-1]
        return [
            np.concatenate(parts) for parts in zip(*(np.split(numbers, cuts) for numbers in of_round), strict=True)
        ]

    monkeypatch.setattr("fedpriv.rounds.task.iid", in_rounds)
    models = []
    for batches in ((20,), (5, 5, 5, 5), (2, 3, 5, 10)):
        monkeypatch.setattr(FederationSection, "batch_sizes", lambda _self, _seed, batches=batches: batches)
        tree = single_epoch(name)
        tree["federation"] = {"silos": len(batches), "rounds": 12, "samples": 240}
        tree["privacy"] = {"relation": "zero-out", "mode": "none"}
        models.append(run("vectorized", small_cell(**tree))[0][0].finished.model)
    assert np.linalg.norm(models[0]) > 1e-2
    for model in models[1:]:
        np.testing.assert_allclose(model, models[0], rtol=1e-9, atol=1e-12)


def test_gradient_evaluations_are_the_papers(small_cell: MakeCell) -> None:
    """2n gradients but for the first batch, whose second coefficient is 0; n for independent gradients."""
    counts = []
    for name in ("accelerated-dp-srgd", "accelerated-independent"):
        tree = single_epoch(name)
        tree["federation"] = {"silos": 3, "rounds": 11, "samples": 132}
        counts.append(run("vectorized", small_cell(**tree))[0][0].finished.gradient_evaluations)
    assert counts == [2 * 132 - 12, 132]


def test_the_phased_method_needs_a_curator_and_its_certificate(small_cell: MakeCell) -> None:
    """Broadcast settings, steps beyond 2/smoothness and clips below the Lipschitz constant are refused."""
    with pytest.raises(InputError, match=r"algorithm.trust = 'trusted': phased-sgd can be run with 'curator'"):
        small_cell(**single_epoch("phased-sgd", "trusted"))
    with pytest.raises(InputError, match=r"algorithm.trust = 'curator': dp-sgd can be run with"):
        small_cell(**single_epoch("dp-sgd", "curator"))
    for settings, line in (
        ({"step": 0.1}, "only for steps up to"),
        ({"clip": 1.0}, "the clip must be the Lipschitz"),
    ):
        tree = single_epoch("phased-sgd", "curator")
        cell = small_cell(**{**tree, "algorithm": {**tree["algorithm"], **settings}})
        with pytest.raises(InputError, match=line):
            plan_of(cell, task_of_cell(cell).objective)


def test_the_phased_method_refuses_what_is_not_known_to_be_convex(small_cell: MakeCell) -> None:
    """A perceptron; least squares, whose constants hold in a ball only; and softmax regression, which is both."""
    tree = single_epoch("phased-sgd", "curator")
    for model, data in (("mlp", "synthetic"), ("least-squares", "linear-regression")):
        cell = small_cell(**tree, model={"name": model}, data={"name": data})
        with pytest.raises(InputError, match="rests on a convex loss"):
            plan_of(cell, task_of_cell(cell).objective)
    measured = small_cell(**tree, run__goldstein_radius=0.1)
    assert plan_of(measured, task_of_cell(measured).objective).mechanism


def test_the_phased_method_reads_each_record_once_and_publishes_phase_ends(small_cell: MakeCell) -> None:
    cell = small_cell(**single_epoch("phased-sgd", "curator", rounds=12, samples=130))
    assert cell.schedule == Phases((6, 3, 1))
    (outcome,), heard = run("vectorized", cell)
    assert outcome.finished.gradient_evaluations == 10 * sum(cell.batch_sizes)
    (stream,) = outcome.finished.releases
    assert stream.mu == pytest.approx(2.0, rel=1e-9)
    assert from_data(as_data(stream)) == stream
    assert heard.rounds == 13
