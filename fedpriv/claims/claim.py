"""Privacy claim of a run: guarantee, neighbouring relation and unit, computed from its releases.

* A stream is the sequence of releases of one party, such as a silo or the server, over the rounds of one step.
  Silos with equal weights and noise may share one.
* A step is the rounds of a run, or its first step: a release before the rounds, about the same records, by whose
  result columns of numbers are scaled.
* A unit is what neighbouring data sets differ in, such as a record or a person.  The relation says how they differ
  in it: another unit takes its place (replace-one), or it contributes zero (zero-out).
* μ by counting is the upper bound on μ without the surcharge of a paper's constants.
* A cell is one run of a scenario, with an entry in results.json.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal

from fedpriv.accounting.curves import group_mu
from fedpriv.accounting.gaussian import Relation, compose, epsilon_of, moved_by
from fedpriv.accounting.guarantees import GaussianDP, Guarantee, Promise, mus_of, weakest
from fedpriv.core.errors import InputError
from fedpriv.core.figures import (
    best_guess,
    format_count,
    format_epsilon_delta,
    format_epsilon_range,
    format_lower_range,
    format_upper,
    format_upper_delta,
    format_upper_epsilon,
    format_upper_percent,
    format_upper_range,
)
from fedpriv.noise.trust import RECORD, Unit, find_trust

if TYPE_CHECKING:
    from fedpriv.claims.ledger import ReleaseStream

EXACT_ASSUMPTIONS = (
    "up to 2^-60 in total variation (δ grows by (1 + e^ε) · 2^-60), if AES-256 is a pseudorandom permutation"
)
"""Assumptions of an exact release's guarantee."""
REAL_ASSUMPTIONS = "in real arithmetic"
"""Assumption of the guarantee of a release in floating point."""
GROUP_SIZES = (2, 8)
"""Numbers of records of one person for which claims have figures."""
_MU_TOLERANCE = 1e-9
"""Relative difference of μ by counting and the charged μ below which the two count as equal."""


Style = Literal["line", "figures", "arithmetic", "counted"]
"""Kind of sentence about a claim.

"line" names the unit, the relation and the figures, "figures" the figures alone.  "arithmetic" says for which
arithmetic they hold, and "counted" gives μ by exact counting.
"""


@dataclass(frozen=True)
class PrivacyClaim(Generic[Promise]):
    """Guarantee with its neighbouring relation and its unit of protection.

    Guarantee: `guarantee` holds for neighbouring data sets under `relation` that differ in one `unit`, whatever
    the adversary knows about other units, if the assumption of the mechanism (`Mechanism.assumption`) does.
    """

    guarantee: Promise
    relation: Relation
    unit: Unit = RECORD
    exact: bool = False
    """Whether the guarantee holds for the program's own arithmetic, not for real numbers alone."""
    attained: bool = False
    """Whether μ is known to be exact in real arithmetic, not only an upper bound."""
    mu_by_counting: float | None = None
    """Smaller upper bound on μ by exact counting, or None if none is known."""

    def figures(self, delta: float) -> dict[str, Any]:
        """Return the figures at δ by their names in results.json, with None for figures that do not exist.

        Raises:
            InputError: δ is out of the range of the guarantee.
        """
        return {
            "guarantee": self.guarantee.kind,
            "holds": EXACT_ASSUMPTIONS if self.exact else REAL_ASSUMPTIONS,
            "attained": self.attained,
            "counted_mu": self.mu_by_counting,
            "several_records": group_bounds(self.guarantee, delta) if self.unit.name == RECORD.name else None,
            **self.guarantee.figures(delta),
            "relation": self.relation,
            "unit": self.unit.description,
        }

    def conversions(self, delta: float) -> dict[str, Any]:
        """Return the guarantee in its forms, such as μ and ε at `delta`, with relation and unit."""
        return {**self.guarantee.conversions(delta), "relation": self.relation, "unit": self.unit.description}

    def format_sentence(self, style: Style, delta: float) -> str:
        """Return the sentence of this style at δ, or "" if the claim has none."""
        return _SENTENCE_FORMATS[style](self, delta)


