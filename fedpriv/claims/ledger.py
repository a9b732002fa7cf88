"""Releases of a run as data, from which its privacy is accounted for.

A `ReleaseStream` describes the releases of one party (a silo, several alike, or the server) or the sums of masked
messages, over the rounds of a step.  A step is a part of a run: all its rounds, or its first step, a release
before round 1.

* An increment is a record's clipped contribution to a round, and the running sum adds increments over rounds,
  times a decay.  A clip is the norm bound of an increment.
* p_i is the weight of silo i in the mean over silos, and B_i its records (or other units) in a batch.
* Participation says which records take part in which rounds: in a public order, which everybody may know, or in
  secret rounds, which amplify privacy.
* An exact release is a sum of integers and discrete Gaussian noise.
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
from fedpriv.core.errors import InputError, refuse
from fedpriv.core.random import SERVER
from fedpriv.noise.diagonal import IndependentGaussian
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
"""Steps of a run."""


@dataclass(frozen=True)
class ReleaseStream:
    """Running sums, with any noise, that a party releases in rounds 1 … `schedule.rounds`.

    | field | meaning | unit |
    |---|---|---|
    | `party_name` | "server", "silo 3", "silos 0-99" (alike, each with independent noise), "sum of silos 0-99" | |
    | | (masked messages), "everyone" (no noise), or "elsewhere" (a first step that the run did not take) | |
    | `mechanism` | mechanism of the noise | |
    | `schedule` | participation: the rounds in which a record takes part | |
    | `decay` | decay of the running sum | |
    | `clips` | norm bound of each round's increments, in a mean over one batch (`batch_clips`) | gradient |
    | `record_weight` | weight of a record's increment in the release: 1/B_i in one silo's, and in a mean over | |
    | | silos max p_i/B_i, or the sum of the largest p_i/B_i if a unit is in several silos | |
    | `relation` | neighbouring relation | |
    | `std` | standard deviation of a fresh noise vector's coordinates | gradient |
    | `period` | number of rounds after which the sums restart from 0, or None if they never do | rounds |
    | `unit` | unit of protection, whose increment is clipped: read "unit" for "record" in other fields | |
    | `integer_release` | integers of an exact release, or None for floating point, a claim in real numbers | |
    | `step` | "rounds", or "first step", released before them from the same records | |
    | `increment_diameter` | largest distance of two increments, or 2 if no smaller one is known | clips |
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
        """Guarantee of all releases of the stream together for each unit in it, or None without noise.

        For several silos alike, it is the guarantee of each one's own releases.

        Guarantee: neighbours differ in one `unit` under `relation`, and the adversary sees the stream, and not the
        noise in it.  An exact release's guarantee follows from its integers and their noise, with roundings to the
        safe side, and holds up to `slack`.

        Raises:
            InputError: If the stream cannot be accounted for.
        """
        if self.std == 0.0:
            return None
        if self.integer_release is None:
            return self.schedule.guarantee(self.sums, self.std)
        # What a record moves through one of its secret rounds is a block, and its blocks must not overlap.
        if self.schedule.secret:
            self.schedule.distance(self.sums)  # raises InputError if they do
        # A silo's own stream has a unit's records in this silo; a sum or mean over silos, in up to `max_silos`.
        # There the displacements by a unit add up over silos, and so does their rounding.
        silo_mu, silo_count = (
            self._integer_claim(self.integer_release).mu,
            1 if self.party_name.startswith("silo") else self.unit.max_silos,
        )
        return self.schedule.guarantee_for_mu(
            silo_mu if silo_count == 1 else math.nextafter(silo_count * silo_mu, math.inf), self.relation
        )

    @property
    def silos(self) -> range:
        """Numbers of the silos, each with a stream like this one, or none for a server or a sum over silos."""
        match = _SILO_NAMES.fullmatch(self.party_name)
        return range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)

    @property
    def slack(self) -> float:
        """Total variation up to which an exact release's guarantee holds, or 0 in real numbers."""
        return 0.0 if self.integer_release is None else self._integer_claim(self.integer_release).slack

    def _integer_claim(self, integers: IntegerRelease) -> ExactClaim:
        """Return the claim for the records of a unit in one silo, as if their rounds were public."""
        exponent, sigma, dimension, party_count = integers
        form = integer_form(self.mechanism, replace(self.workload, schedule=self.schedule.public_order))
        return claim_for_noise(
            form, Lattice(exponent), self.relation, dimension, sigma, party_count, self.increment_diameter
        )

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter μ of the stream, or inf without noise.

        Raises:
            InputError: If the stream cannot be accounted for, or its guarantee is a curve of (ε, δ), which has
                no μ.
        """
        if (guarantee := self.guarantee) is None:
            return math.inf
        if (mu := guarantee.mu) is None:
            raise InputError(
                f"a stream with {self.schedule.name} sampling has no mu: its guarantee is a curve of (ε, δ)"
            )
        return mu

    @property
    def workload(self) -> Workload:
        """Running sums of the stream, with its participation."""
        return Workload(self.schedule, self.decay, np.array(self.clips), self.period)

    @property
    def attained(self) -> bool:
        """Whether no smaller μ holds, if increments can be any vectors up to their clips.

        An increment diameter below two clips includes an allowance for rounding, and is not attained.
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
        """`mu` by exact counting, which is smaller than `mu` only where a paper's constants charge more.

        Raises:
            InputError: If `mu` is refused, or the noise has no certificate in these rounds.
        """
        share = self.mechanism.attained_sensitivity(self.workload).value / self.sums.certified.value
        return self.mu if share >= 1.0 else self.mu * share * (1.0 + _ROUNDING * self.workload.rounds)

    @cached_property
    def sums(self) -> "RunningSums":
        """Sums that are released, without the noise."""
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
"""Relative rounding error of a column's norm, for each of its rounds."""


