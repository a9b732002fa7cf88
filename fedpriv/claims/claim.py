"""The claim of a run: computed from its releases when it is written and whenever it is shown, and put into words.

A number without its neighbouring relation and its unit says nothing; they travel together in a `PrivacyClaim`.
Tables, pages, charts and the terminal take its figures from `facts` and its words from here: `sentence` of one
claim, `sentence_of_cells` of several that are alike, `figure_words` of a cell of results.json, which has the facts
of its claim.  Of more than one claim are the words of several records of one person, of the test records that
silos evaluate on, and of a first step that a run uses and has not taken, but is charged for.
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
"""What an exact release's guarantee takes for granted; its slack is checked when the run is planned."""
REAL_ASSUMPTIONS = "in real arithmetic"
"""The same of one in floating point."""
GROUP_SIZES = (2, 8)
_MU_TOLERANCE = 1e-9
"""Relative: by less than this μ by counting and the charged one are the same."""


Style = Literal["line", "figures", "arithmetic", "counted", "several"]
"""For whom and how much; the figures alone; for which arithmetic they hold; exact counting; several records."""


@dataclass(frozen=True)
class PrivacyClaim(Generic[Promise]):
    """A guarantee together with what it is a guarantee of.

    Guarantee: it holds for neighbouring data sets under `relation` that differ in one `unit`, whatever the
    adversary knows about all others.
    """

    guarantee: Promise
    relation: Relation
    unit: Unit = RECORD
    exact: bool = False
    """Whether it holds for the program's own arithmetic, not for real numbers alone."""
    attained: bool = False
    """Whether μ is exact: its certificate is, and the noise is what is charged.  Otherwise it is a bound."""
    mu_by_counting: float | None = None
    """μ by exact counting, where a paper's constants charge more than that; a bound too."""

    def figures(self, delta: float) -> dict[str, Any]:
        """Every figure at δ by its name in results.json; None for what there is none of."""
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
        """The guarantee in every form that it has, ε at `delta`, and what it is about."""
        return {**self.guarantee.conversions(delta), "relation": self.relation, "unit": self.unit.description}

    def format_sentence(self, style: Style, delta: float) -> str:
        """One thing that the claim says at δ as a person reads it; nothing where it has nothing of the kind."""
        return _SENTENCE_FORMATS[style](self, delta)


def describe_cells(cells: Sequence[Mapping[str, Any]]) -> str:
    """The claim of cells of results.json that differ in its figures only: for whom, against whom, and how much."""
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
"""Relative, of two ε that a reader would call one; how many silos are named one by one."""


def describe_silo_budgets(streams: Sequence["ReleaseStream"], delta: float) -> str:
    """Say which ε at δ each silo's own messages have; nothing where all have the same, or where sums are released.

    Guarantee: read off the releases, so that a silo's figure is of the noise that it added, whatever was asked.
    """
    known = [(stream, stream.guarantee) for stream in streams if stream.silos]
    each = [(stream.party_name, known.epsilon_of(delta)) for stream, known in known if known is not None]
    epsilons = [epsilon for _, epsilon in each]
    if not each or max(epsilons) <= min(epsilons) * (1.0 + _EPSILON_TOLERANCE):
        return ""
    least = "Every silo has a budget of its own, and figures without a silo's name are of the one protected least"
    if len(each) > _MAX_NAMED_SILOS:
        return (
            f"{least}: from {format_epsilon_delta(min(epsilons), delta)} to "
            f"{format_epsilon_delta(max(epsilons), delta)}."
        )
    named = ", ".join(f"{owner} ε = {format_upper_epsilon(epsilon)}" for owner, epsilon in each)
    return f"{least}: {named}, at δ = {format_upper_delta(delta)}."


def describe_silo_budgets_of_cells(cells: Sequence[Mapping[str, Any]]) -> str:
    """The same of the cell of results.json that protects least."""
    from fedpriv.claims.ledger import stream_from_data

    least = max(cells, key=lambda cell: cell["epsilon"] or 0.0)
    return describe_silo_budgets(list(map(stream_from_data, least["releases"])), least["delta"])


_FIGURES = ("mu", "zcdp", "epsilon", "epsilon_paper", "counted_mu")