def describe_cells(cells: Sequence[Mapping[str, Any]]) -> str:
    """Describe the claim of cells of results.json whose claims differ in their figures only.

    The text has the unit, the relation, the trust setting, the privacy figures or their ranges over the cells, the
    source of the noise, the assumptions of exact releases, and the silos' own ε if these differ, or it says that
    the run adds no noise.

    Args:
        cells: One or more cells, as in results.json.

    Raises:
        InputError: If releases cannot be accounted for, or there is no such trust setting.
        KeyError, TypeError or ValueError: If a cell has another form.
    """
    first = cells[0]
    server = find_trust(first["trust"]).title
    claim = compute_claim_from_data(first["releases"])
    if claim is None or first["epsilon"] is None:
        return f"Privacy: none, {server}: the run adds no noise."
    seeded = " (seeded, not for release)" if first["noise"] == "simulation" else ""
    up_to = "" if first.get("holds") in (None, REAL_ASSUMPTIONS) else f", {EXACT_ASSUMPTIONS}"
    line = _format_line(claim, cells, first["delta"], f", {server}")
    silos = describe_silo_budgets_of_cells(cells)
    return f"Privacy: {line}; {first['noise']} noise{seeded}{up_to}.{' ' if silos else ''}{silos}"


_EPSILON_TOLERANCE, _MAX_NAMED_SILOS = 1e-6, 12
"""Relative difference up to which two ε count as equal, and the most streams of silos that are listed."""


def describe_silo_budgets(streams: Sequence["ReleaseStream"], delta: float) -> str:
    """Describe the ε at δ of each silo's messages, or return "" if these are equal or no silo has one.

    In place of more than 12 figures, the text has the smallest and the largest ε.

    Guarantee: every ε is computed from the streams of releases, and so from the noise that the silo added.  The
    rounds of a silo are composed with the first step about its records, whoever released it.

    Args:
        streams: All streams of the run.
        delta: δ of the ε.

    Raises:
        InputError: If a silo's streams cannot be accounted for or composed.
    """
    from fedpriv.claims.ledger import ROUNDS

    silo_claims = [
        (stream, _compose_silo_steps(stream, streams))
        for stream in streams
        if stream.silos and stream.step == ROUNDS
    ]
    party_epsilons = [
        (stream.party_name, claim.guarantee.epsilon_of(delta))
        for stream, claim in silo_claims
        if claim is not None
    ]
    epsilons = [epsilon for _, epsilon in party_epsilons]
    if not party_epsilons or max(epsilons) <= min(epsilons) * (1.0 + _EPSILON_TOLERANCE):
        return ""
    preface = (
        "Every silo has a budget of its own, and figures without a silo's name hold for the records of any silo"
    )
    if len(party_epsilons) > _MAX_NAMED_SILOS:
        return (
            f"{preface}: from {format_epsilon_delta(min(epsilons), delta)} to "
            f"{format_epsilon_delta(max(epsilons), delta)}."
        )
    listing = ", ".join(f"{party} ε = {format_upper_epsilon(epsilon)}" for party, epsilon in party_epsilons)
    return f"{preface}: {listing}, at δ = {format_upper_delta(delta)}."


def _compose_silo_steps(
    rounds: "ReleaseStream", streams: Sequence["ReleaseStream"]
) -> PrivacyClaim[Guarantee] | None:
    """Compose silos' rounds with the first steps about their records, or return None if one has no noise.

    Args:
        rounds: Stream of the rounds of one silo, or of several alike.
        streams: All streams of the run.  A first step by no silo is about the records of all silos.
    """
    claims = [
        None if (guarantee := stream.guarantee) is None else PrivacyClaim(guarantee, stream.relation, stream.unit)
        for stream in streams
        if stream is rounds
        or (stream.step != rounds.step and (not stream.silos or set(stream.silos) & set(rounds.silos)))
    ]
    return claims[0] if len(claims) == 1 else _compose_claims(claims)


def describe_silo_budgets_of_cells(cells: Sequence[Mapping[str, Any]]) -> str:
    """Describe the silos' own ε in the cell of results.json of largest ε (`describe_silo_budgets`)."""
    from fedpriv.claims.ledger import stream_from_data

    worst_cell = max(cells, key=lambda cell: cell["epsilon"] or 0.0)
    return describe_silo_budgets(list(map(stream_from_data, worst_cell["releases"])), worst_cell["delta"])


_FIGURES = ("mu", "zcdp", "epsilon", "epsilon_paper", "counted_mu")


