"""Compare mechanisms without a run: what each costs in a federation with equal silos and one clip norm.

A `Setting` is what `fedpriv privacy` is asked about.  A `Cost` is that of one mechanism for one workload and one
privacy target, in the units of a release; a `Table` has all mechanisms side by side at one guarantee, with the
noise that each leaves in the sums, and in what is made of them.  `seconds_per_round` measures on this machine.
Torch is imported there alone.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedpriv.accounting.gaussian import RELATION_FACTOR, check_positive, relation_named
from fedpriv.accounting.guarantees import DEFAULT_DELTA, GaussianDP, Guarantee
from fedpriv.core.errors import InputError, refuse
from fedpriv.core.replicates import limit_to_one_thread
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.fitting.auto import (
    MechanismCandidate,
    PublishedNoise,
    all_candidates,
    choose_candidate,
    compare_mechanism,
    fit_named,
    least_published_noise,
)
from fedpriv.noise.fitting.cost import NoiseResponse, make_noise_cost, rows_response
from fedpriv.noise.mechanism import Mechanism, Sensitivity
from fedpriv.noise.registry import SELECTABLE_MECHANISMS, MechanismOptions, make_mechanism
from fedpriv.noise.registry import needs_fit as to_fit
from fedpriv.noise.series import Workload
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.trust import Noise, Trust, find_trust
from fedpriv.participation.orders import FixedOrder, MinSeparation, Participation, ParticipationKeys
from fedpriv.participation.registry import find_sampling_class, make_participation
from fedpriv.plan.sums import RunningSums


@dataclass(frozen=True)
class MechanismCost:
    """Standard deviations per coordinate; an error is the noise in a released running sum."""

    sensitivity: Sensitivity
    """For the sum of increments, before a batch mean divides it."""
    std: float
    """Of the fresh vectors, as whoever adds the noise draws them."""
    error_rms: float
    """Root mean square over the rounds, in what one owner of noise releases."""
    error_last: float
    """In the last round."""
    error_worst: float
    """In the worst round."""
    error_in_mean: float
    """Root mean square over the rounds, in the weighted mean over silos."""
    memory_vectors: int
    """Vectors in the state, at most."""


def compute_cost(
    mechanism: Mechanism, workload: Workload, sensitivity: Sensitivity, noise: Noise
) -> MechanismCost:
    """`noise` is what a trust setting makes of that sensitivity for a target."""
    std, variance = float(noise.sources[0].std), mechanism.variance(workload)
    typical = math.sqrt(float(np.mean(variance)))
    return MechanismCost(
        sensitivity=sensitivity,
        std=std,
        error_rms=std * typical,
        error_last=std * math.sqrt(float(variance[-1])),
        error_worst=std * math.sqrt(float(np.max(variance))),
        error_in_mean=noise.std_in_mean * typical,
        memory_vectors=mechanism.memory_vectors(workload),
    )


_MIN_CLIP = 1e-100  # of a clip, whose squares are added up
_MAX_COMPARED_GROUPS = 8  # numbers of groups, each of which has to be calibrated


def unfitted_mechanisms(workload: Workload) -> dict[str, Mechanism]:
    """Every mechanism for these sums whose numbers are given and not fitted, by a name that says them."""
    return {
        name: mechanism
        for kind in SELECTABLE_MECHANISMS
        for name, mechanism in kind.comparisons(workload, MechanismOptions()).items()
    }


@dataclass(frozen=True)
class AccountingSetting:
    """Who releases which running sums, and in which rounds a record takes part in them."""

    rounds: int
    decay: float = 1.0
    clip: float = 1.0
    batch: int = 1
    silos: int = 1
    trust: str = "untrusted"
    relation: str = "replace-one"
    epochs: int = 1
    """Passes over the records."""
    max_participations: int | None = None
    """If given, not `epochs` but any so many rounds count, at least `min_separation` apart."""
    min_separation: int = 1
    sampling: str = FixedOrder.name
    """By which participation a scenario would name; those in secret have `groups`."""
    groups: int = 1

    def __post_init__(self) -> None:
        most, apart, sampling = self.max_participations, self.min_separation, f"sampling = {self.sampling!r}"
        refuse(
            {
                f"clip = {self.clip:g}: squares of it do not fit floating point; give it in another unit": (
                    not _MIN_CLIP <= check_positive("clip", self.clip) <= 1.0 / _MIN_CLIP
                ),
                f"epochs = {self.epochs} and max_participations = {most}: give only one of them": (
                    most is not None and self.epochs != 1
                ),
                f"min_separation = {apart} has a meaning only together with max_participations": (
                    most is None and apart != 1
                ),
                f"{sampling}: give max_participations and min_separation instead": (
                    issubclass(find_sampling_class(self.sampling), MinSeparation)
                ),
                f"max_participations and {sampling}: give only one of them": most is not None
                and self.has_secret_order,
                f"rounds = {self.rounds} must be a multiple of epochs = {self.epochs}": self.rounds % self.epochs,
            }
        )

    @property
    def has_secret_order(self) -> bool:
        """Whether only silos know who takes part when."""
        return find_sampling_class(self.sampling).secret

    @cached_property
    def participation(self) -> Participation | MinSeparation:
        if self.max_participations is not None:
            return MinSeparation(self.rounds, self.max_participations, self.min_separation)
        declared = FixedOrder(self.rounds, self.rounds // self.epochs)
        return make_participation(self.sampling, declared, ParticipationKeys(self.groups))

    def describe_participation(self, noun: str = "record") -> str:
        """How a record, or another unit, takes part."""
        order = self.participation
        if isinstance(order, MinSeparation):
            return f"at most {order.max_participations} rounds, at least {order.min_separation} apart"
        if self.has_secret_order:
            return f"a {noun} {order.words}"
        return f"{self.epochs} epochs in a fixed order" if self.epochs > 1 else "single pass"

    @cached_property
    def workload(self) -> Workload:
        return Workload(self.participation, self.decay, np.full(self.rounds, self.clip))

    @property
    def trust_setting(self) -> Trust:
        return find_trust(self.trust)

    def make_mechanism(self, name: str, options: MechanismOptions) -> Mechanism:
        """The mechanism called `name` for these sums, fitted to their mean noise where it has no numbers yet."""
        return (
            fit_named(make_noise_cost(rows_response(self.rounds), self.workload), name, options).mechanism
            if to_fit(name, options)
            else make_mechanism(name, self.workload, options)
        )

    def cost_at_mu(self, mechanism: Mechanism, mu: float, delta: float = DEFAULT_DELTA) -> MechanismCost:
        """The cost of `mechanism` at μ > 0; for records that take part in secret, at the (ε, δ) that μ gives."""
        check_positive("mu", mu)
        if not isinstance(order := self.participation, MinSeparation):
            mu = order.calibrated_mu(self._running_sums(mechanism), mu, delta)
        return self._cost(mechanism, mu)

    def cost_of_workload(self, mechanism: Mechanism, workload: Workload, mu: float) -> MechanismCost:
        """The cost at μ > 0 for other sums, such as those of an algorithm."""
        check_positive("mu", mu)
        certified = mechanism.certified(workload)
        return compute_cost(mechanism, workload, certified, self._calibrate_noise(certified.value, mu))

    def cost_at_std(self, mechanism: Mechanism, std: float) -> MechanismCost:
        """The cost of noise of standard deviation `std`."""
        return self._cost(mechanism, 1.0 / self._noise_multiplier(mechanism, std))

    def _cost(self, mechanism: Mechanism, mu: float) -> MechanismCost:
        return compute_cost(
            mechanism,
            self.workload,
            self._certified_sensitivity(mechanism),
            self._calibrate_noise(self._distance(mechanism), mu),
        )

    def guarantee_at_std(self, mechanism: Mechanism, std: float) -> Guarantee:
        """What noise of standard deviation `std` gives."""
        order, multiplier = self.participation, self._noise_multiplier(mechanism, std)
        if isinstance(order, MinSeparation):
            return GaussianDP(1.0 / multiplier)
        sums = self._running_sums(mechanism)
        return order.guarantee(sums, multiplier * sums.displacement(order.distance(sums)))

    def compare_mechanisms(self, mu: float, delta: float = DEFAULT_DELTA) -> dict[str, MechanismCost]:
        """The cost of every mechanism at μ, by a name that says its parameters."""
        unamplified = ((name, self, mechanism) for name, mechanism in unfitted_mechanisms(self.workload).items())
        asked = self._amplified_mechanisms() if self.has_secret_order else unamplified
        return {name: setting.cost_at_mu(mechanism, mu, delta) for name, setting, mechanism in asked}

    def _amplified_mechanisms(self) -> Iterator[tuple[str, "AccountingSetting", Mechanism]]:
        """Banded noise with as many groups as bands, for numbers that divide an epoch; independent noise."""
        if self.decay == 0.0:
            yield IndependentGaussian.name, self, IndependentGaussian()
            return
        rounds = self.rounds // self.epochs
        divisors = [each for each in range(1, rounds + 1) if rounds % each == 0][:_MAX_COMPARED_GROUPS]
        for groups in [self.groups] if self.groups > 1 else divisors:
            one = BandedSquareRoot(self.decay, groups)
            yield f"{one.label}, {groups} groups", replace(self, groups=groups), one

    def _noise_multiplier(self, mechanism: Mechanism, std: float) -> float:
        """How many distances, as they are released, `std` is: noise is proportional to their number."""
        found = check_positive("std", std) / float(
            self._calibrate_noise(self._distance(mechanism), 1.0).sources[0].std
        )
        if found < 1e-300:
            raise InputError("std: next to the clip it is no noise at all; give a larger one")
        return found

    def _running_sums(self, mechanism: Mechanism) -> RunningSums:
        return RunningSums(mechanism, self.workload, relation_named(self.relation))

    def _distance(self, mechanism: Mechanism) -> float:
        order, known = self.participation, self.workload
        return (
            mechanism.sensitivity(known)
            if isinstance(order, MinSeparation)
            else order.distance(self._running_sums(mechanism))
        )

    def _certified_sensitivity(self, mechanism: Mechanism) -> Sensitivity:
        """Of everything released, or, where rounds are secret, of what is amplified."""
        if not self.has_secret_order:
            return mechanism.certified(self.workload)
        clip = self._distance(mechanism) * RELATION_FACTOR[relation_named(self.relation)]
        return Sensitivity(
            clip,
            True,
            "rounds of a record move disjoint blocks, or what they share is counted as known: of one round",
        )

    def _calibrate_noise(self, sensitivity: float, mu: float) -> Noise:
        batches, shares = (self.batch,) * self.silos, (1.0 / self.silos,) * self.silos
        return self.trust_setting.calibrate_noise(sensitivity, batches, shares, relation_named(self.relation), mu)


MAX_ROUNDS_OF_SLOW_MECHANISMS = 4096
"""Rounds beyond which mechanisms of T vectors are left out: for a run nobody would take them."""


@dataclass(frozen=True)
class MechanismLine:
    """One mechanism at the guarantee that is asked for."""

    name: str
    mechanism: Mechanism
    cost: MechanismCost
    published: PublishedNoise
    """Standard deviations per coordinate, for the noise in the mean over silos and steps of 1."""
    ratio: PublishedNoise
    """The same over what no mechanism falls below."""
    is_auto: bool
    """Whether `mechanism = "auto"` takes it."""


@dataclass(frozen=True)
class MechanismTable:
    """The lines, and the bound below all of them."""

    lines: tuple[MechanismLine, ...]
    lower_bound: PublishedNoise
    """In the units of `Line.published`."""


def tabulate_mechanisms(
    setting: AccountingSetting, mu: float, response: NoiseResponse, workload: Workload, max_vectors: int = 4
) -> MechanismTable:
    """Every mechanism for the sums of `workload`, fitted ones too, at `mu`; `setting` says who adds the noise.

    Clips of `workload` are multiples of the setting's clip.  InputError for what nothing can be fitted to.
    """
    first_of = dict[tuple[str, int], MechanismCandidate]()
    for candidate in all_candidates(make_noise_cost(response, workload), max_vectors):
        first_of.setdefault((candidate.name, candidate.vector_count), candidate)
    found, bound, lines = list(first_of.values()), least_published_noise(response, workload), list[MechanismLine]()
    best = choose_candidate([candidate for candidate in found if candidate.vector_count <= max_vectors])
    for name, mechanism in _mechanisms_by_name(workload, found).items():
        cost, own = (
            setting.cost_of_workload(mechanism, workload, mu),
            compare_mechanism(mechanism, response, workload),
        )
        published = _scale_published(own.published_noise, cost.error_in_mean / own.rows_rms)
        output = own.published_noise.output
        of_output = None if output is None or bound.output is None else output / bound.output
        ratio = PublishedNoise(own.published_noise.queries / bound.queries, of_output)
        lines.append(MechanismLine(name, mechanism, cost, published, ratio, mechanism == best.mechanism))
    unit = lines[0].published.queries / (lines[0].ratio.queries * bound.queries)
    return MechanismTable(tuple(lines), _scale_published(bound, unit))


def _mechanisms_by_name(workload: Workload, found: list[MechanismCandidate]) -> dict[str, Mechanism]:
    known = {
        name: mechanism
        for name, mechanism in unfitted_mechanisms(workload).items()
        if workload.rounds <= MAX_ROUNDS_OF_SLOW_MECHANISMS or mechanism.memory_vectors(workload) < workload.rounds
    }
    for candidate in found:
        if candidate.mechanism not in known.values():
            name = f"{candidate.name}, {candidate.vector_count} vectors"
            known[name if candidate.name in known else candidate.name] = candidate.mechanism
    return known


def _scale_published(published: PublishedNoise, factor: float) -> PublishedNoise:
    output = None if published.output is None else published.output * factor
    return PublishedNoise(published.queries * factor, output)


_TIMED_ROUNDS = 16
_MAX_TIMED_VECTORS = 128


def measure_seconds_per_round(mechanism: Mechanism, workload: Workload, dimension: int) -> float | None:
    """Seconds for a round in one thread once the state is full, fresh vector drawn before; float32.

    None for a state of more than 128 vectors, and for a run of one round.
    """
    vectors, rounds = mechanism.memory_vectors(workload), workload.rounds
    if vectors > _MAX_TIMED_VECTORS or rounds < 2:
        return None
    first = max(1, min(vectors, rounds - _TIMED_ROUNDS))
    last = min(first + _TIMED_ROUNDS, rounds)
    import torch

    fresh, state = torch.randn(dimension), mechanism.start()
    with limit_to_one_thread():
        for t in range(1, first + 1):
            _, state = mechanism.noise(state, t, fresh)
        started = time.perf_counter()
        for t in range(first + 1, last + 1):
            _, state = mechanism.noise(state, t, fresh)
    return (time.perf_counter() - started) / (last - first)
