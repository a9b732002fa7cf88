"""Trust settings and units of protection, as data.

A trust setting turns one number, the mechanism's sensitivity for records clipped as the estimator says, into the
noise that each owner adds to what it releases.  Silos, server and engines ask who draws noise (`Trust.draws`,
`Noise.std_of`) and whose running sums leave (`Trust.releases`); none of them knows the name of the setting.

A unit is a row of a batch: it is clipped as a whole and takes part as a whole, and denominators count units.  The
ledger, the claim, a silo's policy, the audit and the reports say which one they speak of by this value.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedpriv.accounting.gaussian import APART, Relation, moved_by, noise_for
from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER
from fedpriv.core.replicates import Scalar

_BELOW = 1.0 - 1e-15


@dataclass(frozen=True)
class Unit:
    """Neighbouring data sets differ in one of these.

    | field | meaning |
    |---|---|
    | `name` | as scenarios, policies and ledgers write it |
    | `words` | what a claim is of: "one record of a silo" |
    | `noun` | one of them in a sentence: "record" |
    | `records` | the most records that make one up in a round |
    | `presumes` | what a claim takes for granted about them, a sentence or two |
    | `shared` | the most silos in which one has records |
    """

    name: str
    words: str
    noun: str
    records: int
    presumes: str
    shared: int = 1

    def in_silo(self, batch: int) -> float:
        """The weight of one unit's clipped contribution in a silo's mean over `batch` of them.

        Guarantee: the denominator is public; who takes part does not move it, nor how many records they have.
        """
        return 1.0 / batch

    def in_mean(self, weights: Sequence[float], batches: Sequence[int]) -> float:
        """The largest weight of one unit in the weighted mean over silos: the `shared` largest p_i / B_i.

        Guarantee: a unit has records in at most `shared` silos.
        """
        each = (weight / batch for weight, batch in zip(weights, batches, strict=True))
        return math.fsum(sorted(each, reverse=True)[: self.shared])

    def of_one_silo(self, mu: float) -> float:
        """The μ of every silo's own stream with which a unit has `mu` over all: μ/√s, rounded down.

        Guarantee: the streams of `shared` silos compose to `mu` or less.
        """
        return mu if self.shared == 1 else mu / math.sqrt(self.shared) * _BELOW

    def covers(self, other: "Unit") -> bool:
        """Whether what one of `other` contributes is a part of what one of these does."""
        order = list(UNITS)
        return other.name in order and self.name in order and order.index(other.name) <= order.index(self.name)

    def as_data(self) -> Any:
        """Plain data, from which `unit_from` makes it again."""
        if self.records == self.shared == 1:
            return self.name
        return {"name": self.name, "records": self.records, "shared": self.shared}


RECORD = Unit(
    name="record",
    words="one record of a silo",
    noun="record",
    records=1,
    presumes="A record belongs to one silo. A person with several records is protected less.",
)
USER = Unit(
    name="user",
    words="all records of one person in one silo, at most {records} a round",
    noun="person",
    records=1,
    presumes="A silo knows which of its records are of one person. The most silos in which one has any: {shared}.",
)
CLIENT = Unit(
    name="client",
    words="everything one client holds, at most {records} records a round",
    noun="client",
    records=1,
    presumes="A client holds its own records and nobody else's. A person with several clients is protected less.",
)

UNITS = {unit.name: unit for unit in (RECORD, USER, CLIENT)}
"""From the smallest to the largest."""

if TYPE_CHECKING:
    UnitName = str
else:
    UnitName = Literal[tuple(UNITS)]


def unit_named(name: str, records: int = 1, shared: int = 1) -> Unit:
    """The unit of up to `records` records a round, in up to `shared` silos; InputError if there is none such."""
    if name not in UNITS:
        raise InputError(f"unit = {name!r}: accepted are {', '.join(map(repr, UNITS))}")
    if min(records, shared) < 1 or (name == RECORD.name and max(records, shared) > 1):
        raise InputError(
            f"unit = {name!r} of {records} records in {shared} silos: a record is one in one silo, persons and "
            "clients have 1 or more"
        )
    if name == RECORD.name:
        return RECORD
    kind = UNITS[name]
    words, presumes = (text.format(records=records, shared=shared) for text in (kind.words, kind.presumes))
    return dataclasses.replace(kind, records=records, shared=shared, words=words, presumes=presumes)


def unit_from(data: str | Mapping[str, Any]) -> Unit:
    """The inverse of `Unit.as_data`; InputError for what is no unit."""
    return unit_named(data) if isinstance(data, str) else unit_named(data["name"], data["records"], data["shared"])


class NoiseSource(NamedTuple):
    """One owner's noise: node vectors of standard deviation `std`, entering the mean with weight `weight`."""

    owner: int
    std: Scalar
    weight: float


