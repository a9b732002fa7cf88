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

from fedpriv.accounting.curves import mu_together
from fedpriv.accounting.gaussian import Relation, compose, epsilon_of, moved_by
from fedpriv.accounting.guarantees import GaussianDP, Guarantee, Promise, mus_of, weakest
from fedpriv.core.errors import InputError
from fedpriv.core.figures import (
    best_guess,
    counted,
    delta_figure,
    epsilon_figure,
    epsilon_range,
    epsilon_words,
    lower_range,
    upper_figure,
    upper_percent,
    upper_range,
)
from fedpriv.noise.trust import RECORD, Unit, trust_named

if TYPE_CHECKING:
    from fedpriv.claims.ledger import ReleaseStream

EXACT = "up to 2^-60 in total variation (δ grows by (1 + e^ε) · 2^-60), if AES-256 is a pseudorandom permutation"
"""What an exact release's guarantee takes for granted; its slack is checked when the run is planned."""
REAL = "in real arithmetic"
"""The same of one in floating point."""
SIZES = (2, 8)
_NOTHING = 1e-9
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
    counted: float | None = None
    """μ by exact counting, where a paper's constants charge more than that; a bound too."""

    def facts(self, delta: float) -> dict[str, Any]:
        """Every figure at δ by its name in results.json; None for what there is none of."""
        return {
            "guarantee": self.guarantee.kind,
            "holds": EXACT if self.exact else REAL,
            "attained": self.attained,
            "counted_mu": self.counted,
            "several_records": bounds_of_several(self.guarantee, delta) if self.unit.name == RECORD.name else None,
            **self.guarantee.figures(delta),
            "relation": self.relation,
            "unit": self.unit.words,
        }

    def conversions(self, delta: float) -> dict[str, Any]:
        """The guarantee in every form that it has, ε at `delta`, and what it is about."""
        return {**self.guarantee.conversions(delta), "relation": self.relation, "unit": self.unit.words}

    def sentence(self, style: Style, delta: float) -> str:
        """One thing that the claim says at δ as a person reads it; nothing where it has nothing of the kind."""
        return _SENTENCES[style](self, delta)


def sentence_of_cells(cells: Sequence[Mapping[str, Any]]) -> str:
    """The claim of cells of results.json that differ in its figures only: for whom, against whom, and how much."""
    first = cells[0]
    server = trust_named(first["trust"]).title
    claim = claim_of_data(first["releases"])
    if claim is None or first["epsilon"] is None:
        return f"Privacy: none, {server}: the run adds no noise."
    seeded = " (seeded, not for release)" if first["noise"] == "simulation" else ""
    up_to = "" if first.get("holds") in (None, REAL) else f", {EXACT}"
    line = _line(claim, cells, first["delta"], f", {server}")
    silos = of_each_silo_of(cells)
    return f"Privacy: {line}; {first['noise']} noise{seeded}{up_to}.{' ' if silos else ''}{silos}"


_SAME, _MOST_NAMED = 1e-6, 12
"""Relative, of two ε that a reader would call one; how many silos are named one by one."""


def of_each_silo(streams: Sequence["ReleaseStream"], delta: float) -> str:
    """Say which ε at δ each silo's own messages have; nothing where all have the same, or where sums are released.

    Guarantee: read off the releases, so that a silo's figure is of the noise that it added, whatever was asked.
    """
    known = [(stream, stream.guarantee) for stream in streams if stream.silos]
    each = [(stream.owner, known.epsilon_of(delta)) for stream, known in known if known is not None]
    epsilons = [epsilon for _, epsilon in each]
    if not each or max(epsilons) <= min(epsilons) * (1.0 + _SAME):
        return ""
    least = "Every silo has a budget of its own, and figures without a silo's name are of the one protected least"
    if len(each) > _MOST_NAMED:
        return f"{least}: from {epsilon_words(min(epsilons), delta)} to {epsilon_words(max(epsilons), delta)}."
    named = ", ".join(f"{owner} ε = {epsilon_figure(epsilon)}" for owner, epsilon in each)
    return f"{least}: {named}, at δ = {delta_figure(delta)}."