def stream_to_data(stream: ReleaseStream) -> dict[str, Any]:
    """Convert a stream to plain data, with equal clips of consecutive rounds written as [clip, rounds]."""
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
    """Convert plain data to a stream, the inverse of `stream_to_data`.

    Ranges of integers, and the numbers of some mechanisms, are checked only when the stream is accounted for.

    Raises:
        InputError: If a value is refused as none that a run can have.
        KeyError, TypeError or ValueError: If a key is missing, or a value has a form that cannot be read.
    """
    owner, std, weight, decay, period = (data[key] for key in ("owner", "std", "per_record", "decay", "period"))
    schedule = participation_from_data(data["participation"])
    refuse(
        {
            f"ledger: noise of standard deviation {std} is none that a run can have": not 0.0 <= std < math.inf,
            f'ledger: owner = {owner!r}: expected the name of a party, such as "silo 0"': not isinstance(
                owner, str
            ),
            f"ledger: per_record = {weight!r}: expected a weight above 0": not 0.0 < weight < math.inf,
            f"ledger: decay = {decay!r}: expected a number from 0 to 1": not 0.0 <= decay <= 1.0,
            f"ledger: period = {period!r}: expected a number of rounds, or none": period is not None
            and not (type(period) is int and period > 0),
            f"ledger: clips: expected finite numbers above 0, each with its number of rounds, {schedule.rounds} "
            "in all": not all(
                0.0 < clip < math.inf and type(rounds) is int and rounds > 0 for clip, rounds in data["clips"]
            )
            or sum(rounds for _, rounds in data["clips"]) != schedule.rounds,
            "ledger: integers: expected whole numbers exponent, dimension and owners, and a number sigma": (
                integers := data.get("integers") or {}
            )
            != {}
            and not (
                all(type(integers[name]) is int for name in ("exponent", "dimension", "owners"))
                and type(integers["sigma"]) in (int, float)
            ),
        }
    )
    return ReleaseStream(
        party_name=owner,
        mechanism=mechanism_from_data(data["mechanism"]),
        schedule=schedule,
        decay=decay,
        clips=tuple(clip for clip, rounds in data["clips"] for _ in range(rounds)),
        record_weight=weight,
        relation=relation_named(data["relation"]),
        std=std,
        period=period,
        unit=unit_from_data(data["unit"]),
        integer_release=IntegerRelease(**integers) if integers else None,
        step=data.get("step", ROUNDS),
        increment_diameter=_read_increment_diameter(data, schedule),
    )


def _read_increment_diameter(data: Mapping[str, Any], schedule: Participation) -> float:
    """Read the increment diameter of a stream, the largest distance of two increments, in clips.

    The diameter is the value of the key `apart`, or 2 without this key.

    Guarantee: the diameter is below 2 clips only in a public order, of one round or with independent noise for the
    increments of each round alone.  In secret rounds an increment's distance from zero leaks, too, and this
    distance is a whole clip however close two increments are.  If clients decide when they come, a client may be
    exchanged for one that comes in other rounds, and then even equal increments do not cancel.

    Args:
        data: Stream as plain data.
        schedule: Participation of the stream.

    Raises:
        InputError: If the diameter is no number from 1 to 2, or is below 2 where the guarantee above forbids it.
        KeyError, TypeError or ValueError: If the data have another form.
    """
    bound = data.get("apart", APART)
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise InputError(f"ledger: apart = {bound!r}: expected a number of clips")
    is_each_round_alone = schedule.rounds == 1 or (
        data["mechanism"] == IndependentGaussian().as_data() and data["decay"] == 0.0
    )
    if not 1.0 <= bound <= APART or (bound < APART and not is_each_round_alone):
        raise InputError(
            f"ledger: apart = {bound}: a run's increments are 2 clips apart, or from 1 to 2 in a single round or "
            "in rounds with independent noise and no running sum"
        )
    if bound < APART and (schedule.secret or schedule.client_initiated):
        raise InputError(
            f"ledger: increments that are {bound} clips apart with {schedule.title}: where rounds are secret or "
            f"up to clients they are {APART:g}"
        )
    return float(bound)


