"""A claim carries its relation and its unit, and prints both conversions by name."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting import renyi as zcdp
from fedpriv.accounting.gaussian import RELATIONS, relation_named
from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.claims.claim import (
    EXTERNAL_PARTY,
    PrivacyClaim,
    add_external_first_step,
    compute_claim,
    describe_silo_budgets,
    evaluation_mu,
)
from fedpriv.claims.ledger import FIRST_STEP, ReleaseStream
from fedpriv.core.errors import InputError
from fedpriv.core.figures import format_epsilon_delta, format_upper_epsilon
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.trust import make_unit
from fedpriv.participation.orders import FixedOrder
from fedpriv.participation.secret import PoissonSampling


def test_claim_sentence_names_its_unit_relation_and_conversions() -> None:
    line = PrivacyClaim(GaussianDP(1.0), "replace-one").format_sentence("line", 1e-5)
    assert line == (
        "one record of a silo, replace-one neighbours: μ-GDP with μ at most 1 (zCDP 0.5); (ε, δ) at most (4.378, "
        "1e-05), (5.299, 1e-05) by the paper's formula, rounded up"
    )
    assert "exactly" in PrivacyClaim(GaussianDP(1.0), "replace-one", attained=True).format_sentence("line", 1e-5)


ROUND_STREAM = ReleaseStream(
    "silos 0-2", IndependentGaussian(), FixedOrder(5, 5), 0.0, (1.0,) * 5, 0.1, "replace-one", 0.5
)
STEP_STREAM = ReleaseStream(
    "silos 0-2", IndependentGaussian(), FixedOrder(1, 1), 0.0, (1.0,), 0.1, "replace-one", 2.0, step=FIRST_STEP
)


def test_equal_silos_with_a_first_step_list_no_separate_silo_budgets() -> None:
    """Gains: "silos 0-2 ε = 0.3407, silos 0-2 ε = 1.555", as budgets of their own, where all have 1.609."""
    assert describe_silo_budgets([STEP_STREAM, ROUND_STREAM], 1e-5) == ""
    assert describe_silo_budgets(add_external_first_step([ROUND_STREAM], 0.5), 1e-5) == ""


def test_a_step_that_was_taken_elsewhere_is_charged_once_and_beside_noise_only() -> None:
    """As one Gaussian release of the whole μ that was set aside for it: √(μ² + 0.5²) for both together."""
    step, *rounds = add_external_first_step([ROUND_STREAM], 0.5)
    assert (step.party_name, step.step, step.schedule.rounds, rounds) == (
        EXTERNAL_PARTY,
        FIRST_STEP,
        1,
        [ROUND_STREAM],
    )
    assert step.mu == pytest.approx(0.5)
    claim = compute_claim([step, *rounds])
    assert claim is not None
    assert claim.guarantee.mu == pytest.approx(gdp.compose([ROUND_STREAM.mu, 0.5]))
    quiet = replace(ROUND_STREAM, std=0.0)
    for streams, mu in (([ROUND_STREAM], 0.0), ([quiet], 0.5), ([STEP_STREAM, ROUND_STREAM], 0.5), ([], 0.5)):
        assert add_external_first_step(streams, mu) == tuple(streams)


def test_guarantee_silo_epsilon_composes_its_first_step_and_its_rounds() -> None:
    """A ledger in which a silo added less noise to its rounds, or to its first step."""
    rounds = [replace(ROUND_STREAM, party_name="silos 0-1"), replace(ROUND_STREAM, party_name="silo 2", std=0.25)]
    steps = [replace(STEP_STREAM, party_name="silo 0", std=1.0), replace(STEP_STREAM, party_name="silos 1-2")]
    for streams, silo_pairs in (
        ([STEP_STREAM, *rounds], [[STEP_STREAM, rounds[0]], [STEP_STREAM, rounds[1]]]),
        ([*steps, *rounds], [[*steps, rounds[0]], [steps[1], rounds[1]]]),
    ):
        text = describe_silo_budgets(streams, 1e-5)
        for stream, pair in zip(rounds, silo_pairs, strict=True):
            mu = gdp.compose([part.mu for part in pair])
            assert f"{stream.party_name} ε = {format_upper_epsilon(gdp.epsilon_of(mu, 1e-5))}" in text


def test_of_more_than_twelve_budgets_the_smallest_and_the_largest_are_named() -> None:
    streams = [replace(ROUND_STREAM, party_name=f"silo {silo}", std=0.5 + 0.01 * silo) for silo in range(13)]
    named = describe_silo_budgets(streams[:12], 1e-5)
    assert [f"silo {silo} ε = " in named for silo in range(12)] == [True] * 12
    low, high = (
        format_epsilon_delta(gdp.epsilon_of(stream.mu, 1e-5), 1e-5) for stream in (streams[12], streams[0])
    )
    assert describe_silo_budgets(streams, 1e-5).endswith(
        f"hold for the records of any silo: from {low} to {high}."
    )


SECRET_STREAM = replace(ROUND_STREAM, schedule=PoissonSampling(5, 5))
PERSONS = make_unit("user", 1, max_silos=2)
TWO_SILOS = [replace(SECRET_STREAM, party_name=f"silo {silo}", unit=PERSONS) for silo in range(2)]


@pytest.mark.parametrize(
    ("compute", "streams", "reason"),
    [
        (
            compute_claim,
            [STEP_STREAM, SECRET_STREAM],
            "a first step is composed with rounds in a public order only",
        ),
        (compute_claim, TWO_SILOS, "shared = 2: persons in several silos are accounted for in public orders only"),
        (evaluation_mu, [SECRET_STREAM], "evaluations read all test records every time: their guarantee is a mu"),
    ],
)
def test_curves_without_a_mu_are_not_composed(
    compute: Callable[[Sequence[ReleaseStream]], object], streams: list[ReleaseStream], reason: str
) -> None:
    with pytest.raises(InputError, match=f"^{reason}$"):
        compute(streams)


@pytest.mark.parametrize("quiet", [ROUND_STREAM, STEP_STREAM])
def test_steps_of_which_one_has_no_noise_claim_nothing(quiet: ReleaseStream) -> None:
    noisy = STEP_STREAM if quiet is ROUND_STREAM else ROUND_STREAM
    assert compute_claim([noisy]) is not None
    assert compute_claim([noisy, replace(quiet, std=0.0)]) is None


def test_epsilon_conversions_of_a_guarantee_equal_the_library_functions() -> None:
    found = GaussianDP(0.7).conversions(1e-6)
    assert found["epsilon"] == gdp.epsilon_of(0.7, 1e-6)
    assert found["epsilon_paper"] == zcdp.paper_epsilon(0.7, 1e-6)
    assert found["epsilon"] < found["epsilon_rdp"] < found["epsilon_paper"]


def test_an_unknown_relation_is_refused() -> None:
    with pytest.raises(InputError, match="relation = 'add-one'"):
        relation_named("add-one")
    assert [relation_named(name) for name in RELATIONS] == ["replace-one", "zero-out"]


@pytest.mark.parametrize("mu", [-1.0, float("nan"), float("inf")])
def test_a_guarantee_needs_a_finite_mu(mu: float) -> None:
    with pytest.raises(InputError, match="mu ="):
        GaussianDP(mu)


def test_accounting_and_noise_mechanisms_import_without_torch() -> None:
    code = "import sys, fedpriv.accounting.budget, fedpriv.noise.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