def of_each_silo_of(cells: Sequence[Mapping[str, Any]]) -> str:
    """The same of the cell of results.json that protects least."""
    from fedpriv.claims.ledger import from_data

    least = max(cells, key=lambda cell: cell["epsilon"] or 0.0)
    return of_each_silo(list(map(from_data, least["releases"])), least["delta"])


_FIGURES = ("mu", "zcdp", "epsilon", "epsilon_paper", "counted_mu")


def _line(claim: PrivacyClaim[Guarantee], told: Sequence[Mapping[str, Any]], delta: float, server: str) -> str:
    """Say for whom, against which `server`, and how much of each figure, or from how much to how much."""
    values = {name: [facts[name] for facts in told if facts.get(name) is not None] for name in _FIGURES}
    shown = {
        name: (epsilon_range if name == "epsilon" else upper_range)(known)
        for name, known in values.items()
        if known
    }
    said = claim.guarantee.words(
        {**shown, "delta": delta_figure(delta)}, all(facts.get("attained") for facts in told)
    )
    return f"{claim.unit.words}, {claim.relation} neighbours{server}: {said}"


def figure_words(facts: Mapping[str, Any]) -> str:
    """The figures of a claim, as facts with their δ, in one line: "μ = 4, ε = 4.378 at δ = 1e-05"."""
    pair = epsilon_words(facts["epsilon"], facts["delta"])
    return pair if facts["mu"] is None else f"μ = {upper_figure(facts['mu'])}, {pair}"


GUESSES = ((0.6, "strong"), (0.75, "moderate"), (0.95, "weak"), (1.0, "next to no"))
"""Up to which probability of guessing a record rightly protection is called what."""


def protection_word(mu: float) -> str:
    """A word for μ, by how often the best guess about one record is right."""
    return next(word for most, word in GUESSES if best_guess(mu) <= most)


def guess_sentence(unit: str, mus: Sequence[float]) -> str:
    """How often an attacker is right about `unit`, at the smallest and the largest μ."""
    said = dict.fromkeys(
        f"{upper_percent(best_guess(mu))} (μ = {upper_figure(mu)}: {protection_word(mu)} protection)"
        for mu in (min(mus), max(mus))
    )
    return (
        f"An attacker who knows everything else and decides between two equally likely cases of {unit} is right "
        f"with probability at most {' to '.join(said)}."
    )


_INTEGERS = (
    "Records enter as integers of bounded size and the noise is a discrete Gaussian, sampled exactly: the figures "
    f"hold for the arithmetic of the program itself, {EXACT}."
)
_FLOATS = (
    "The noise is Gaussian in real arithmetic. What was written comes from floating-point numbers, whose lowest "
    "bits can tell more."
)


def _counted(claim: PrivacyClaim[Guarantee], delta: float) -> str:
    charged, fewer = claim.guarantee.mu, claim.counted
    if charged is None or fewer is None:
        return ""
    return (
        f"Charged is μ = {upper_figure(charged)}, by the paper's constants, which add more noise than that needs: "
        f"by exact counting μ is at most {upper_figure(fewer)}, {epsilon_words(epsilon_of(fewer, delta), delta)}."
    )


def price_words(mu: float | None, epsilon: float | None) -> str:
    """Write μ, or ε (at the cell's δ) where there is no μ."""
    if mu is not None:
        return upper_figure(mu, 6)
    return "none" if epsilon is None else f"ε = {upper_figure(epsilon, 6)}"


_SENTENCES: dict[Style, Callable[[PrivacyClaim[Guarantee], float], str]] = {
    "line": lambda claim, delta: _line(claim, [claim.facts(delta)], delta, ""),
    "figures": lambda claim, delta: figure_words({**claim.facts(delta), "delta": delta}),
    "arithmetic": lambda claim, _: _INTEGERS if claim.exact else _FLOATS,
    "counted": _counted,
    "several": lambda claim, delta: (
        words_of_several(claim.guarantee, delta) if claim.unit.name == RECORD.name else ""
    ),
}