def _format_line(
    claim: PrivacyClaim[Guarantee], told: Sequence[Mapping[str, Any]], delta: float, server: str
) -> str:
    """Say for whom, against which `server`, and how much of each figure, or from how much to how much."""
    values = {name: [facts[name] for facts in told if facts.get(name) is not None] for name in _FIGURES}
    shown = {
        name: (format_epsilon_range if name == "epsilon" else format_upper_range)(known)
        for name, known in values.items()
        if known
    }
    said = claim.guarantee.format_clause(
        {**shown, "delta": format_upper_delta(delta)}, all(facts.get("attained") for facts in told)
    )
    return f"{claim.unit.description}, {claim.relation} neighbours{server}: {said}"


def format_figures(facts: Mapping[str, Any]) -> str:
    """The figures of a claim, as facts with their δ, in one line: "μ = 4, ε = 4.378 at δ = 1e-05"."""
    pair = format_epsilon_delta(facts["epsilon"], facts["delta"])
    return pair if facts["mu"] is None else f"μ = {format_upper(facts['mu'])}, {pair}"


PROTECTION_LEVELS = ((0.6, "strong"), (0.75, "moderate"), (0.95, "weak"), (1.0, "next to no"))
"""Up to which probability of guessing a record rightly protection is called what."""


def protection_level(mu: float) -> str:
    """A word for μ, by how often the best guess about one record is right."""
    return next(word for most, word in PROTECTION_LEVELS if best_guess(mu) <= most)


