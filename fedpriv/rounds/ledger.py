"""What was released, as data: accounting interprets these records and nothing else.

A `ReleaseStream` says what one owner of noise (a silo, several alike, or the server) published over a run; the
guarantee of the run is recomputed from the streams alone (`rounds.claim`).
"""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.chain import MOST_ROUNDS as LONGEST_CHAIN
from fedpriv.accounting.chain import Overlaps, overlaps_of
from fedpriv.accounting.gaussian import APART, Relation, moved_by, relation_named
from fedpriv.accounting.guarantees import Guarantee
from fedpriv.core.errors import InputError
from fedpriv.noise.integers.claim import Claim
from fedpriv.noise.integers.plan import claimed
from fedpriv.noise.integers.strategies import Lattice
from fedpriv.noise.mechanism import Inner, Mechanism, Sensitivity
from fedpriv.noise.registry import integer_form, mechanism_from
from fedpriv.noise.sensitivity import MOST_ROUNDS
from fedpriv.noise.trust import RECORD, Unit, unit_from
from fedpriv.noise.workload import Floats, Workload
from fedpriv.participation.orders import Participation
from fedpriv.participation.registry import participation_from

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
    | `apart` | the largest distance of two increments, where it is known to be below 2 | clips |
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
    apart: float = APART

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
        if self.schedule.secret:
            self.schedule.distance(self.sums)  # InputError where its rounds are no blocks, whoever wrote this
        of_one, silos = self._claimed(self.integers).mu, self._silos_of_a_unit
        mu = of_one if silos == 1 else math.nextafter(silos * of_one, math.inf)
        return self.schedule.promised(mu, self.relation)

    @property
    def silos(self) -> range:
        """Which silos have streams of their own like this one; none where the owner is the server, or a sum."""
        named = _SILOS.fullmatch(self.owner)
        return range(int(named[1]), int(named[2] or named[1]) + 1) if named else range(0)

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
        return claimed(form, Lattice(exponent), self.relation, dimension, sigma, owners, self.apart)

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
        exact = self.integers is None and not self.schedule.secret and self.std > 0.0 and self.apart == APART
        return exact and self.sums.certified.exact

    @property
    def counted(self) -> float:
        """`mu` by exact counting, where a mechanism charges more than a record can move."""
        share = self.mechanism.counted(self.workload).value / self.sums.certified.value
        return self.mu if share >= 1.0 else self.mu * share * (1.0 + _ROUNDING)

    @cached_property
    def sums(self) -> "RunningSums":
        """What is released, without the noise."""
        exact = self.integers is not None
        return RunningSums(self.mechanism, self.workload, self.relation, self.per_record, self.apart, exact)


_SILOS = re.compile("silos? ([0-9]+)(?:-([0-9]+))?")
_ROUNDING = 1e-14
"""Relative, of a norm of a column."""