def claim_of(streams: Sequence["ReleaseStream"]) -> PrivacyClaim[Guarantee] | None:
    """The guarantee of all streams together; None if there is none (no stream, or one without noise).

    Guarantee: a unit is behind at most `unit.shared` streams: the worst ones are charged, together; of records,
    which are in one silo each, the worst one.  Steps of a run, which read the same records, are composed:
    μ² = Σ μ_step², each with its worst stream.  InputError if streams name different relations or units, and for
    steps that cannot be composed so.
    """
    by_step = {stream.step: [other for other in streams if other.step == stream.step] for stream in streams}
    return (
        _composed([_claim_of_step(each) for each in by_step.values()])
        if len(by_step) > 1
        else _claim_of_step(streams)
    )


def _composed(claims: Sequence[PrivacyClaim[Guarantee] | None]) -> PrivacyClaim[Guarantee] | None:
    """Of all steps together; None if one of them has none."""
    known = [claim for claim in claims if claim is not None]
    if len(known) < len(claims):
        return None
    if len({(claim.relation, claim.unit) for claim in known}) > 1:
        raise InputError("the steps of a run have one neighbouring relation and one unit, and these have several")
    if (mus := mus_of(claim.guarantee for claim in known)) is None:
        raise InputError("a first step is composed with rounds in a public order only")
    counted = [claim.counted or mu for claim, mu in zip(known, mus, strict=True)]
    return PrivacyClaim(
        GaussianDP(compose(mus)),
        known[0].relation,
        known[0].unit,
        all(claim.exact for claim in known),
        counted=None if all(claim.counted is None for claim in known) else compose(counted),
    )


def _claim_of_step(streams: Sequence["ReleaseStream"]) -> PrivacyClaim[Guarantee] | None:
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
    exact, unit = all(stream.integers for stream in streams), units.pop()
    if unit.shared > 1:
        return PrivacyClaim(_in_several(streams, known, unit.shared), relations.pop(), unit, exact)
    together = weakest(known)
    claim = PrivacyClaim(together, relations.pop(), unit, exact)
    if exact or (mu := together.mu) is None:
        return claim
    counted = max(stream.counted for stream in streams)
    return replace(
        claim,
        attained=any(stream.attained and stream.mu == mu for stream in streams),
        counted=counted if counted < mu * (1 - _NOTHING) else None,
    )


def _in_several(streams: Sequence["ReleaseStream"], known: Sequence[Guarantee], shared: int) -> Guarantee:
    """What units promise that are behind up to `shared` of the silos' streams: those of the largest μ together."""
    if (mus := mus_of(known)) is None:
        raise InputError(f"shared = {shared}: persons in several silos are accounted for in public orders only")
    each = [mu for stream, mu in zip(streams, mus, strict=True) for _ in stream.silos[:shared] or (0,)]
    return GaussianDP(compose(sorted(each, reverse=True)[:shared]))


def claim_of_data(releases: Sequence[Mapping[str, Any]]) -> PrivacyClaim[Guarantee] | None:
    """The claim of releases as results.json has them; cells of one sweep that released alike share the answer."""
    return _claim_of_text(json.dumps(releases))


@lru_cache(maxsize=1024)
def _claim_of_text(text: str) -> PrivacyClaim[Guarantee] | None:
    from fedpriv.claims.ledger import from_data

    return claim_of(list(map(from_data, json.loads(text))))


def figures_of(claim: PrivacyClaim[Guarantee] | None, delta: float) -> dict[str, Any]:
    """Every figure of a claim at δ by its name in results.json; None for what it has not.

    Guarantee: it looks at the claim alone, so that a table cannot show what was not released.
    """
    if claim is not None:
        return claim.facts(delta)
    nothing = ("counted_mu", "several_records", "mu", "zcdp", "epsilon", "epsilon_paper")
    return {"guarantee": "none", "holds": None, "attained": False, **dict.fromkeys(nothing)}


