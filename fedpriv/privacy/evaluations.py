"""What evaluations by silos cost their test records: recomputed from what they released, in data and in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedpriv.accounting.gdp import compose, epsilon_of
from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.errors import InputError
from fedpriv.figures import counted, epsilon_words, lower_range, upper_figure
from fedpriv.privacy.ledger import ReleaseStream, as_data, claim_of, from_data

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