@dataclass(frozen=True)
class RunningSums:
    """Released running sums as accounting asks about them; see `participation.base.Sums`."""

    mechanism: Mechanism
    workload: Workload
    relation: Relation
    per_record: float = 1.0
    apart: float = APART
    exact: bool = False
    """Whether they are released as integers."""

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
        if blocks is None and self.mechanism.fades:
            raise InputError(
                f"{refused} with {self.mechanism.name} noise, which fades and never ends, by Poisson sampling or "
                'on integers; take sampling = "allocation" in floating point, or mechanism = "banded"'
            )
        if blocks is None:
            raise InputError(
                f"{refused} with {self.mechanism.name} noise on running sums of decay = {decay:g}: a record's "
                "influence is unbounded there; take an algorithm that releases each round by itself, such as "
                'dp-sgd, or mechanism = "banded" with federation.groups of at least its bands'
            )
        if blocks.bands > groups:
            raise InputError(
                f"{refused} with {blocks.bands} bands of correlated noise and federation.groups = {groups}: what "
                f"a record moves in two of its rounds would overlap; set groups to {blocks.bands} or more, or "
                "take fewer bands"
            )
        return float(np.max(self.workload.clips * blocks.norms) * (1.0 + _ROUNDING))

    def overlap(self, groups: int) -> tuple[float, float]:
        """κ, and the largest ⟨C_s, C_t⟩ clip_s clip_t / κ² of two rounds of one record: 0 for disjoint blocks.

        Guarantee: both are those of `accounting.overlap`, rounded up; asked of noise that fades, C ≥ 0, in real
        numbers. InputError for anything else, with the reason.
        """
        if not self.mechanism.fades or self.exact or self.mechanism.assumption is not None:
            return self.clip_apart(groups), 0.0
        clips, columns = self.workload.clips, self.mechanism.columns(self.workload)
        held = [np.arange(first, len(clips), groups) for first in range(min(groups, len(clips)))]
        if len(held[0]) > MOST_ROUNDS:
            raise InputError(
                f"secret participation with {self.mechanism.name} noise: a record may take part in {len(held[0])} "
                f"rounds, and overlaps are looked at up to {MOST_ROUNDS:,}; set federation.groups higher"
            )
        largest = float(np.max(clips**2 * columns.squared_norms)) * (1.0 + _ROUNDING)
        shared = max(float(np.max(np.triu(_products(clips, columns.inner, each), 1))) for each in held)
        return math.sqrt(largest) * (1.0 + _ROUNDING), shared * (1.0 + 1e-12) / largest

    def fading(self, groups: int, bins: int) -> Overlaps | None:
        """How overlaps fade, over κ²; None for disjoint blocks, and where an epoch has too many rounds.

        Guarantee: chains above all that two rounds of one record overlap by, whatever its group, asked of what
        `overlap` is asked of.
        """
        if self.overlap(groups)[1] == 0.0 or bins > LONGEST_CHAIN:
            return None
        distance, columns = self.overlap(groups)[0], self.mechanism.columns(self.workload)
        rounds, clips = len(self.workload.clips), self.workload.clips / distance * (1.0 + _ROUNDING)
        epochs = -(-rounds // (groups * bins))
        products, longest = np.zeros((epochs * bins,) * 2), np.zeros(epochs * bins)
        for first in range(min(groups, rounds)):
            held = np.arange(first, rounds, groups)
            here = slice(0, len(held))
            products[here, here] = np.maximum(products[here, here], columns.inner(held))
            longest[here] = np.maximum(longest[here], clips[held])
        return overlaps_of(products, longest, bins)

    def moved(self, distance: float) -> float:
        return moved_by(self.relation, self.per_record, distance, self.apart)


def _products(clips: Floats, inner: Inner, held: NDArray[np.int64]) -> Floats:
    """Of the columns of these rounds, times their clips; (n, n)."""
    return inner(held) * np.outer(clips[held], clips[held])


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
        **({} if stream.apart == APART else {"apart": stream.apart}),
    }


def from_data(data: Mapping[str, Any]) -> ReleaseStream:
    """The inverse of `as_data`; InputError for what cannot be accounted for."""
    if not 0.0 <= data["std"] < math.inf:
        raise InputError(f"ledger: noise of standard deviation {data['std']} is none that a run can have")
    if not isinstance(data["owner"], str):
        raise InputError(f"ledger: owner = {data['owner']!r}: expected the name of one")
    schedule = participation_from(data["participation"])
    return ReleaseStream(
        owner=data["owner"],
        mechanism=mechanism_from(data["mechanism"]),
        schedule=schedule,
        decay=data["decay"],
        clips=tuple(clip for clip, rounds in data["clips"] for _ in range(rounds)),
        per_record=data["per_record"],
        relation=relation_named(data["relation"]),
        std=data["std"],
        period=data["period"],
        unit=unit_from(data["unit"]),
        integers=Integers(**data["integers"]) if data.get("integers") else None,
        step=data.get("step", ROUNDS),
        apart=_apart_of(data, schedule),
    )


def _apart_of(data: Mapping[str, Any], schedule: Participation) -> float:
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
