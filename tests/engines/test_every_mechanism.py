"""Every mechanism that a scenario can name, under every trust setting, on both fast engines.

Noise that is fitted is fitted first; engines get numbers.
"""

import itertools
from typing import Any

import numpy as np
import pytest

from fedpriv.claims.ledger import ReleaseStream
from fedpriv.noise.fitting.cost import make_noise_cost
from fedpriv.noise.registry import AUTO, SELECTABLE_MECHANISMS
from fedpriv.papers.base import NoiseSettings
from fedpriv.plan.calibration import fit_cell_noise, response_and_workload
from fedpriv.scenario.schema import Cell
from tests.engines.builders import QUIET, plan_cell, refusal, run_cell, run_on_both, small_cell, store_and_load
from tests.engines.test_every_row import SETTINGS, a_small_problem
from tests.parts import in_parts

__all__ = ["a_small_problem"]  # a fixture

NAMES = [*(kind.name for kind in SELECTABLE_MECHANISMS), AUTO]
NOISY = ["accelerated-dp-srgd", "dp-ftrl", "momentum-tree"]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "late clips": {"late_clip": "column"},
    "scaled": {"scale": True},
}


def mechanism_cell(row: str, trust: str, epochs: int = 1, **settings: Any) -> Cell:
    return small_cell(
        run__evaluations=3,
        data={"name": "problem.npz"},
        model={"name": "softmax-regression", "feature_norm": 5.0},
        federation={"silos": 3, "batch": 8, "rounds": 12, "epochs": epochs},
        algorithm={"name": row, "trust": trust, **SETTINGS[row], **settings},
        privacy={"relation": "zero-out", "mu": 1.5},
    )


def variants_of(name: str) -> list[str]:
    """A scale is refused by the registry elsewhere, or fitted so by auto anyway."""
    return [variant for variant in VARIANTS if variant != "scaled" or name in ("lambda-cgd", "blt")]


def agreed(cell: Cell) -> tuple[ReleaseStream, ...]:
    """What both engines release of a cell whose target is μ = 1.5: the model is the same, ledgers give it back."""
    outcome, _ = run_on_both(cell, share=1e-3 if cell.algorithm.trust_setting.masked else 1e-9)
    assert all(stream.mu == pytest.approx(1.5, rel=1e-9) for stream in outcome.releases)
    assert store_and_load(outcome.releases) == outcome.releases
    return outcome.releases


def released_as_integers(floats: Cell, little: float) -> tuple[ReleaseStream, ...]:
    """What a cell releases on integers: the noise of floats, and with `little` noise nearly the same model."""
    integers = floats.model_copy(update={"run": floats.run.model_copy(update={"arithmetic": "integers"})})
    ours, theirs = plan_cell(integers), plan_cell(floats)
    assert ours.noise.std_in_mean == pytest.approx(theirs.noise.std_in_mean, rel=1e-5)
    releases = run_cell("inprocess", integers).releases
    for stream, stored in zip(releases, store_and_load(releases), strict=True):
        assert stored.mu == stream.mu <= 1.5
    quiet = {"privacy": integers.privacy.model_copy(update={"mu": little})}
    exact, plain = (run_cell("inprocess", cell.model_copy(update=quiet)).model for cell in (integers, floats))
    np.testing.assert_allclose(exact, plain, atol=0.03 * float(np.max(np.abs(plain))))
    return releases


@pytest.mark.every(24)
@pytest.mark.parametrize(
    ("name", "row", "variant"),
    in_parts(
        [(name, row, variant) for name in NAMES for row in NOISY for variant in variants_of(name)],
        [
            (name, row, variants_of(name)[(number + other) % len(variants_of(name))])
            for number, name in enumerate(NAMES)
            for other, row in enumerate(NOISY)
        ],
    ),
)
def test_both_engines_agree_and_meet_the_mu_target_for_every_mechanism(name: str, row: str, variant: str) -> None:
    settings = {"mechanism": name, **VARIANTS[variant]}
    for trust in ("untrusted", "trusted", "secure-aggregation"):
        assert all(stream.mu <= 1.5 for stream in agreed(fit_cell_noise(mechanism_cell(row, trust, **settings))))


