"""What a run that protects one unit says about several at once: a person with k records.

What evaluations by silos cost their test records: recomputed from what they released, in data and in words.

What a run claims, as data: computed from its releases, when it is written and whenever it is shown.

A first step that a run uses and has not taken: it is charged, and every view of the run says so.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting.curves import epsilon_at, epsilon_of_chain, mu_together
from fedpriv.accounting.gaussian import compose, epsilon_of, moved_by
from fedpriv.accounting.guarantees import GaussianDP, Guarantee, Sampled
from fedpriv.core.errors import InputError
from fedpriv.core.figures import counted, delta_figure, epsilon_figure, epsilon_words, lower_range, upper_figure
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.trust import RECORD
from fedpriv.participation.orders import Schedule
from fedpriv.rounds.ledger import EXACT, FIRST_STEP, PrivacyClaim, ReleaseStream, as_data, claim_of, from_data

SIZES = (2, 8)


@lru_cache(maxsize=64)  # the seeds of a sweep promise the same, and a chain takes its time
def epsilons_of_several(guarantee: Guarantee, delta: float) -> Mapping[int, float]:
    """ε at δ for k units at once, by k.

    Guarantee: exact for public orders, where all k meet in one round: k·μ.  Where rounds are secret it is the
    smallest of up to three bounds: the chain through k neighbours, k·μ of rounds that everybody knows, and the law
    of how many of k units join.  The second always gives a number.
    """
    if isinstance(guarantee, GaussianDP):
        return {size: gdp.epsilon_of(mu_together(guarantee.mu, size), delta) for size in SIZES}
    return {size: _secret(guarantee, size, delta) for size in SIZES}


def _secret(guarantee: Sampled, size: int, delta: float) -> float:
    known = gdp.epsilon_of(mu_together(guarantee.known_mu, size), delta)
    joining = guarantee.group_curve(size)
    found = [known, epsilon_of_chain(guarantee.curve, size, delta)]
    return min(found if joining is None else [*found, epsilon_at(joining, delta)])


def bounds_of_several(guarantee: Guarantee, delta: float) -> dict[str, dict[str, float | None]]:
    """The same as data, by k: ε at δ, and μ where there is one.

    Guarantee: k records of one person, whichever rounds they take part in, are protected by this at least.
    """
    mu = guarantee.mu if isinstance(guarantee, GaussianDP) else None
    return {
        str(size): {"mu": None if mu is None else mu_together(mu, size), "epsilon": epsilon}
        for size, epsilon in epsilons_of_several(guarantee, delta).items()
    }


def words_of_several(guarantee: Guarantee, delta: float) -> str:
    """A sentence of a report, after the one that says whom records presume; of the run that protects least."""
    told = ", ".join(
        f"{size} records: ε = {epsilon_figure(epsilon)}"
        for size, epsilon in epsilons_of_several(guarantee, delta).items()
    )
    return f"One person's records together, in the run that protects least, at δ = {delta_figure(delta)}: {told}."


_OTHERS = (
    "Test records are other records than those that trained the model, with a figure of their own; a person who "
    "has records of both kinds is protected by both together only."
)
_EXACT = (
    "The silos evaluated {times} on their own test records, and the server got exact sums. These metrics "
    "are its own: they are in this report, and whoever passes it on releases test records, for which nothing is "
    "guaranteed."
)
_NOISY = (
    "The silos evaluated {times} on their own test records, and {who}: all evaluations together are "
    "{mu}-GDP for each test record ({epsilon}, {relation}). Metrics are "
    "noisy: accuracies by a standard deviation of {spread} where noise was added, losses by that times "
    "evaluation.loss_bound, and they can leave their range. "
) + _OTHERS


def mu_of_tests(streams: Sequence[ReleaseStream]) -> float | None:
    """μ of all evaluations for each test record, from the streams alone; None without noise.

    InputError for streams of evaluations that read records in secret: there are none such.
    """
    claim = claim_of(streams)
    if claim is None:
        return None
    if not isinstance(claim.guarantee, GaussianDP):
        raise InputError("evaluations read all test records every time: their guarantee is a mu")
    return claim.guarantee.mu


def evaluation_data(
    streams: Sequence[ReleaseStream], trust: str, mu_of_training: float | None
) -> dict[str, Any] | None:
    """What results.json says of a run's evaluations; None where the server evaluated on a public test set."""
    if not streams:
        return None
    mu = mu_of_tests(streams)
    return {
        "by": "silos",
        "published": "without noise" if mu is None else "with noise",
        "noise_of": "nobody" if mu is None else streams[0].owner if streams[0].owner == "server" else "silos",
        "trust": trust,
        "mu": mu,
        "mu_with_training": None if mu is None or mu_of_training is None else compose([mu, mu_of_training]),
        "relation": streams[0].relation,
        "evaluations": streams[0].schedule.rounds,
        "releases": [as_data(stream) for stream in streams],
    }