def make_release_streams(plan: Plan, rounds: int) -> tuple[ReleaseStream, ...]:
    """Return the streams that the parties of a plan have released after its first `rounds` rounds.

    Parties that add noise have a stream each, or share one if they are consecutive silos with equal weights and
    noise.  Masked messages are one stream: their sums, with the noise of all sources together.  A plan without
    noise has one stream of "everyone", with standard deviation 0.

    Args:
        plan: Plan of the run.
        rounds: Number of rounds that were released.  If participation can only be charged as a whole, the stream
            has all rounds.
    """
    unit, sources = plan.unit, plan.noise.sources
    mean_weight = unit.weight_in_mean(plan.weights, plan.batch_sizes)
    if not sources:
        # The smallest batch gives a record its largest weight.
        return (_make_stream(plan, "everyone", SERVER, unit.weight_in_silo(min(plan.batch_sizes)), 0.0, rounds),)
    if plan.masked:
        return (
            _make_stream(
                plan,
                f"sum of {_format_parties([source.party for source in sources])}",
                SERVER,
                mean_weight,
                plan.noise.std_in_mean,
                rounds,
                len(sources),
            ),
        )

    def weight_of(source: NoiseSource) -> float:
        return mean_weight if source.party == SERVER else unit.weight_in_silo(plan.batch_sizes[source.party])

    noise_groups = itertools.groupby(sources, key=lambda source: (weight_of(source), source.std))
    groups = [(key, [source.party for source in group]) for key, group in noise_groups]
    return tuple(
        _make_stream(plan, _format_parties(parties), parties[0], weight, float(std), rounds)
        for (weight, std), parties in groups
    )


def make_silo_stream(plan: Plan, silo: int, rounds: int) -> ReleaseStream:
    """Return the stream of one silo's own releases, with standard deviation 0 if the silo adds no noise."""
    return _make_stream(
        plan,
        f"silo {silo}",
        silo,
        plan.unit.weight_in_silo(plan.batch_sizes[silo]),
        float(plan.noise.std_of(silo)),
        rounds,
    )


def _make_stream(
    plan: Plan, title: str, party: int, record_weight: float, std: float, rounds: int, party_count: int = 1
) -> ReleaseStream:
    """Make the stream of one party, of each of several silos alike, or of the sums of parties' messages.

    Args:
        plan: Plan of the run.
        title: Name of the party or parties.
        party: Party whose exact noise is recorded, alike for all parties of the stream.
        record_weight: Weight of one record's increment in the release.
        std: Standard deviation of a fresh noise vector's coordinates in the release.
        rounds: Number of rounds that were released.
        party_count: Number of parties whose noise is in the release.
    """
    participation, exact = plan.schedule.truncate(rounds), plan.exact_plan
    return ReleaseStream(
        title,
        plan.mechanism,
        participation,
        plan.estimator.decay if exact is None else exact.inputs.factorization.workload.decay,
        batch_clips(plan.estimator, plan.schedule)[: participation.rounds],
        record_weight,
        plan.relation,
        std,
        plan.estimator.period,
        plan.unit,
        IntegerRelease(exact.lattice.exponent, exact.party_claim(party).sigma, exact.inputs.dimension, party_count)
        if exact is not None and std
        else None,
        increment_diameter=plan.increment_diameter,
    )


def _format_parties(parties: list[int]) -> str:
    if parties == [SERVER]:
        return "server"
    return f"silo {parties[0]}" if len(parties) == 1 else f"silos {parties[0]}-{parties[-1]}"


def make_evaluation_streams(evaluation: EvaluationPlan | None) -> tuple[ReleaseStream, ...]:
    """Return the streams about test records of a finished run, or () without evaluations by silos."""
    return () if evaluation is None else make_release_streams(evaluation.plan, evaluation.plan.schedule.rounds)
