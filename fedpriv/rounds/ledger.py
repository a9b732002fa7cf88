"""What was released, as data: accounting interprets these records and nothing else.

A `ReleaseStream` says what one owner of noise (a silo, several alike, or the server) published over a run; the
guarantee of the run is recomputed from the streams alone.

What keys of releases were called in earlier versions: read here, and never written.

What a release promises, in one typed, printable value.

A number without its neighbouring relation and its unit says nothing; they travel together here.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple

import numpy as np

from fedpriv.accounting.gaussian import Relation, compose, moved_by, relation_named
from fedpriv.accounting.guarantees import GaussianDP, Guarantee, Promise, weakest
from fedpriv.core.errors import InputError
from fedpriv.noise.integers.claim import Claim
from fedpriv.noise.integers.plan import claimed
from fedpriv.noise.integers.strategies import Lattice
from fedpriv.noise.mechanism import Mechanism, Sensitivity
from fedpriv.noise.registry import integer_form, mechanism_from
from fedpriv.noise.trust import RECORD, Unit, unit_from
from fedpriv.noise.workload import Workload
from fedpriv.participation.clients import participation_from
from fedpriv.participation.orders import Participation

RENAMED = {"keep": "decay", "places": "rounds_per_epoch"}
"""The name of fedpriv 0.1 -> today's."""


def current(value: Any) -> Any:
    """Plain data with today's keys, at every depth."""
    if isinstance(value, Mapping):
        return {RENAMED.get(key, key): current(entry) for key, entry in value.items()}
    return [current(entry) for entry in value] if isinstance(value, list) else value


EXACT = "up to 2^-60 in total variation (δ grows by (1 + e^ε) · 2^-60), if AES-256 is a pseudorandom permutation"
"""What an exact release's guarantee takes for granted; its slack is checked when the run is planned."""


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

    def statement(self, delta: float) -> str:
        """The claim as a person reads it, on one line."""
        claimed = self.guarantee.statement(delta)
        if self.exact:
            claimed = f"{claimed}, {EXACT}"
        return f"{claimed}; {self.relation} neighbours, unit: {self.unit.words}"


ROUNDS, FIRST_STEP = "rounds", "first step"
"""The steps of a run: what each releases of a record counts together."""


class Integers(NamedTuple):
    """The arithmetic of a release that is exact: sums are integers, noise is a discrete Gaussian."""

    exponent: int
    """The lattice's unit is 2 to this power."""
    sigma: float
    """Of a fresh vector of one owner and scale 1, in units."""
    dimension: int
    owners: int
    """How many add noise of `sigma` each."""