def _format_line(
    claim: PrivacyClaim[Guarantee], figure_sets: Sequence[Mapping[str, Any]], delta: float, server: str
) -> str:
    """Return unit, relation, trust setting and figures, as numbers or as ranges over `figure_sets`.

    `server` is the trust setting, such as ", untrusted server", or "" to leave it out.
    """
    values = {name: [facts[name] for facts in figure_sets if facts.get(name) is not None] for name in _FIGURES}
    ranges = {
        name: (format_epsilon_range if name == "epsilon" else format_upper_range)(numbers)
        for name, numbers in values.items()
        if numbers
    }
    clause = claim.guarantee.format_clause(
        {**ranges, "delta": format_upper_delta(delta)}, all(facts.get("attained") for facts in figure_sets)
    )
    return f"{claim.unit.description}, {claim.relation} neighbours{server}: {clause}"


def format_figures(facts: Mapping[str, Any]) -> str:
    """Return μ, if the claim has one, and ε with its δ in one line: "μ = 1, ε = 4.378 at δ = 1e-05"."""
    pair = format_epsilon_delta(facts["epsilon"], facts["delta"])
    return pair if facts["mu"] is None else f"μ = {format_upper(facts['mu'])}, {pair}"


PROTECTION_LEVELS = ((0.6, "strong"), (0.75, "moderate"), (0.95, "weak"), (1.0, "next to no"))
"""Levels of protection, each with the largest probability that the best guess about a record is right."""


def protection_level(mu: float) -> str:
    """Name of the protection at μ, by the probability that the best guess about one record is right."""
    return next(level for max_probability, level in PROTECTION_LEVELS if best_guess(mu) <= max_probability)


def describe_guess(unit: str, mus: Sequence[float]) -> str:
    """Describe the probability that a guess about `unit` is right, at the smallest and the largest μ."""
    probabilities = dict.fromkeys(
        f"{format_upper_percent(best_guess(mu))} (μ = {format_upper(mu)}: {protection_level(mu)} protection)"
        for mu in (min(mus), max(mus))
    )
    return (
        f"An attacker who knows everything else and decides between two equally likely cases of {unit} is right "
        f"with probability at most {' to '.join(probabilities)}."
    )


_INTEGER_ARITHMETIC = (
    "Records enter as integers of bounded size and the noise is a discrete Gaussian, sampled exactly: the figures "
    f"hold for the arithmetic of the program itself, {EXACT_ASSUMPTIONS}."
)
_FLOAT_ARITHMETIC = (
    "The noise is Gaussian in real arithmetic. What was written comes from floating-point numbers, whose lowest "
    "bits can tell more."
)


def _describe_counting(claim: PrivacyClaim[Guarantee], delta: float) -> str:
    mu, counted_mu = claim.guarantee.mu, claim.mu_by_counting
    if mu is None or counted_mu is None:
        return ""
    return (
        f"Charged is μ = {format_upper(mu)}, by the paper's constants, which add more noise than that needs: "
        f"by exact counting μ is at most {format_upper(counted_mu)}, "
        f"{format_epsilon_delta(epsilon_of(counted_mu, delta), delta)}."
    )


def format_price(mu: float | None, epsilon: float | None) -> str:
    """Format μ, or ε (at the cell's δ) if there is no μ, or "none" if there is neither."""
    if mu is not None:
        return format_upper(mu, 6)
    return "none" if epsilon is None else f"ε = {format_upper(epsilon, 6)}"


_SENTENCE_FORMATS: dict[Style, Callable[[PrivacyClaim[Guarantee], float], str]] = {
    "line": lambda claim, delta: _format_line(claim, [claim.figures(delta)], delta, ""),
    "figures": lambda claim, delta: format_figures({**claim.figures(delta), "delta": delta}),
    "arithmetic": lambda claim, _: _INTEGER_ARITHMETIC if claim.exact else _FLOAT_ARITHMETIC,
    "counted": _describe_counting,
}


def compute_claim(streams: Sequence["ReleaseStream"]) -> PrivacyClaim[Guarantee] | None:
    """Compute the claim of all streams together, or None without streams or if one has no noise.

    Guarantee: in each step, the streams of at most `unit.max_silos` silos contain contributions of one unit.  As
    many silos are charged, those of largest μ, composed.  A stream of sums over silos is charged once, with the
    unit's weight in all of them.  For a unit in one silo, such as a record, that is the worst stream of a step.
    Steps, which read the same records, are composed: μ² = Σ μ_step².

    Raises:
        InputError: If streams have different relations or units, or cannot be accounted for or compared, or if
            steps or silos are to be composed and have no μ.
    """
    by_step = {stream.step: [other for other in streams if other.step == stream.step] for stream in streams}
    return (
        _compose_claims([_compute_step_claim(step_streams) for step_streams in by_step.values()])
        if len(by_step) > 1
        else _compute_step_claim(streams)
    )