@dataclass(frozen=True)
class Noise:
    """Every noise source of a run; empty when a run is not private."""

    sources: tuple[NoiseSource, ...] = ()

    def std_of(self, owner: int) -> Scalar:
        """The standard deviation `owner` draws its node vectors with, 0 if it adds none."""
        return self._stds.get(owner, 0.0)

    @cached_property
    def _stds(self) -> dict[int, Scalar]:
        return {source.owner: source.std for source in self.sources}

    @property
    def std_in_mean(self) -> float:
        """The standard deviation of one coordinate of one fresh vector, as it enters the silos' mean."""
        return math.hypot(*(source.weight * float(source.std) for source in self.sources))


@dataclass(frozen=True)
class Trust:
    """A trust setting: what it protects against whom, and who adds the noise."""

    name: str
    title: str
    """The server and what silos do about it, in a few words."""
    protects: str
    trust_level: int
    """Trust that a silo gives, from 0, none: a silo that allows a setting allows those that ask less."""
    noise_at_server: bool = False
    masked: bool = False
    """Whether silos mask what they send, so that the server learns its sum only."""
    needs_all: str = ""
    """Why no silo can be away in a round, and what to do; empty where one can."""
    no_cohorts: str = ""
    """Why clients that take part in secret are not protected by cohorts; empty where they are."""
    protects_clients: str = ""
    """The same where units are clients in cohorts, which only some settings have."""

    def protection_of(self, unit: Unit) -> str:
        """Sentence: units of this kind are protected against these parties."""
        return self.protects_clients if unit.name == CLIENT.name and self.protects_clients else self.protects

    @property
    def private_messages(self) -> bool:
        """Whether each silo's messages keep the claim by themselves, whatever all others do."""
        return not (self.noise_at_server or self.masked)

    def covers(self, other: "Trust") -> bool:
        """Whether a silo that allows this setting allows `other`, which asks it to trust as little or less."""
        return other.trust_level <= self.trust_level

    def owners_in_release(self, silos: int) -> int:
        """Of how many owners the noise is that adds up in one release: all `silos` where each adds a share."""
        return silos if self.masked else 1

    def check_hidden(self, silos: int, private: bool) -> None:
        """ValueError for masked sums that hide nothing, or have no noise by whose size they are rounded."""
        if not self.masked:
            return
        given = f"algorithm.trust = {self.name!r}"
        if silos < 2:
            raise ValueError(f'{given}: the sum over one silo is its message; use "untrusted"')
        if not private:
            raise ValueError(
                f'{given} with privacy.mode = "none": messages are rounded to a fraction of their noise, and '
                'there is none; use "trusted"'
            )

    def charged_alone(self, allowed: "Trust") -> bool:
        """Whether a silo that allows `allowed` is charged for its own messages, not for what is made of them."""
        return self.private_messages or self.trust_level > allowed.trust_level

    def draws(self, owner: int) -> bool:
        """Whether noise is this owner's to add: a silo's number, or `SERVER`."""
        return self.noise_at_server == (owner == SERVER)

    def releases(self, owner: int) -> bool:
        """Whether the noisy running sums leave this owner, and not what they are made of."""
        return self.private_messages != (owner == SERVER)

    def noise(
        self,
        sensitivity: float,
        batch_sizes: Sequence[int],
        weights: Sequence[float],
        relation: Relation,
        mu: float,
        unit: Unit = RECORD,
        apart: float = APART,
    ) -> Noise:
        """The noise that makes every silo's records `mu`-GDP.

        `sensitivity` is `Mechanism.sensitivity` of the summed clipped increments of one record; a silo's mean
        over its batch of B_i records divides it by B_i, the weighted mean over silos multiplies by p_i.

        Guarantee: neighbours differ in one `unit` under `relation`; records stand for units here.
        Untrusted: silo i's whole message stream is mu-GDP, σ_i = factor · sensitivity / (B_i μ).
        Trusted: the whole stream of noisy means is mu-GDP for each silo,
        σ = factor · sensitivity · max_i (p_i / B_i) / μ; the server sees the silos' sums in the clear.
        Masked: the same σ, of which every silo adds an equal share, so that its message, times p_i, has standard
        deviation σ/√M: the stream of sums over all M silos, which is what the server learns, is mu-GDP for each.
        Whoever knows the shares of c silos is left with (M-c)/M of the variance: mu · √(M/(M-c)).
        Rounding is to the safe side: what the ledger computes from these deviations is never above mu.
        """
        of_mean = noise_for(mu, moved_by(relation, unit.in_mean(weights, batch_sizes), sensitivity, apart))
        if self.noise_at_server:
            return Noise((NoiseSource(SERVER, of_mean, 1.0),))
        if self.masked:
            return _equal_shares(of_mean, weights)
        own = unit.of_one_silo(mu)
        return Noise(
            tuple(
                NoiseSource(
                    silo, noise_for(own, moved_by(relation, unit.in_silo(batch), sensitivity, apart)), weight
                )
                for silo, (batch, weight) in enumerate(zip(batch_sizes, weights, strict=True))
            )
        )