@dataclass(frozen=True)
class ReleaseStream:
    """Noisy running sums released in rounds 1 … `schedule.rounds` by `owner`.

    | field | meaning | unit |
    |---|---|---|
    | `owner` | "server", "silo 3" or "silos 0-99" (alike, each with noise of its own) | |
    | `schedule` | which rounds a record takes part in | |
    | `decay` | decay of the running sum | |
    | `clips` | norm bound on one record's increment, one a round | gradient |
    | `per_record` | weight of one record's increment in what is released: 1/B_i, or max p_i/B_i | |
    | `std` | standard deviation of a fresh noise vector's coordinates | gradient |
    | `period` | the sums restart from 0 every so many rounds; None if they never do | rounds |
    | `unit` | whose increment is clipped: where other fields say record, read this | |
    | `integers` | how an exact release was made; None for floating point, whose claim is one in real numbers | |
    | `step` | "rounds", or "first step", released before them of the same records | |
    """

    owner: str
    mechanism: Mechanism
    schedule: Participation
    decay: float
    clips: tuple[float, ...]
    per_record: float
    relation: Relation
    std: float
    period: int | None = None
    unit: Unit = RECORD
    integers: Integers | None = None
    step: str = ROUNDS

    @property
    def guarantee(self) -> Guarantee | None:
        """What the whole stream promises to each unit behind it; None without noise.

        Guarantee: neighbours differ in one `unit` under `relation`; the stream is what everybody
        outside the owner sees.  An exact release's μ follows from its integers and their noise, on the safe side
        of all rounding, and holds up to `slack`.  InputError for what cannot be accounted for.
        """
        if self.std == 0.0:
            return None
        if self.integers is None:
            return self.schedule.guarantee(self.sums, self.std)
        of_one, silos = self._claimed(self.integers).mu, self._silos_of_a_unit
        mu = of_one if silos == 1 else math.nextafter(silos * of_one, math.inf)
        return self.schedule.promised(mu, self.relation)

    @property
    def slack(self) -> float:
        """Up to which total variation an exact release's guarantee holds; 0 in real numbers."""
        return 0.0 if self.integers is None else self._claimed(self.integers).slack

    @property
    def _silos_of_a_unit(self) -> int:
        """In how many of the silos whose increments this stream adds up one unit can have records.

        What it moves in each adds up, and rounding with it: so many times what one silo's records move.
        """
        return 1 if self.owner.startswith("silo") else self.unit.shared

    def _claimed(self, integers: Integers) -> Claim:
        """For the records of a unit in one silo."""
        exponent, sigma, dimension, owners = integers
        form = integer_form(self.mechanism, replace(self.workload, schedule=self.schedule.known))
        return claimed(form, Lattice(exponent), self.relation, dimension, sigma, owners)

    @property
    def mu(self) -> float:
        """The exact Gaussian-DP parameter of a stream in public order; inf without noise."""
        guarantee = self.guarantee
        if guarantee is None:
            return math.inf
        if not isinstance(guarantee, GaussianDP):
            raise InputError(
                f"a stream with {self.schedule.name} sampling has no mu: its guarantee is a curve of (ε, δ)"
            )
        return guarantee.mu

    @property
    def workload(self) -> Workload:
        """The running sums, and who takes part in them."""
        return Workload(self.schedule, self.decay, np.array(self.clips), self.period)

    @property
    def attained(self) -> bool:
        """Whether the guarantee is an exact μ: no smaller one holds for increments up to their clips."""
        exact = self.integers is None and not self.schedule.secret and self.std > 0.0
        return exact and self.sums.certified.exact

    @property
    def counted(self) -> float:
        """`mu` by exact counting, where a mechanism charges more than a record can move."""
        share = self.mechanism.counted(self.workload).value / self.sums.certified.value
        return self.mu if share >= 1.0 else self.mu * share * (1.0 + _ROUNDING)

    @cached_property
    def sums(self) -> "RunningSums":
        """What is released, without the noise."""
        return RunningSums(self.mechanism, self.workload, self.relation, self.per_record)


_ROUNDING = 1e-14
"""Relative, of a norm of a column."""
_NOTHING = 1e-9
"""Relative: by less than this μ by counting and the charged one are the same."""


@dataclass(frozen=True)
class RunningSums:
    """Released running sums as accounting asks about them; see `participation.base.Sums`."""

    mechanism: Mechanism
    workload: Workload
    relation: Relation
    per_record: float = 1.0

    @cached_property
    def certified(self) -> Sensitivity:
        return self.mechanism.certified(self.workload)

    def sensitivity(self) -> float:
        return self.certified.value

    def clip_apart(self, groups: int) -> float:
        """κ = max_t clip_t ‖C_t‖: the norm bound of what one record adds to C s for one of its rounds.

        Guarantee: where this returns, columns of C that lie `groups` or more apart have no row in common.  What a
        round of a record moves of C s + z is then a block that no other of its rounds reaches, and its increment
        is fixed when the block begins: blocks are accounted for as rounds with independent noise, under either
        relation.  InputError for anything else, with the reason.
        """
        decay, blocks = self.workload.decay, self.mechanism.blocks(self.workload)
        refused = "secret participation (federation.sampling) cannot be accounted for"
        if blocks is None:
            raise InputError(
                f"{refused} with {self.mechanism.name} noise on running sums of decay = {decay:g}: what a record "
                "moves has no end there; take an algorithm that releases each round by itself, such as dp-sgd, or "
                'mechanism = "banded" with federation.groups of at least its bands'
            )
        if blocks.bands > groups:
            raise InputError(
                f"{refused} with {blocks.bands} bands of correlated noise and federation.groups = {groups}: what "
                f"a record moves in two of its rounds would overlap; set groups to {blocks.bands} or more, or "
                "take fewer bands"
            )
        return float(np.max(self.workload.clips * blocks.norms) * (1.0 + _ROUNDING))

    def moved(self, distance: float) -> float:
        return moved_by(self.relation, self.per_record, distance)


def claim_of(streams: Sequence[ReleaseStream]) -> PrivacyClaim[Guarantee] | None:
    """The guarantee of all streams together; None if there is none (no stream, or one without noise).

    Guarantee: a unit is behind at most `unit.shared` streams: the worst ones are charged, together; of records,
    which are in one silo each, the worst one.  Steps of a run, which read the same records, are composed:
    μ² = Σ μ_step², each with its worst stream.  InputError if streams name different relations or units, and for
    steps that cannot be composed so.
    """
    by_step = {stream.step: [other for other in streams if other.step == stream.step] for stream in streams}
    if len(by_step) > 1:
        return _composed([_claim_of_step(each) for each in by_step.values()])
    return _claim_of_step(streams)