def _compose_claims(claims: Sequence[PrivacyClaim[Guarantee] | None]) -> PrivacyClaim[Guarantee] | None:
    """Compose the claims of all steps of a run, or return None if a step has no claim.

    The μ of the result is √Σμ² over the steps.  Its μ by counting is composed alike, from the charged μ of steps
    that have none, and is None if no step has one.

    Args:
        claims: Claim of each step, or None for a step without noise.

    Raises:
        InputError: If the steps have different relations or units, or a step has no μ.
    """
    step_claims = [claim for claim in claims if claim is not None]
    if len(step_claims) < len(claims):
        return None
    if len({(claim.relation, claim.unit) for claim in step_claims}) > 1:
        raise InputError("the steps of a run have one neighbouring relation and one unit, and these have several")
    if (mus := mus_of(claim.guarantee for claim in step_claims)) is None:
        raise InputError("a first step is composed with rounds in a public order only")
    counted_mus = [claim.mu_by_counting or mu for claim, mu in zip(step_claims, mus, strict=True)]
    return PrivacyClaim(
        GaussianDP(compose(mus)),
        step_claims[0].relation,
        step_claims[0].unit,
        all(claim.exact for claim in step_claims),
        mu_by_counting=None
        if all(claim.mu_by_counting is None for claim in step_claims)
        else compose(counted_mus),
    )


def _compute_step_claim(streams: Sequence["ReleaseStream"]) -> PrivacyClaim[Guarantee] | None:
    """Compute the claim of the streams of one step, or None without streams or if one has no noise.

    A unit in one silo is in one of the streams, so that the weakest guarantee is claimed.  For a unit in k silos,
    the k largest μ are composed.

    Raises:
        InputError: If streams have different relations or units, or cannot be accounted for or compared, or if
            a unit in several silos has no μ.
    """
    relations, units = {stream.relation for stream in streams}, {stream.unit for stream in streams}
    if len(relations) > 1:
        raise InputError(f"a run has one neighbouring relation, this ledger has {', '.join(sorted(relations))}")
    if len(units) > 1:
        raise InputError(
            f"a run protects one unit, this ledger has {', '.join(sorted(unit.name for unit in units))}"
        )
    guarantees = [stream.guarantee for stream in streams]
    noisy_guarantees = [guarantee for guarantee in guarantees if guarantee is not None]
    if not noisy_guarantees or len(noisy_guarantees) < len(guarantees):
        return None
    exact, unit = all(stream.integer_release for stream in streams), units.pop()
    if unit.max_silos > 1:
        return PrivacyClaim(
            _compose_silos(streams, noisy_guarantees, unit.max_silos), relations.pop(), unit, exact
        )
    weakest_guarantee = weakest(noisy_guarantees)
    claim = PrivacyClaim(weakest_guarantee, relations.pop(), unit, exact)
    # Only releases in floating point, with a μ, can attain it or have a smaller one by counting.
    if exact or (mu := weakest_guarantee.mu) is None:
        return claim
    counted_mu = max(stream.mu_by_counting for stream in streams)
    return replace(
        claim,
        attained=any(stream.attained and stream.mu == mu for stream in streams),
        mu_by_counting=counted_mu if counted_mu < mu * (1 - _MU_TOLERANCE) else None,
    )


def _compose_silos(
    streams: Sequence["ReleaseStream"], guarantees: Sequence[Guarantee], max_silos: int
) -> Guarantee:
    """Return the guarantee of a unit in up to `max_silos` silos: the composition of that many largest μ.

    Raises:
        InputError: If a guarantee has no μ.
    """
    # A stream of k silos alike has its μ k times, and one of a server or of sums, whose `silos` are empty, once.
    if (mus := mus_of(guarantees)) is None:
        raise InputError(f"shared = {max_silos}: persons in several silos are accounted for in public orders only")
    silo_mus = [mu for stream, mu in zip(streams, mus, strict=True) for _ in stream.silos[:max_silos] or (0,)]
    return GaussianDP(compose(sorted(silo_mus, reverse=True)[:max_silos]))