def describe_guess(unit: str, mus: Sequence[float]) -> str:
    """How often an attacker is right about `unit`, at the smallest and the largest μ."""
    said = dict.fromkeys(
        f"{format_upper_percent(best_guess(mu))} (μ = {format_upper(mu)}: {protection_level(mu)} protection)"
        for mu in (min(mus), max(mus))
    )
    return (
        f"An attacker who knows everything else and decides between two equally likely cases of {unit} is right "
        f"with probability at most {' to '.join(said)}."
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
    charged, fewer = claim.guarantee.mu, claim.mu_by_counting
    if charged is None or fewer is None:
        return ""
    return (
        f"Charged is μ = {format_upper(charged)}, by the paper's constants, which add more noise than that needs: "
        f"by exact counting μ is at most {format_upper(fewer)}, "
        f"{format_epsilon_delta(epsilon_of(fewer, delta), delta)}."
    )


def format_price(mu: float | None, epsilon: float | None) -> str:
    """Write μ, or ε (at the cell's δ) where there is no μ."""
    if mu is not None:
        return format_upper(mu, 6)
    return "none" if epsilon is None else f"ε = {format_upper(epsilon, 6)}"


_SENTENCE_FORMATS: dict[Style, Callable[[PrivacyClaim[Guarantee], float], str]] = {
    "line": lambda claim, delta: _format_line(claim, [claim.figures(delta)], delta, ""),
    "figures": lambda claim, delta: format_figures({**claim.figures(delta), "delta": delta}),
    "arithmetic": lambda claim, _: _INTEGER_ARITHMETIC if claim.exact else _FLOAT_ARITHMETIC,
    "counted": _describe_counting,
    "several": lambda claim, delta: (
        describe_group_privacy(claim.guarantee, delta) if claim.unit.name == RECORD.name else ""
    ),
}


def compute_claim(streams: Sequence["ReleaseStream"]) -> PrivacyClaim[Guarantee] | None:
    """The guarantee of all streams together; None if there is none (no stream, or one without noise).

    Guarantee: a unit is behind at most `unit.shared` streams: the worst ones are charged, together; of records,
    which are in one silo each, the worst one.  Steps of a run, which read the same records, are composed:
    μ² = Σ μ_step², each with its worst stream.  InputError if streams name different relations or units, and for
    steps that cannot be composed so.
    """
    by_step = {stream.step: [other for other in streams if other.step == stream.step] for stream in streams}
    return (
        _compose_claims([_compute_step_claim(each) for each in by_step.values()])
        if len(by_step) > 1
        else _compute_step_claim(streams)
    )


def _compose_claims(claims: Sequence[PrivacyClaim[Guarantee] | None]) -> PrivacyClaim[Guarantee] | None:
    """Of all steps together; None if one of them has none."""
    known = [claim for claim in claims if claim is not None]
    if len(known) < len(claims):
        return None
    if len({(claim.relation, claim.unit) for claim in known}) > 1:
        raise InputError("the steps of a run have one neighbouring relation and one unit, and these have several")
    if (mus := mus_of(claim.guarantee for claim in known)) is None:
        raise InputError("a first step is composed with rounds in a public order only")
    counted = [claim.mu_by_counting or mu for claim, mu in zip(known, mus, strict=True)]
    return PrivacyClaim(
        GaussianDP(compose(mus)),
        known[0].relation,
        known[0].unit,
        all(claim.exact for claim in known),
        mu_by_counting=None if all(claim.mu_by_counting is None for claim in known) else compose(counted),
    )


def _compute_step_claim(streams: Sequence["ReleaseStream"]) -> PrivacyClaim[Guarantee] | None:
    relations, units = {stream.relation for stream in streams}, {stream.unit for stream in streams}
    if len(relations) > 1:
        raise InputError(f"a run has one neighbouring relation, this ledger has {', '.join(sorted(relations))}")
    if len(units) > 1:
        raise InputError(
            f"a run protects one unit, this ledger has {', '.join(sorted(unit.name for unit in units))}"
        )
    guarantees = [stream.guarantee for stream in streams]
    known = [each for each in guarantees if each is not None]
    if not known or len(known) < len(guarantees):
        return None
    exact, unit = all(stream.integer_release for stream in streams), units.pop()
    if unit.max_silos > 1:
        return PrivacyClaim(_compose_silos(streams, known, unit.max_silos), relations.pop(), unit, exact)
    together = weakest(known)
    claim = PrivacyClaim(together, relations.pop(), unit, exact)
    if exact or (mu := together.mu) is None:
        return claim
    counted = max(stream.mu_by_counting for stream in streams)
    return replace(
        claim,
        attained=any(stream.attained and stream.mu == mu for stream in streams),
        mu_by_counting=counted if counted < mu * (1 - _MU_TOLERANCE) else None,
    )


def _compose_silos(streams: Sequence["ReleaseStream"], known: Sequence[Guarantee], shared: int) -> Guarantee:
    """What units promise that are behind up to `shared` of the silos' streams: those of the largest μ together."""
    if (mus := mus_of(known)) is None:
        raise InputError(f"shared = {shared}: persons in several silos are accounted for in public orders only")
    each = [mu for stream, mu in zip(streams, mus, strict=True) for _ in stream.silos[:shared] or (0,)]
    return GaussianDP(compose(sorted(each, reverse=True)[:shared]))


def compute_claim_from_data(releases: Sequence[Mapping[str, Any]]) -> PrivacyClaim[Guarantee] | None:
    """The claim of releases as results.json has them; cells of one sweep that released alike share the answer."""
    return _compute_claim_from_text(json.dumps(releases))


@lru_cache(maxsize=1024)
def _compute_claim_from_text(text: str) -> PrivacyClaim[Guarantee] | None:
    from fedpriv.claims.ledger import stream_from_data

    return compute_claim(list(map(stream_from_data, json.loads(text))))


def claim_figures(claim: PrivacyClaim[Guarantee] | None, delta: float) -> dict[str, Any]:
    """Every figure of a claim at δ by its name in results.json; None for what it has not.

    Guarantee: it looks at the claim alone, so that a table cannot show what was not released.
    """
    if claim is not None:
        return claim.figures(delta)
    nothing = ("counted_mu", "several_records", "mu", "zcdp", "epsilon", "epsilon_paper")
    return {"guarantee": "none", "holds": None, "attained": False, **dict.fromkeys(nothing)}


@lru_cache(maxsize=64)  # the seeds of a sweep promise the same, and a chain takes its time
def group_epsilons(guarantee: Guarantee, delta: float) -> Mapping[int, float]:
    """ε at δ for k units at once, by k.

    Guarantee: exact for public orders, where all k meet in one round: k·μ.  Where rounds are secret it is the
    smallest of up to three bounds: the chain through k neighbours, k·μ of rounds that everybody knows, and the law
    of how many of k units join.  The second always gives a number.
    """
    return {size: guarantee.epsilon_of_group(size, delta) for size in GROUP_SIZES}


def group_bounds(guarantee: Guarantee, delta: float) -> dict[str, dict[str, float | None]]:
    """The same as data, by k: ε at δ, and μ where there is one.

    Guarantee: k records of one person, whichever rounds they take part in, are protected by this at least.
    """
    mu = guarantee.mu
    return {
        str(size): {"mu": None if mu is None else group_mu(mu, size), "epsilon": epsilon}
        for size, epsilon in group_epsilons(guarantee, delta).items()
    }


def describe_group_privacy(guarantee: Guarantee, delta: float) -> str:
    """A sentence of a report, after the one that says whom records presume; of the run that protects least."""
    told = ", ".join(
        f"{size} records: ε = {format_upper_epsilon(epsilon)}"
        for size, epsilon in group_epsilons(guarantee, delta).items()
    )
    return (
        f"One person's records together, in the run that protects least, at δ = {format_upper_delta(delta)}: "
        f"{told}."
    )


_EXACT_EVALUATION = (
    "The silos evaluated {times} on their own test records, and the server got exact sums. These metrics "
    "are its own: they are in this report, and whoever passes it on releases test records, for which nothing is "
    "guaranteed."
)
_NOISY_EVALUATION = (
    "The silos evaluated {times} on their own test records, and {who}: all evaluations together are "
    "{mu}-GDP for each test record ({epsilon}, {relation}). Metrics are "
    "noisy: accuracies by a standard deviation of {spread} where noise was added, losses by that times "
    "evaluation.loss_bound, and they can leave their range. Test records are other records than those that "
    "trained the model, with a figure of their own; a person who has records of both kinds is protected by both "
    "together only."
)


def evaluation_mu(streams: Sequence["ReleaseStream"]) -> float | None:
    """μ of all evaluations for each test record, from the streams alone; None without noise.

    InputError for streams of evaluations that read records in secret: there are none such.
    """
    claim = compute_claim(streams)
    if claim is not None and claim.guarantee.mu is None:
        raise InputError("evaluations read all test records every time: their guarantee is a mu")
    return None if claim is None else claim.guarantee.mu


def evaluation_to_data(
    streams: Sequence["ReleaseStream"], trust: str, mu_of_training: float | None
) -> dict[str, Any] | None:
    """What results.json says of a run's evaluations; None where the server evaluated on a public test set."""
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


def describe_evaluation(told: Mapping[str, Any], delta: float) -> str:
    """The same as a person reads it; figures are recomputed from the releases."""
    from fedpriv.claims.ledger import stream_from_data

    streams = list(map(stream_from_data, told["releases"]))
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
"""The owner of a first step that is charged, and not released by the run that has it in its ledger."""
EXTERNAL_STEP_NOTE = (
    "The columns of numbers were scaled by means and deviations that the scenario gives, and that no release of "
    "this run is the source of: the figures charge them as a first step elsewhere, with the whole share of the "
    "budget that data.scale sets aside. Means that were read off the records in any other way are not covered."
)
"""What is said of every claim with such a step in it."""


def has_external_first_step(releases: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a ledger, as data, charges a step that the run did not release."""
    return any(release["owner"] == EXTERNAL_PARTY for release in releases)


def add_external_first_step(streams: Sequence["ReleaseStream"], beside: float) -> tuple["ReleaseStream", ...]:
    """The ledger of a run whose promise has a first step beside the rounds, of μ = `beside` if it is above 0.

    Guarantee: a run that uses what a first step gave is charged for one: for the step that it took, if that is
    in the ledger, and else for a Gaussian release elsewhere of the whole μ that was set aside for it.
    """
    from fedpriv.claims.ledger import FIRST_STEP, ReleaseStream
    from fedpriv.noise.diagonal import IndependentGaussian
    from fedpriv.participation.orders import FixedOrder

    noisy = [stream for stream in streams if stream.std]
    if not beside or not noisy or any(stream.step == FIRST_STEP for stream in streams):
        return tuple(streams)
    relation = noisy[0].relation
    other = ReleaseStream(
        party_name=EXTERNAL_PARTY,
        mechanism=IndependentGaussian(),
        schedule=FixedOrder(1, 1),
        decay=0.0,
        clips=(1.0,),
        record_weight=1.0,
        relation=relation,
        std=moved_by(relation, 1.0, 1.0) / beside,
        unit=noisy[0].unit,
        step=FIRST_STEP,
    )
    return (other, *streams)