@pytest.mark.every(20)
@pytest.mark.parametrize(("name", "variant"), list(itertools.product(["lambda-cgd", "blt"], VARIANTS)))
@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
def test_integer_arithmetic_has_the_noise_and_nearly_the_model_of_floating_point(
    name: str, variant: str, trust: str
) -> None:
    """What guards release: C of rounded poles and residues, B its inverse, within the target and near floats."""
    assert released_as_integers(
        fit_cell_noise(mechanism_cell("dp-ftrl", trust, mechanism=name, **VARIANTS[variant])), 2e3
    )


@pytest.mark.every(4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("row", NOISY)
def test_raising_later_clips_leaves_the_noise_unchanged_for_every_mechanism(row: str, name: str) -> None:
    for epochs in (1, 3):
        raised = fit_cell_noise(mechanism_cell(row, "trusted", epochs, mechanism=name, late_clip="column"))
        assert raised.algorithm.settings.model_dump()["late_clip"] == "column"
        same = raised.algorithm.model_dump() | {"late_clip": "same"}
        plain = raised.model_copy(update={"algorithm": type(raised.algorithm).model_validate(same)})
        ours, theirs = plan_cell(raised), plan_cell(plain)
        assert ours.noise.std_in_mean == pytest.approx(theirs.noise.std_in_mean, rel=1e-9)
        clips = [np.array([float(p.estimator.round(t).clip) for t in range(1, 13)]) for p in (ours, theirs)]
        assert np.sum(np.log(clips[0])) > np.sum(np.log(clips[1]))
        if epochs == 1:
            assert np.all(clips[0] >= clips[1])
        assert ours.max_clip == np.max(clips[0])


@pytest.mark.every(3)
@pytest.mark.parametrize("row", NOISY)
def test_the_automatic_mechanism_is_within_one_percent_of_every_named_mechanism(row: str) -> None:
    """√J of the plan's mechanism is within 1 % of every mechanism that can be named, with as many vectors."""
    cell = mechanism_cell(row, "trusted", mechanism=AUTO)
    settings = cell.algorithm.settings
    assert isinstance(settings, NoiseSettings)
    objective = make_noise_cost(*response_and_workload(cell.algorithm.row, settings, cell.schedule))
    best = objective.evaluate(plan_cell(fit_cell_noise(cell)).mechanism)
    for name in NAMES[:-1]:
        rival = plan_cell(fit_cell_noise(mechanism_cell(row, "trusted", mechanism=name, bands=4))).mechanism
        if rival.memory_vectors(objective.workload) <= 4:
            assert best <= 1.01**2 * objective.evaluate(rival)


def test_planning_refuses_a_mechanism_that_is_not_fitted_yet() -> None:
    for name in (AUTO, "scheduled", "lambda-cgd", "blt"):
        with refusal("fitted before a run starts"):
            plan_cell(mechanism_cell("dp-ftrl", "untrusted", mechanism=name))


def test_fitting_a_mechanism_is_refused_with_poisson_subsampling() -> None:
    federation = {"silos": 3, "rounds": 12, "epochs": 3, "sampling": "poisson"}
    algorithm = {"name": "dp-ftrl", "trust": "trusted", "clip": 1.0, "step": 0.1, "mechanism": AUTO}
    with refusal("nobody may know in which rounds"):
        fit_cell_noise(small_cell(federation=federation, algorithm=algorithm, privacy=QUIET))


def test_scaled_noise_and_raised_clips_exclude_each_other() -> None:
    with refusal("use up the same room"):
        mechanism_cell("dp-ftrl", "trusted", mechanism="blt", scale=True, late_clip="column")
    with refusal("evens out round 1"):
        mechanism_cell("accelerated-dp-srgd", "trusted", first_clip="balanced", late_clip="column")
