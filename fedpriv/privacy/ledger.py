"""What was released, as data: accounting interprets these records and nothing else.

A `ReleaseStream` says what one owner of noise (a silo, several alike, or the server) published over a run; the
guarantee of the run is recomputed from the streams alone.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedpriv.accounting.guarantees import GaussianDP, Guarantee, weakest
from fedpriv.accounting.relation import Relation, moved_by, relation_named
from fedpriv.accounting.subsampled import SubsampledGaussian
from fedpriv.errors import InputError
from fedpriv.exact.claim import Claim
from fedpriv.exact.factored import factored
from fedpriv.exact.lattice import Lattice
from fedpriv.exact.plan import claimed
from fedpriv.mechanisms import Mechanism, Workload
from fedpriv.mechanisms.registry import mechanism_from
from fedpriv.participation.base import Participation
from fedpriv.participation.registry import participation_from
from fedpriv.privacy.claim import PrivacyClaim
from fedpriv.privacy.renamed import current
from fedpriv.privacy.unit import RECORD, Unit, unit_named


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
        return GaussianDP(self._claimed(self.integers).mu)

    @property
    def slack(self) -> float:
        """Up to which total variation an exact release's guarantee holds; 0 in real numbers."""
        return 0.0 if self.integers is None else self._claimed(self.integers).slack

    def _claimed(self, integers: Integers) -> Claim:
        exponent, sigma, dimension, owners = integers
        form = factored(self.mechanism, self.workload)
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
    def sums(self) -> "RunningSums":
        """What is released, without the noise."""
        return RunningSums(self.mechanism, self.workload, self.relation, self.per_record)


@dataclass(frozen=True)
class RunningSums:
    """Released running sums as accounting asks about them; see `participation.base.Sums`."""

    mechanism: Mechanism
    workload: Workload
    relation: Relation
    per_record: float = 1.0

    def sensitivity(self) -> float:
        return self.mechanism.sensitivity(self.workload)

    def clip_once(self) -> float:
        """The norm bound of one record's contribution to each release.

        Guarantee: where this returns, every release is a sum of contributions of that norm at most, of the records
        drawn in its own round, with fresh noise: the mechanism that `SubsampledGaussian` accounts for.  InputError
        for anything else, with the reason.
        """
        decay, clips = self.workload.decay, self.workload.clips
        refused = "Poisson sampling (federation.sampling) cannot be accounted for"
        if self.relation not in SubsampledGaussian.relations:
            raise InputError(
                f"{refused} under {self.relation}: amplification by sampling is known for zero-out, where a "
                "record is there or not; a factor of 2 in the noise does not give replace-one"
            )
        if decay != 0.0 or not self.mechanism.fresh:
            raise InputError(
                f"{refused} for running sums (decay = {decay:g}) or correlated noise ({self.mechanism.name}): the "
                "algebra of participations knows fixed orders only; take an algorithm that releases each round's "
                "gradient with independent noise, such as dp-sgd"
            )
        if len(set(clips.tolist())) != 1:
            raise InputError(
                f"{refused} with clips that change from round to round: {min(clips):g} to {max(clips):g}"
            )
        return float(clips[0])

    def moved(self, distance: float) -> float:
        return moved_by(self.relation, self.per_record, distance)


def claim_of(streams: Sequence[ReleaseStream]) -> PrivacyClaim[Guarantee] | None:
    """The guarantee of all streams together; None if there is none (no stream, or one without noise).

    Guarantee: silos hold disjoint records, so a record is behind one stream only and the worst stream is
    charged, never the sum.  InputError if streams name different neighbouring relations or units.
    """
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
    exact = all(stream.integers for stream in streams)
    return PrivacyClaim(weakest(known), relations.pop(), units.pop(), exact)


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
        "unit": stream.unit.name,
        **({} if stream.integers is None else {"integers": stream.integers._asdict()}),
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
        unit=unit_named(data.get("unit", RECORD.name)),
        integers=Integers(**data["integers"]) if data.get("integers") else None,
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
