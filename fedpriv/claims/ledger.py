"""Releases of a run as data, the only input of its accounting.

A `ReleaseStream` says what one owner of noise (a silo, several alike, or the server) published over a run; the
guarantee of the run is recomputed from the streams alone (`claims.claim`).
"""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fedpriv.accounting.gaussian import APART, Relation, relation_named
from fedpriv.accounting.guarantees import Guarantee
from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER
from fedpriv.noise.integers.plan import claim_for_noise
from fedpriv.noise.integers.strategies import ExactClaim, Lattice
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.registry import integer_form, mechanism_from_data
from fedpriv.noise.series import Workload
from fedpriv.noise.trust import RECORD, NoiseSource, Unit, unit_from_data
from fedpriv.participation.orders import Participation
from fedpriv.participation.registry import participation_from_data
from fedpriv.plan.calibration import batch_clips
from fedpriv.plan.evaluation import EvaluationPlan
from fedpriv.plan.plan import Plan
from fedpriv.plan.sums import IntegerRelease, RunningSums

ROUNDS, FIRST_STEP = "rounds", "first step"
"""The steps of a run: what each releases of a record counts together."""


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
    | `apart` | the largest distance of two increments, where it is known to be below 2 | clips |
    """

    party_name: str
    mechanism: Mechanism
    schedule: Participation
    decay: float
    clips: tuple[float, ...]
    record_weight: float
    relation: Relation
    std: float
    period: int | None = None
    unit: Unit = RECORD
    integer_release: IntegerRelease | None = None
    step: str = ROUNDS
    increment_diameter: float = APART

    @property
    def guarantee(self) -> Guarantee | None:
        """What the whole stream promises to each unit behind it; None without noise.

        Guarantee: neighbours differ in one `unit` under `relation`; the stream is what everybody
        outside the owner sees.  An exact release's μ follows from its integers and their noise, on the safe side
        of all rounding, and holds up to `slack`.  InputError for what cannot be accounted for.
        """
        if self.std == 0.0:
            return None
        if self.integer_release is None:
            return self.schedule.guarantee(self.sums, self.std)
        if self.schedule.secret:
            self.schedule.distance(self.sums)  # InputError where its rounds are no blocks, whoever wrote this
        # What a unit moves in each silo whose increments are summed adds up, and rounding with it.
        of_one, silos = (
            self._integer_claim(self.integer_release).mu,
            1 if self.party_name.startswith("silo") else self.unit.max_silos,
        )
        return self.schedule.guarantee_for_mu(
            of_one if silos == 1 else math.nextafter(silos * of_one, math.inf), self.relation
        )

    @property
    def silos(self) -> range:
        """Which silos have streams of their own like this one; none where the owner is the server, or a sum."""
        named = _SILO_NAMES.fullmatch(self.party_name)
        return range(int(named[1]), int(named[2] or named[1]) + 1) if named else range(0)

    @property
    def slack(self) -> float:
        """Up to which total variation an exact release's guarantee holds; 0 in real numbers."""
        return 0.0 if self.integer_release is None else self._integer_claim(self.integer_release).slack

    def _integer_claim(self, integers: IntegerRelease) -> ExactClaim:
        """For the records of a unit in one silo."""
        exponent, sigma, dimension, owners = integers
        form = integer_form(self.mechanism, replace(self.workload, schedule=self.schedule.public_order))
        return claim_for_noise(
            form, Lattice(exponent), self.relation, dimension, sigma, owners, self.increment_diameter
        )

    @property
    def mu(self) -> float:
        """The exact Gaussian-DP parameter of a stream in public order; inf without noise."""
        guarantee = self.guarantee
        if guarantee is None:
            return math.inf
        if (mu := guarantee.mu) is None:
            raise InputError(
                f"a stream with {self.schedule.name} sampling has no mu: its guarantee is a curve of (ε, δ)"
            )
        return mu

    @property
    def workload(self) -> Workload:
        """The running sums, and who takes part in them."""
        return Workload(self.schedule, self.decay, np.array(self.clips), self.period)

    @property
    def attained(self) -> bool:
        """Whether the guarantee is an exact μ: no smaller one holds for increments up to their clips.

        A distance below two clips has an allowance for rounding in it, a relative 2^-20, and is not attained.
        """
        return (
            self.integer_release is None
            and not self.schedule.secret
            and self.std > 0.0
            and self.increment_diameter == APART
            and self.sums.certified.exact
        )

    @property
    def mu_by_counting(self) -> float:
        """`mu` by exact counting, where a mechanism charges more than a record can move."""
        share = self.mechanism.charged_sensitivity(self.workload).value / self.sums.certified.value
        return self.mu if share >= 1.0 else self.mu * share * (1.0 + _ROUNDING)

    @cached_property
    def sums(self) -> "RunningSums":
        """What is released, without the noise."""
        return RunningSums(
            self.mechanism,
            self.workload,
            self.relation,
            self.record_weight,
            self.increment_diameter,
            self.integer_release is not None,
        )


_SILO_NAMES = re.compile("silos? ([0-9]+)(?:-([0-9]+))?")
_ROUNDING = 1e-14
"""Relative, of a norm of a column."""