def compute_claim_from_data(releases: Sequence[Mapping[str, Any]]) -> PrivacyClaim[Guarantee] | None:
    """Compute the claim of releases in the form of results.json, or None as `compute_claim` does.

    Results are cached by the text of the releases.

    Raises:
        InputError: If a release has a value that no run has, or as in `compute_claim`.
        KeyError, TypeError or ValueError: If a release has another form.
    """
    return _compute_claim_from_text(json.dumps(releases))


@lru_cache(maxsize=1024)
def _compute_claim_from_text(text: str) -> PrivacyClaim[Guarantee] | None:
    from fedpriv.claims.ledger import stream_from_data

    return compute_claim(list(map(stream_from_data, json.loads(text))))


def claim_figures(claim: PrivacyClaim[Guarantee] | None, delta: float) -> dict[str, Any]:
    """Return the figures of a claim at δ by their names in results.json, with None for missing ones.

    Without a claim the relation and the unit are left out.

    Guarantee: the figures depend on the claim and δ alone.
    """
    if claim is not None:
        return claim.figures(delta)
    missing_names = ("counted_mu", "several_records", "mu", "zcdp", "epsilon", "epsilon_paper")
    return {"guarantee": "none", "holds": None, "attained": False, **dict.fromkeys(missing_names)}


@lru_cache(maxsize=64)  # Seeds of a sweep share a guarantee, and the chain is slow.
def group_epsilons(guarantee: Guarantee, delta: float) -> Mapping[int, float]:
    """Compute ε at δ for k units together, by k in `GROUP_SIZES`.

    Guarantee: the value holds wherever the k units take part.  In a public order it is that of k·μ, which is exact
    if μ is, and if all k units can meet in the same rounds.  For secret rounds it is the smallest of the chain
    through k neighbours, k·μ of rounds that are public, and, where there is one, the curve of k units together.
    """
    return {size: guarantee.epsilon_of_group(size, delta) for size in GROUP_SIZES}


def group_bounds(guarantee: Guarantee, delta: float) -> dict[str, dict[str, float | None]]:
    """Return the bounds for k units together as data, by k: ε at δ, and μ or None.

    Guarantee: k units are protected at least as these bounds say, whichever rounds they take part in.
    """
    mu = guarantee.mu
    return {
        str(size): {"mu": None if mu is None else group_mu(mu, size), "epsilon": epsilon}
        for size, epsilon in group_epsilons(guarantee, delta).items()
    }


def describe_group_privacy(guarantees: Sequence[Guarantee], delta: float) -> str:
    """Describe ε at δ for several records of one person, the largest over runs with these guarantees."""
    return (
        f"One person's records together, in the run that protects least, at δ = {format_upper_delta(delta)}: "
        + ", ".join(
            f"{size} records: ε = {format_upper_epsilon(max(bounds))}"
            for size, *bounds in zip(
                GROUP_SIZES, *(group_epsilons(guarantee, delta).values() for guarantee in guarantees), strict=True
            )
        )
        + "."
    )


_EXACT_EVALUATION = (
    "The silos evaluated {times} on their own test records, and the server got exact sums. These metrics "
    "are the server's own: they are in this report, and whoever passes it on releases exact figures of test "
    "records, for which nothing is guaranteed."
)
_NOISY_EVALUATION = (
    "The silos evaluated {times} on their own test records, and {who}: all evaluations together are {mu}-GDP "
    "for each test record ({epsilon}, {relation}). Metrics are noisy: accuracies by a standard deviation of "
    "{spread} where noise was added, losses by that times evaluation.loss_bound, all divided by the share of rows "
    "for testing where cells of a table say which these are, and they can leave their range. Test records are "
    "other records than those that trained the model, with a figure of their own; "
    "a person who has records of both kinds is protected by both together only."
)


def evaluation_mu(streams: Sequence["ReleaseStream"]) -> float | None:
    """Compute μ of all evaluations for each test record from their streams, or None without noise.

    Raises:
        InputError: If `compute_claim` refuses the streams, or their records take part in secret, so that they have
            no μ.
    """
    claim = compute_claim(streams)
    if claim is not None and claim.guarantee.mu is None:
        raise InputError("evaluations read all test records every time: their guarantee is a mu")
    return None if claim is None else claim.guarantee.mu