def _equal_shares(of_mean: float, weights: Sequence[float]) -> Noise:
    """A source a silo, alike in the mean, whose standard deviations there make up `of_mean`, never less."""
    share = of_mean / math.sqrt(len(weights))
    while True:
        noise = Noise(tuple(NoiseSource(silo, share / weight, weight) for silo, weight in enumerate(weights)))
        if noise.std_in_mean >= of_mean:
            return noise
        share = math.nextafter(share, math.inf)


UNTRUSTED = Trust(
    name="untrusted",
    title="untrusted server",
    protects="each silo's records against the server, the other silos and everyone else",
    trust_level=0,
    no_cohorts="a server sees which clients answer",
)
SECURE_AGGREGATION = Trust(
    name="secure-aggregation",
    title="untrusted server, secure aggregation",
    protects="each silo's records against the server, which learns nothing but the sum over silos, and everyone "
    "who sees a query, as long as all silos add their share of the noise, relayed public keys are genuine, and "
    "X25519 and AES hold; whoever knows the noise of c of M silos, as each silo knows its own and as c silos do "
    "that join with the server, is left with mu times √(M/(M-c))",
    trust_level=1,
    masked=True,
    needs_all="masks cancel in the sum of all silos only, and every silo adds its share of the noise; use "
    '"untrusted" or "trusted"',
    no_cohorts="masks need the answers of all clients",
)
TRUSTED = Trust(
    name="trusted",
    title="trusted server",
    protects="each silo's records against the other silos and everyone who sees a query; not the server",
    trust_level=2,
    noise_at_server=True,
    protects_clients="each client against the other clients and everyone who sees a query; not against the "
    "server, nor, where cohorts are secret, against whoever sees which devices are contacted",
)

CURATOR = Trust(
    name="curator",
    title="curator",
    protects="each silo's records against everyone who sees the published model; not the curator, who is server "
    "and silos in one: nothing is broadcast to anyone else",
    trust_level=3,
    noise_at_server=True,
    needs_all="a curator has all records, so no silo can be away; leave it out",
)

TRUSTS = {setting.name: setting for setting in (UNTRUSTED, TRUSTED, SECURE_AGGREGATION, CURATOR)}


def trust_named(name: str) -> Trust:
    if name not in TRUSTS:
        raise InputError(f"algorithm.trust = {name!r}: accepted are {', '.join(map(repr, TRUSTS))}")
    return TRUSTS[name]
