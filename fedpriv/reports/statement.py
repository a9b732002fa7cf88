"""The privacy statement of a run in words that a data-protection officer can read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from fedpriv.accounting import GaussianDP
from fedpriv.accounting.gdp import compose
from fedpriv.privacy.claim import EXACT
from fedpriv.privacy.elsewhere import ELSEWHERE, STEP_ELSEWHERE
from fedpriv.privacy.evaluations import evaluation_words
from fedpriv.privacy.ledger import (
    FIRST_STEP,
    ROUNDS,
    ReleaseStream,
    claim_of,
    from_data,
)
from fedpriv.privacy.several import words_of_several
from fedpriv.privacy.trust import Trust, trust_named
from fedpriv.privacy.unit import RECORD
from fedpriv.reports.notes import choice_of_settings
from fedpriv.sweep.results import Results

_HIDDEN = {
    "replace-one": "which {unit} was used: any one may be exchanged for any other, the rest staying the same",
    "zero-out": "whether any one {unit} contributed at all, the rest staying the same",
}
_NOISE = {
    "simulation": (
        "This was a simulation. Its noise comes from a seed that is written in the results: anybody can "
        "recompute and remove it. The figures say what a deployment with secret noise would guarantee; "
        "nothing that this run wrote is protected."
    ),
}
_BY_SILOS = "Every silo drew its noise with a key from its own operating system, which has not left that silo."
_BY_THE_SERVER = (
    "The server drew the noise, with a key from its operating system. It sees what silos send without noise: all "
    "that is said here rests on the server keeping both to itself."
)
_ANY_LOSS = "Nothing about the loss or the model: what is released is clipped, {unit} by {unit}."


@dataclass(frozen=True)
class Level:
    """One level of protection among the cells of a statement, as it is printed; "none" for what there is none."""

    mu: str
    zcdp: str
    epsilon: str
    epsilon_paper: str
    delta: str
    attacker: str
    """How often the best guess about one record is right, where guessing blindly is right in 50 %."""


@dataclass(frozen=True)
class Statement:
    """What holds for all cells with one trust setting, relation, kind of noise and kind of guarantee.

    Guarantee: `levels` are recomputed from the recorded releases, not read from what was claimed.
    """

    private: bool
    sampled: bool
    """Whether it rests on who takes part when staying secret: no μ, and ε and the best guess are upper bounds."""
    trust: str
    protects: str
    unit: str
    hidden: str
    relation: str
    noise: str
    mechanisms: Sequence[str]
    levels: Sequence[Level]
    evaluations: Sequence[str]
    """Whose the metrics are, and what they cost test records, where silos evaluated."""
    about_the_loss: Sequence[str]
    """What the figures take for granted about loss and model."""
    assumptions: Sequence[str]
    """What they take for granted about units, noise, numbers and choices."""


_INTEGERS = (
    "Records enter as integers of bounded size and the noise is a discrete Gaussian, sampled exactly: the figures "
    f"hold for the arithmetic of the program itself, {EXACT}."
)
_REAL = (
    "The noise is Gaussian in real arithmetic. What was written comes from floating-point numbers, whose lowest "
    "bits can tell more."
)
_FIRST = "first step, means and squares of the columns of numbers"
_COMPOSED = (
    "The columns of numbers were scaled by noisy means and deviations that a first step released: the figures are "
    "of that step and of the rounds together."
)
_ASSUMPTIONS = (
    "Every {unit} takes part only in the rounds that the schedule says, and its contribution is clipped there.",
)
_UNTOUCHED = (
    "Settings were chosen without a look at the data, or that look was accounted for elsewhere: choosing the best "
    "of several runs is not part of these figures."
)
NOT_PROTECTED = (
    "That a silo takes part, how many records it contributes, and when it answers.",
    "What the model says about the population: that is what it is for.",
    "A silo's records from the silo itself or its administrator.",
)


def statements(results: Results) -> list[Statement]:
    """A statement for each combination of trust, relation, unit, noise and δ among the finished cells."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for cell in results.cells:
        unit = from_data(cell["releases"][0]).unit
        kind = (cell["trust"], cell["relation"], cell["noise"], cell["delta"], unit, cell["mu"] is None)
        groups.setdefault(kind, []).append(cell)
    choice = choice_of_settings(results) or [_UNTOUCHED]
    return [_statement(cells, _together(results.cells, cells[0]["relation"]), choice) for cells in groups.values()]


def _together(cells: Sequence[Mapping[str, Any]], relation: str) -> str:
    """What all real releases under one relation cost a record that takes part in each; nothing for one or none."""
    claims = [
        claim_of(list(map(from_data, cell["releases"])))
        for cell in cells
        if cell["noise"] == "release" and cell["relation"] == relation
    ]
    mus = [claim.guarantee.mu for claim in claims if claim and isinstance(claim.guarantee, GaussianDP)]
    if len(mus) < 2:
        return ""
    return (
        f" Every figure is of one run. A record that takes part in these {len(mus)} runs is protected by all of "
        f"them together only: μ = {compose(mus):.4g}, and runs elsewhere come on top."
    )