@lru_cache(maxsize=64)  # the seeds of a sweep promise the same, and a chain takes its time
def epsilons_of_several(guarantee: Guarantee, delta: float) -> Mapping[int, float]:
    """ε at δ for k units at once, by k.

    Guarantee: exact for public orders, where all k meet in one round: k·μ.  Where rounds are secret it is the
    smallest of up to three bounds: the chain through k neighbours, k·μ of rounds that everybody knows, and the law
    of how many of k units join.  The second always gives a number.
    """
    return {size: guarantee.epsilon_of_group(size, delta) for size in SIZES}


def bounds_of_several(guarantee: Guarantee, delta: float) -> dict[str, dict[str, float | None]]:
    """The same as data, by k: ε at δ, and μ where there is one.

    Guarantee: k records of one person, whichever rounds they take part in, are protected by this at least.
    """
    mu = guarantee.mu
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


_EXACT = (
    "The silos evaluated {times} on their own test records, and the server got exact sums. These metrics "
    "are its own: they are in this report, and whoever passes it on releases test records, for which nothing is "
    "guaranteed."
)
_NOISY = (
    "The silos evaluated {times} on their own test records, and {who}: all evaluations together are "
    "{mu}-GDP for each test record ({epsilon}, {relation}). Metrics are "
    "noisy: accuracies by a standard deviation of {spread} where noise was added, losses by that times "
    "evaluation.loss_bound, and they can leave their range. Test records are other records than those that "
    "trained the model, with a figure of their own; a person who has records of both kinds is protected by both "
    "together only."
)


def mu_of_tests(streams: Sequence["ReleaseStream"]) -> float | None:
    """μ of all evaluations for each test record, from the streams alone; None without noise.

    InputError for streams of evaluations that read records in secret: there are none such.
    """
    claim = claim_of(streams)
    if claim is not None and claim.guarantee.mu is None:
        raise InputError("evaluations read all test records every time: their guarantee is a mu")
    return None if claim is None else claim.guarantee.mu


def evaluation_data(
    streams: Sequence["ReleaseStream"], trust: str, mu_of_training: float | None
) -> dict[str, Any] | None:
    """What results.json says of a run's evaluations; None where the server evaluated on a public test set."""
    from fedpriv.claims.ledger import as_data

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
    from fedpriv.claims.ledger import from_data

    streams = list(map(from_data, told["releases"]))
    mu, count = mu_of_tests(streams), streams[0].schedule.rounds
    if mu is None:
        return _EXACT.format(times=counted(count, "time"))
    return _NOISY.format(
        times=counted(count, "time"),
        who="the server, which saw exact sums, added noise"
        if streams[0].owner == "server"
        else "every silo added noise",
        mu=upper_figure(mu),
        epsilon=epsilon_words(epsilon_of(mu, delta), delta),
        relation=streams[0].relation,
        spread=lower_range([stream.std for stream in streams], 3),
    )


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


def with_other_step(streams: Sequence["ReleaseStream"], beside: float) -> tuple["ReleaseStream", ...]:
    """The ledger of a run whose promise has a first step beside the rounds, of μ = `beside` if it is above 0.

    Guarantee: a run that uses what a first step gave is charged for one: for the step that it took, if that is
    in the ledger, and else for a Gaussian release elsewhere of the whole μ that was set aside for it.
    """
    from fedpriv.claims.ledger import FIRST_STEP, ReleaseStream
    from fedpriv.noise.diagonal import IndependentGaussian
    from fedpriv.participation.orders import Schedule

    noisy = [stream for stream in streams if stream.std]
    if not beside or not noisy or any(stream.step == FIRST_STEP for stream in streams):
        return tuple(streams)
    relation = noisy[0].relation
    other = ReleaseStream(
        owner=ELSEWHERE,
        mechanism=IndependentGaussian(),
        schedule=Schedule(1, 1),
        decay=0.0,
        clips=(1.0,),
        per_record=1.0,
        relation=relation,
        std=moved_by(relation, 1.0, 1.0) / beside,
        unit=noisy[0].unit,
        step=FIRST_STEP,
    )
    return (other, *streams)
