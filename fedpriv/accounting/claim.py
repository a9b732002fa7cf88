"""What a release promises, in one typed, printable value.

A number without its neighbouring relation and its unit says nothing; they travel together here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar, get_args

from fedpriv.accounting import gdp, rdp, zcdp
from fedpriv.accounting.checks import check_mu
from fedpriv.accounting.subsampled import SubsampledGaussian
from fedpriv.errors import InputError

Relation = Literal["replace-one", "zero-out"]
"""Neighbours: one record exchanged for another, or one record's contribution replaced by zero."""

RELATIONS: tuple[Relation, ...] = get_args(Relation)
RELATION_FACTOR: dict[Relation, float] = {"zero-out": 1.0, "replace-one": 2.0}
"""By how many clip norms one record can move a clipped increment under each of them."""

UNIT = "one record of a silo"


def moved_by(relation: Relation, per_record: float, sensitivity: float) -> float:
    """How far, in l2 norm, one record moves a stream: summed increments of `sensitivity`, each times `per_record`.

    Calibration and ledger both call this, so that they compute with the same number to the last bit.
    """
    return RELATION_FACTOR[relation] * per_record * sensitivity


def relation_named(name: str) -> Relation:
    """`name` as a neighbouring relation; raises InputError if it is none."""
    for relation in RELATIONS:
        if name == relation:
            return relation
    raise InputError(f"relation = {name!r}: accepted are {', '.join(map(repr, RELATIONS))}")


@dataclass(frozen=True)
class EpsilonDelta:
    """(ε, δ)-DP by the two named routes, and between them what a Rényi accountant would say."""

    delta: float
    exact: float
    """The smallest ε, from the Gaussian trade-off curve."""
    rdp: float
    paper: float
    """ε = ρ + 2√(ρ ln(1/δ)), the formula the papers print."""


@dataclass(frozen=True)
class GaussianDP:
    """Exact μ-GDP: the whole transcript is as hard to tell apart as N(0, 1) from N(μ, 1)."""

    mu: float

    kind: ClassVar[str] = "gaussian-dp"

    def __post_init__(self) -> None:
        check_mu(self.mu)

    @property
    def zcdp(self) -> float:
        """ρ = μ²/2 of zero-concentrated DP."""
        return zcdp.rho_of(self.mu)

    def epsilon_delta(self, delta: float) -> EpsilonDelta:
        return EpsilonDelta(
            delta=delta,
            exact=gdp.epsilon_of(self.mu, delta),
            rdp=rdp.epsilon_of(self.mu, delta),
            paper=zcdp.paper_epsilon(self.mu, delta),
        )

    def epsilon_of(self, delta: float) -> float:
        """The smallest ε for which (ε, `delta`)-DP holds."""
        return gdp.epsilon_of(self.mu, delta)

    def statement(self, delta: float) -> str:
        """The guarantee as a person reads it."""
        pair = self.epsilon_delta(delta)
        return (
            f"{self.mu:.6g}-GDP ({self.zcdp:.6g}-zCDP), hence epsilon = {pair.exact:.6g} exactly "
            f"({pair.paper:.6g} by the papers' formula) at delta = {delta:g}"
        )


Guarantee = GaussianDP | SubsampledGaussian
"""What a stream of releases promises: an exact μ, or a curve of (ε, δ) that no μ describes."""

Promise = TypeVar("Promise", bound=Guarantee, covariant=True)


def weakest(guarantees: Sequence[Guarantee]) -> Guarantee:
    """The guarantee that all of them give, of one or more; InputError where they cannot be compared."""
    gaussian = [each for each in guarantees if isinstance(each, GaussianDP)]
    sampled = [each for each in guarantees if isinstance(each, SubsampledGaussian)]
    if gaussian and not sampled:
        return max(gaussian, key=lambda each: each.mu)
    if gaussian or len({(each.sampling_rate, each.rounds) for each in sampled}) > 1:
        raise InputError("a run is sampled throughout, at one rate for all rounds, or not at all")
    return min(sampled, key=lambda each: each.noise_multiplier)


@dataclass(frozen=True)
class PrivacyClaim(Generic[Promise]):
    """A guarantee together with what it is a guarantee of.

    Guarantee: it holds for neighbouring data sets under `relation` that differ in one `unit`, whatever the
    adversary knows about all other records.
    """

    guarantee: Promise
    relation: Relation
    unit: str = UNIT

    def statement(self, delta: float) -> str:
        """The claim as a person reads it, on one line."""
        return f"{self.guarantee.statement(delta)}; {self.relation} neighbours, unit: {self.unit}"