def evaluation_to_data(
    streams: Sequence["ReleaseStream"], trust: str, mu_of_training: float | None
) -> dict[str, Any] | None:
    """Return the entry of results.json on federated evaluation, or None without evaluations by silos.

    Args:
        streams: Streams about test records.
        trust: Trust setting of the training.
        mu_of_training: μ of the training, or None without one.

    Raises:
        InputError: If `evaluation_mu` refuses the streams.
    """
    from fedpriv.claims.ledger import stream_to_data

    if not streams:
        return None
    mu = evaluation_mu(streams)
    return {
        "by": "silos",
        "published": "without noise" if mu is None else "with noise",
        "noise_of": "nobody"
        if mu is None
        else streams[0].party_name
        if streams[0].party_name == "server"
        else "silos",
        "trust": trust,
        "mu": mu,
        "mu_with_training": None if mu is None or mu_of_training is None else compose([mu, mu_of_training]),
        "relation": streams[0].relation,
        "evaluations": streams[0].schedule.rounds,
        "releases": [stream_to_data(stream) for stream in streams],
    }


def describe_evaluation(evaluation: Mapping[str, Any], delta: float) -> str:
    """Describe federated evaluation from its entry in results.json.

    The figures are recomputed from the entry's releases.

    Args:
        evaluation: Entry `evaluation` of a cell of results.json, with one release stream or more.
        delta: δ of the ε in the text.

    Raises:
        InputError: If a release has a value that no run has, or `evaluation_mu` refuses the releases.
        KeyError, TypeError or ValueError: If the entry or a release has another form.
    """
    from fedpriv.claims.ledger import stream_from_data

    streams = list(map(stream_from_data, evaluation["releases"]))
    mu, count = evaluation_mu(streams), streams[0].schedule.rounds
    if mu is None:
        return _EXACT_EVALUATION.format(times=format_count(count, "time"))
    return _NOISY_EVALUATION.format(
        times=format_count(count, "time"),
        who="the server, which saw exact sums, added noise"
        if streams[0].party_name == "server"
        else "every silo added noise",
        mu=format_upper(mu),
        epsilon=format_epsilon_delta(epsilon_of(mu, delta), delta),
        relation=streams[0].relation,
        spread=format_lower_range([stream.std for stream in streams], 3),
    )


EXTERNAL_PARTY = "elsewhere"
"""Party name of a first step that is charged and that the run itself did not release."""
EXTERNAL_STEP_NOTE = (
    "The columns of numbers were scaled by means and deviations that the scenario gives, and that no release of "
    "this run is the source of: the figures charge them as a first step elsewhere, with the whole share of the "
    "budget that data.scale sets aside. Means that were read off the records in any other way are not covered."
)
"""Note on every claim that includes such a step."""


def has_external_first_step(releases: Sequence[Mapping[str, Any]]) -> bool:
    """Whether releases, in the form of results.json, include a step that the run did not release."""
    return any(release["owner"] == EXTERNAL_PARTY for release in releases)


def add_external_first_step(
    streams: Sequence["ReleaseStream"], first_step_mu: float
) -> tuple["ReleaseStream", ...]:
    """Add a first step to the streams of a run that uses the result of one without having taken it.

    The step is one Gaussian release by a party named "elsewhere".  A run without noise gets none.

    Guarantee: a run with noise that uses the result of a first step is charged for one.  The charge is the step
    that the run took if its streams include one, and otherwise a Gaussian release elsewhere of the whole μ, up to
    rounding, that was set aside for the step.

    Args:
        streams: Streams that the run released.
        first_step_mu: μ that is set aside for a first step, or 0 for a run that uses none.
    """
    from fedpriv.claims.ledger import FIRST_STEP, ReleaseStream
    from fedpriv.noise.diagonal import IndependentGaussian
    from fedpriv.participation.orders import FixedOrder

    noisy = [stream for stream in streams if stream.std]
    if not first_step_mu or not noisy or any(stream.step == FIRST_STEP for stream in streams):
        return tuple(streams)
    relation = noisy[0].relation
    # One release of clipped records of norm 1 and weight 1, whose noise makes its μ `first_step_mu`.
    external_step = ReleaseStream(
        party_name=EXTERNAL_PARTY,
        mechanism=IndependentGaussian(),
        schedule=FixedOrder(1, 1),
        decay=0.0,
        clips=(1.0,),
        record_weight=1.0,
        relation=relation,
        std=moved_by(relation, 1.0, 1.0) / first_step_mu,
        unit=noisy[0].unit,
        step=FIRST_STEP,
    )
    return (external_step, *streams)