def _composed(claims: Sequence[PrivacyClaim[Guarantee] | None]) -> PrivacyClaim[Guarantee] | None:
    """Of all steps together; None if one of them has none."""
    known = [claim for claim in claims if claim is not None]
    if len(known) < len(claims):
        return None
    if len({(claim.relation, claim.unit) for claim in known}) > 1:
        raise InputError("the steps of a run have one neighbouring relation and one unit, and these have several")
    mus = [claim.guarantee.mu for claim in known if isinstance(claim.guarantee, GaussianDP)]
    if len(mus) < len(known):
        raise InputError("a first step is composed with rounds in a public order only")
    counted = [claim.counted or mu for claim, mu in zip(known, mus, strict=True)]
    return PrivacyClaim(
        GaussianDP(compose(mus)),
        known[0].relation,
        known[0].unit,
        all(claim.exact for claim in known),
        counted=None if all(claim.counted is None for claim in known) else compose(counted),
    )


def _claim_of_step(streams: Sequence[ReleaseStream]) -> PrivacyClaim[Guarantee] | None:
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
    if exact or not isinstance(together, GaussianDP):
        return claim
    attained = any(stream.attained and stream.mu == together.mu for stream in streams)
    counted = max(stream.counted for stream in streams)
    return replace(claim, attained=attained, counted=counted if counted < together.mu * (1 - _NOTHING) else None)


def _in_several(streams: Sequence[ReleaseStream], known: Sequence[Guarantee], shared: int) -> Guarantee:
    """What units promise that are behind up to `shared` of the silos' streams: those of the largest μ together."""
    mus = [guarantee.mu for guarantee in known if isinstance(guarantee, GaussianDP)]
    if len(mus) < len(known):
        raise InputError(f"shared = {shared}: persons in several silos are accounted for in public orders only")
    each = [mu for stream, mu in zip(streams, mus, strict=True) for _ in range(_owners_of(stream.owner))]
    return GaussianDP(compose(sorted(each, reverse=True)[:shared]))


def _owners_of(owner: str) -> int:
    """How many streams an owner's name stands for: of "silos 0-99" each has its own."""
    numbers = [int(number) for number in re.findall("[0-9]+", owner)]
    return numbers[1] - numbers[0] + 1 if owner.startswith("silos ") else 1


def as_data(stream: ReleaseStream) -> dict[str, Any]:
    """Plain data, with equal clips of consecutive rounds written as [clip, rounds]."""
    return {
        "owner": stream.owner,
        "mechanism": stream.mechanism.as_data(),
        "participation": stream.schedule.as_data(),
        "decay": stream.decay,
        "clips": [[clip, len(list(run))] for clip, run in itertools.groupby(stream.clips)],
        "per_record": stream.per_record,
        "relation": stream.relation,
        "std": stream.std,
        "period": stream.period,
        "unit": stream.unit.as_data(),
        **({} if stream.integers is None else {"integers": stream.integers._asdict()}),
        **({} if stream.step == ROUNDS else {"step": stream.step}),
    }


def from_data(data: Mapping[str, Any]) -> ReleaseStream:
    """The inverse of `as_data`, also of earlier versions'; InputError for what cannot be accounted for."""
    data = current(data)
    if not 0.0 <= data["std"] < math.inf:
        raise InputError(f"ledger: noise of standard deviation {data['std']} is none that a run can have")
    return ReleaseStream(
        owner=data["owner"],
        mechanism=mechanism_from(data["mechanism"]),
        schedule=participation_from(data.get("participation") or _participation_of_0_1(data)),
        decay=data["decay"],
        clips=tuple(clip for clip, rounds in data["clips"] for _ in range(rounds)),
        per_record=data["per_record"],
        relation=relation_named(data["relation"]),
        std=data["std"],
        period=data.get("period"),
        unit=unit_from(data.get("unit", RECORD.name)),
        integers=Integers(**data["integers"]) if data.get("integers") else None,
        step=data.get("step", ROUNDS),
    )


def _participation_of_0_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """As fedpriv 0.1 wrote it, beside the other fields of a stream."""
    if data.get("phases"):
        return {"name": "phases", "lengths": data["phases"]}
    return {
        "name": data.get("sampling", "fixed"),
        "rounds": data["rounds"],
        "rounds_per_epoch": data["rounds_per_epoch"],
    }