def _statement(cells: Sequence[Mapping[str, Any]], together: str, choice: Sequence[str]) -> Statement:
    first = cells[0]
    streams = [list(map(from_data, cell["releases"])) for cell in cells]
    unit = streams[0][0].unit
    levels = {_level(released, first["delta"]) for released in streams}
    known = [level for level in levels if level is not None]
    return Statement(
        private=bool(known) and None not in levels,
        sampled=any(stream.schedule.secret for released in streams for stream in released),
        trust=first["trust"],
        protects=trust_named(first["trust"]).protection_of(unit),
        unit=unit.words,
        hidden=_HIDDEN[first["relation"]].format(unit=unit.noun),
        relation=first["relation"],
        noise=_noise(first["noise"], trust_named(first["trust"]))
        + (together if first["noise"] == "release" else ""),
        mechanisms=sorted({_described_noise(stream) for released in streams for stream in released}),
        levels=sorted(known, key=lambda level: float(level.epsilon)),
        evaluations=sorted(
            {evaluation_words(told, cell["delta"]) for cell in cells if (told := cell.get("evaluation"))}
        ),
        about_the_loss=sorted({about_the_loss(stream) for released in streams for stream in released}),
        assumptions=[
            unit.presumes,
            *_of_several(streams, first["delta"]),
            *(text.format(unit=unit.noun) for text in _ASSUMPTIONS),
            *choice,
            *_steps(streams),
            *_arithmetic(streams),
        ],
    )


def _steps(streams: Sequence[Sequence[ReleaseStream]]) -> list[str]:
    """That figures are of several steps together, and of which."""
    first = [stream for released in streams for stream in released if stream.step == FIRST_STEP]
    here = any(stream.owner != ELSEWHERE for stream in first)
    return [_COMPOSED] * here + [STEP_ELSEWHERE] * any(stream.owner == ELSEWHERE for stream in first)


def _arithmetic(streams: Sequence[Sequence[ReleaseStream]]) -> list[str]:
    """What figures of these cells take for granted about numbers; nothing where nothing is private."""
    claims = [claim for released in streams if (claim := claim_of(released)) is not None]
    if not claims:
        return []
    return [_INTEGERS if all(claim.exact for claim in claims) else _REAL]


def _of_several(streams: Sequence[Sequence[ReleaseStream]], delta: float) -> list[str]:
    """What the run that protects least says of persons with several records, where it protects records."""
    claims = [claim for released in streams if (claim := claim_of(released)) is not None]
    if not claims or claims[0].unit.name != RECORD.name:
        return []
    worst = max((claim.guarantee for claim in claims), key=lambda guarantee: guarantee.epsilon_of(delta))
    return [words_of_several(worst, delta)]


def _noise(kind: str, trust: Trust) -> str:
    """Who could recompute the noise; nothing where there is none."""
    if kind == "release":
        return _BY_THE_SERVER if trust.noise_at_server else _BY_SILOS
    return _NOISE.get(kind, "")


def about_the_loss(stream: ReleaseStream) -> str:
    """On what the sensitivity rests beside the clips."""
    return stream.mechanism.assumption or _ANY_LOSS.format(unit=stream.unit.noun)


def _level(streams: Sequence[ReleaseStream], delta: float) -> Level | None:
    claim = claim_of(streams)
    if claim is None:
        return None
    guarantee = claim.guarantee
    if not isinstance(guarantee, GaussianDP):
        epsilon, advantage = guarantee.epsilon_of(delta), guarantee.delta_of(0.0)
        return Level("none", "none", f"{epsilon:.4g}", "none", f"{delta:g}", percent((1.0 + advantage) / 2.0))
    mu, pair = guarantee.mu, guarantee.epsilon_delta(delta)
    return Level(
        mu=f"{mu:.4g}",
        zcdp=f"{guarantee.zcdp:.4g}",
        epsilon=f"{pair.exact:.4g}",
        epsilon_paper=f"{pair.paper:.4g}",
        delta=f"{delta:g}",
        attacker=percent(best_guess(mu)),
    )


def best_guess(mu: float) -> float:
    """The probability of guessing rightly which of two equally likely neighbouring data sets was used: Φ(μ/2).

    Guarantee: no test on everything that is released does better; telling N(0, 1) from N(μ, 1) reaches it.
    """
    return NormalDist().cdf(mu / 2.0)


def percent(share: float) -> str:
    """Never rounded up to certainty."""
    return f"{100.0 * share:.1f} %" if share < 0.9995 else "over 99.9 %"


def _described_noise(stream: ReleaseStream) -> str:
    """Who releases what, how often, with which noise."""
    owner = stream.owner if stream.step == ROUNDS else f"{stream.owner}, {_FIRST}"
    if stream.owner == ELSEWHERE:
        return f"{owner}: charged with μ = {stream.mu:.4g}, not released here"
    if stream.std == 0.0:
        return f"{owner}: {stream.schedule.rounds} releases without noise"
    low, high = min(stream.clips), max(stream.clips)
    clip = f"{high:.5g}" if low == high else f"{low:.5g} to {high:.5g}"
    return (
        f"{owner}: {stream.mechanism.words}, fresh vectors of standard deviation {stream.std:.5g} a "
        f"coordinate; {stream.schedule.rounds} releases; each {stream.unit.noun} {stream.schedule.words}, its "
        f"increment clipped to norm {clip}"
    )