def stream_to_data(stream: ReleaseStream) -> dict[str, Any]:
    """Plain data, with equal clips of consecutive rounds written as [clip, rounds]."""
    return {
        "owner": stream.party_name,
        "mechanism": stream.mechanism.as_data(),
        "participation": stream.schedule.to_data(),
        "decay": stream.decay,
        "clips": [[clip, len(list(run))] for clip, run in itertools.groupby(stream.clips)],
        "per_record": stream.record_weight,
        "relation": stream.relation,
        "std": stream.std,
        "period": stream.period,
        "unit": stream.unit.to_data(),
        **({} if stream.integer_release is None else {"integers": stream.integer_release._asdict()}),
        **({} if stream.step == ROUNDS else {"step": stream.step}),
        **({} if stream.increment_diameter == APART else {"apart": stream.increment_diameter}),
    }


def stream_from_data(data: Mapping[str, Any]) -> ReleaseStream:
    """The inverse of `as_data`; InputError for what cannot be accounted for."""
    if not 0.0 <= data["std"] < math.inf:
        raise InputError(f"ledger: noise of standard deviation {data['std']} is none that a run can have")
    if not isinstance(data["owner"], str):
        raise InputError(f"ledger: owner = {data['owner']!r}: expected the name of one")
    schedule = participation_from_data(data["participation"])
    return ReleaseStream(
        party_name=data["owner"],
        mechanism=mechanism_from_data(data["mechanism"]),
        schedule=schedule,
        decay=data["decay"],
        clips=tuple(clip for clip, rounds in data["clips"] for _ in range(rounds)),
        record_weight=data["per_record"],
        relation=relation_named(data["relation"]),
        std=data["std"],
        period=data["period"],
        unit=unit_from_data(data["unit"]),
        integer_release=IntegerRelease(**data["integers"]) if data.get("integers") else None,
        step=data.get("step", ROUNDS),
        increment_diameter=_read_increment_diameter(data, schedule),
    )


def _read_increment_diameter(data: Mapping[str, Any], schedule: Participation) -> float:
    """InputError for a distance that no two increments can have, or with rounds among which they move.

    Guarantee: below 2 clips only in a public order.  Where rounds are secret an increment's distance from zeros
    leaks, too, and that is a whole clip however close two increments lie.
    """
    apart = data.get("apart", APART)
    if isinstance(apart, bool) or not isinstance(apart, int | float):
        raise InputError(f"ledger: apart = {apart!r}: expected a number of clips")
    if not 1.0 <= apart <= APART or (apart < APART and sum(rounds for _, rounds in data["clips"]) != 1):
        raise InputError(f"ledger: increments that are {apart} clips apart are none that a run can have")
    if apart < APART and schedule.secret:
        raise InputError(
            f"ledger: increments that are {apart} clips apart with {schedule.title}: where rounds are secret they "
            f"are {APART:g}"
        )
    return float(apart)


def make_release_streams(plan: Plan, rounds: int) -> tuple[ReleaseStream, ...]:
    """Return what the parties of a plan have released after its first `rounds` rounds.

    Clips, weights and noise are read off the parts that compute, and not off the target that they were calibrated
    for.  Silos that are alike are one stream.  A plan without noise has one stream, with standard deviation 0.
    Masked messages are one stream: their sums, with the noise of all sources together.
    """
    unit, sources = plan.unit, plan.noise.sources
    in_mean = unit.weight_in_mean(plan.weights, plan.batch_sizes)
    if not sources:
        return (_make_stream(plan, "everyone", SERVER, unit.weight_in_silo(min(plan.batch_sizes)), 0.0, rounds),)
    if plan.masked:
        title = f"sum of {_format_parties([source.party for source in sources])}"
        return (_make_stream(plan, title, SERVER, in_mean, plan.noise.std_in_mean, rounds, len(sources)),)

    def weight_of(source: NoiseSource) -> float:
        return in_mean if source.party == SERVER else unit.weight_in_silo(plan.batch_sizes[source.party])

    alike = itertools.groupby(sources, key=lambda source: (weight_of(source), source.std))
    groups = [(key, [source.party for source in group]) for key, group in alike]
    return tuple(
        _make_stream(plan, _format_parties(parties), parties[0], weight, float(std), rounds)
        for (weight, std), parties in groups
    )


def make_silo_stream(plan: Plan, silo: int, rounds: int) -> ReleaseStream:
    """Return what one silo itself releases, with standard deviation 0 if it adds no noise."""
    weight = plan.unit.weight_in_silo(plan.batch_sizes[silo])
    return _make_stream(plan, f"silo {silo}", silo, weight, float(plan.noise.std_of(silo)), rounds)


def _make_stream(
    plan: Plan, title: str, party: int, per_record: float, std: float, rounds: int, parties: int = 1
) -> ReleaseStream:
    """`parties` is how many added the noise, and `party` one of them."""
    accounted, exact = plan.schedule.truncate(rounds), plan.exact_plan
    return ReleaseStream(
        title,
        plan.mechanism,
        accounted,
        plan.estimator.decay if exact is None else exact.inputs.factorization.workload.decay,
        batch_clips(plan.estimator, plan.schedule)[: accounted.rounds],
        per_record,
        plan.relation,
        std,
        plan.estimator.period,
        plan.unit,
        IntegerRelease(exact.lattice.exponent, exact.party_claim(party).sigma, exact.inputs.dimension, parties)
        if exact is not None and std
        else None,
        increment_diameter=plan.increment_diameter,
    )


def _format_parties(parties: list[int]) -> str:
    if parties == [SERVER]:
        return "server"
    return f"silo {parties[0]}" if len(parties) == 1 else f"silos {parties[0]}-{parties[-1]}"


def make_evaluation_streams(evaluation: EvaluationPlan | None) -> tuple[ReleaseStream, ...]:
    """Return the releases of test records in a run that is over."""
    return () if evaluation is None else make_release_streams(evaluation.plan, evaluation.plan.schedule.rounds)