def evaluation_words(told: Mapping[str, Any], delta: float) -> str:
    """The same as a person reads it; figures are recomputed from the releases."""
    streams = list(map(from_data, told["releases"]))
    mu, count = mu_of_tests(streams), streams[0].schedule.rounds
    if mu is None:
        return _EXACT.format(times=counted(count, "time"))
    by_server = streams[0].owner == "server"
    return _NOISY.format(
        times=counted(count, "time"),
        who="the server, which saw exact sums, added noise" if by_server else "every silo added noise",
        mu=upper_figure(mu),
        epsilon=epsilon_words(epsilon_of(mu, delta), delta),
        relation=streams[0].relation,
        spread=lower_range([stream.std for stream in streams], 3),
    )


def claim_of_data(releases: Sequence[Mapping[str, Any]]) -> PrivacyClaim[Guarantee] | None:
    """The claim of releases as results.json has them; cells of one sweep that released alike share the answer."""
    return _claim_of_text(json.dumps(releases))


@lru_cache(maxsize=1024)
def _claim_of_text(text: str) -> PrivacyClaim[Guarantee] | None:
    return claim_of(list(map(from_data, json.loads(text))))


def figures_of(claim: PrivacyClaim[Guarantee] | None, delta: float) -> dict[str, Any]:
    """Every figure of a claim at δ by its name in results.json; None for what it has not.

    Guarantee: it looks at the claim alone, so that a table cannot show what was not released.
    """
    found: dict[str, Any] = {
        "guarantee": "none" if claim is None else claim.guarantee.kind,
        "holds": None if claim is None else EXACT if claim.exact else "in real arithmetic",
        "attained": claim is not None and claim.attained,
        "counted_mu": None if claim is None else claim.counted,
        "several_records": None,
        **dict.fromkeys(("mu", "zcdp", "epsilon", "epsilon_paper")),
    }
    if claim is None:
        return found
    if claim.unit.name == RECORD.name:
        found["several_records"] = bounds_of_several(claim.guarantee, delta)
    found |= {"relation": claim.relation, "unit": claim.unit.words, "epsilon": claim.guarantee.epsilon_of(delta)}
    if isinstance(claim.guarantee, GaussianDP):
        paper = claim.guarantee.epsilon_delta(delta).paper
        found |= {"mu": claim.guarantee.mu, "zcdp": claim.guarantee.zcdp, "epsilon_paper": paper}
    return found


ELSEWHERE = "elsewhere"
"""The owner of a first step that is charged, and not released by the run that has it in its ledger."""
STEP_ELSEWHERE = (
    "The columns of numbers were scaled by means and deviations that the scenario gives, and that no release of "
    "this run is the source of: the figures charge them as a first step elsewhere, with the whole share of the "
    "budget that data.scale sets aside. Means that were read off the records in any other way are not covered."
)
"""What is said of every claim with such a step in it."""


def charged_elsewhere(releases: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a ledger, as data, charges a step that the run did not release."""
    return any(release["owner"] == ELSEWHERE for release in releases)


def with_other_step(streams: Sequence[ReleaseStream], beside: float) -> tuple[ReleaseStream, ...]:
    """The ledger of a run whose promise has a first step beside the rounds, of μ = `beside` if it is above 0.

    Guarantee: a run that uses what a first step gave is charged for one: for the step that it took, if that is
    in the ledger, and else for a Gaussian release elsewhere of the whole μ that was set aside for it.
    """
    noisy = [stream for stream in streams if stream.std]
    if not beside or not noisy or any(stream.step == FIRST_STEP for stream in streams):
        return tuple(streams)
    once, relation, unit = Schedule(1, 1), noisy[0].relation, noisy[0].unit
    std = moved_by(relation, 1.0, 1.0) / beside
    other = ReleaseStream(
        ELSEWHERE, IndependentGaussian(), once, 0.0, (1.0,), 1.0, relation, std, unit=unit, step=FIRST_STEP
    )
    return (other, *streams)
