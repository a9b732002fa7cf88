"""Compare the cost of noise mechanisms without a run, for silos of equal size.

A silo is a party that holds records.  It sums their clipped contributions (increments) of a round, and a running
sum adds these sums up over rounds, each time after a multiplication by the decay.  A workload is the running sums
that are released, and a mechanism correlates their noise over rounds.  Participation says which records a round
reads, and is secret if only a record's silo knows that.
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
    """Cost of a mechanism: its noise, its sensitivity and its memory.

    An `error_…` is the standard deviation per coordinate of the noise in a released running sum.
    """

    sensitivity: Sensitivity
    """Sensitivity before the division by the batch size, for secret rounds that of one round of a record."""
    std: float
    """Standard deviation of the fresh vectors, drawn by the party that adds the noise."""
    error_rms: float
    """Root mean square over rounds, in the releases of one party that adds noise."""
    error_last: float
    """Error in the last round."""
    error_worst: float
    """Error in the round with the largest error."""
    error_in_mean: float
    """Root mean square over rounds, in the weighted mean over silos."""
    memory_vectors: int
    """Largest number of vectors in the mechanism state."""


def compute_cost(
    mechanism: Mechanism, workload: Workload, sensitivity: Sensitivity, noise: Noise
) -> MechanismCost:
    """Compute the cost of a mechanism whose noise is calibrated to a target.

    The error in round t is σ √v_t, with σ the standard deviation of a party's fresh vectors, and v_t the variance
    of the mechanism's noise in running sum t for fresh vectors of variance 1.

    Args:
        mechanism: The mechanism.
        workload: Running sums that are released.
        sensitivity: Certified sensitivity of the mechanism (`_certified_sensitivity`), which is only reported.
        noise: Noise that a trust setting calibrates to the target.
    """
    std, variance = float(noise.sources[0].std), mechanism.variance(workload)
    rms_per_std = math.sqrt(float(np.mean(variance)))
    return MechanismCost(
        sensitivity=sensitivity,
        std=std,
        error_rms=std * rms_per_std,
        error_last=std * math.sqrt(float(variance[-1])),
        error_worst=std * math.sqrt(float(np.max(variance))),
        error_in_mean=noise.std_in_mean * rms_per_std,
        memory_vectors=mechanism.memory_vectors(workload),
    )


_MIN_CLIP = 1e-100  # bound of a clip norm, so that sums of its squares neither underflow nor overflow
_MAX_COMPARED_GROUPS = 8  # numbers of groups that are compared, since each needs a calibration


def unfitted_mechanisms(workload: Workload) -> dict[str, Mechanism]:
    """Return mechanisms of fedpriv for a workload that need no fit, by the name of their table row."""
    return {
        name: mechanism
        for kind in SELECTABLE_MECHANISMS
        for name, mechanism in kind.comparisons(workload, MechanismOptions()).items()
    }


@dataclass(frozen=True)
class AccountingSetting:
    """Setting of an accounting question: released running sums, silos, trust and participation.

    Raises:
        InputError: `clip` is out of its range, `epochs` does not divide `rounds`, there is no such `sampling`, or
            two fields exclude each other.
    """

    rounds: int
    """Number T of rounds, each with a released running sum."""
    decay: float = 1.0
    """Factor of the running sum from one round to the next: 1 for prefix sums, 0 for the sum of one round."""
    clip: float = 1.0
    """Largest norm of a record's increment."""
    batch: int = 1
    """Number of records of each silo in a round, expected under secret participation.

    A silo's mean is the sum of its increments divided by this number.
    """
    silos: int = 1
    """Number of silos, which have equal weights in the mean."""
    trust: str = "untrusted"
    """Name of the trust setting, which says whether silos or the server add the noise."""
    relation: str = "replace-one"
    """Name of the relation of neighbouring data sets, "replace-one" or "zero-out"."""
    epochs: int = 1
    """Number of passes over the records."""
    max_participations: int | None = None
    """Largest number of rounds of a record, at least `min_separation` apart, in any order.

    None if participation follows `sampling` and `epochs`.
    """
    min_separation: int = 1
    """Smallest distance of two rounds of a record, used only with `max_participations`."""
    sampling: str = FixedOrder.name
    """Name of the participation, as in a scenario.  Only secret participation has `groups`."""
    groups: int = 1
    """Number of public groups of records, between which rounds alternate."""

    def __post_init__(self) -> None:
        max_count, separation, sampling_text = (
            self.max_participations,
            self.min_separation,
            f"sampling = {self.sampling!r}",
        )
        refuse(
            {
                f"clip = {self.clip:g}: squares of it do not fit floating point; give it in another unit": (
                    not _MIN_CLIP <= check_positive("clip", self.clip) <= 1.0 / _MIN_CLIP
                ),
                f"epochs = {self.epochs} and max_participations = {max_count}: give only one of them": (
                    max_count is not None and self.epochs != 1
                ),
                f"min_separation = {separation} has a meaning only together with max_participations": (
                    max_count is None and separation != 1
                ),
                f"{sampling_text}: give max_participations and min_separation instead": (
                    issubclass(find_sampling_class(self.sampling), MinSeparation)
                ),
                f"max_participations and {sampling_text}: give only one of them": max_count is not None
                and self.has_secret_order,
                f"rounds = {self.rounds} must be a multiple of epochs = {self.epochs}": self.epochs < 1
                or self.rounds % self.epochs,
            }
        )

    @property
    def has_secret_order(self) -> bool:
        """Whether the rounds of a record are known to its silo only."""
        return find_sampling_class(self.sampling).secret

    @cached_property
    def participation(self) -> Participation | MinSeparation:
        if self.max_participations is not None:
            return MinSeparation(self.rounds, self.max_participations, self.min_separation)
        declared = FixedOrder(self.rounds, self.rounds // self.epochs)
        return make_participation(self.sampling, declared, ParticipationKeys(self.groups))

    def describe_participation(self, noun: str = "record") -> str:
        """Describe the rounds in which a record, or another unit called `noun`, takes part, as a phrase.

        An example is "2 epochs in a fixed order".  Only phrases for secret participation contain `noun`.
        """
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
        """Make the mechanism called `name` for this workload.

        Parameters that are not in `options` are fitted to the noise of the running sums, or have their defaults.

        Raises:
            InputError: There is no such mechanism, its options do not fit, or noise cannot be fitted.
        """
        return (
            fit_named(make_noise_cost(rows_response(self.rounds), self.workload), name, options).mechanism
            if to_fit(name, options)
            else make_mechanism(name, self.workload, options)
        )

    def cost_at_mu(self, mechanism: Mechanism, mu: float, delta: float = DEFAULT_DELTA) -> MechanismCost:
        """Compute the cost of `mechanism` at μ > 0.

        For secret participation the target is the ε that μ-GDP gives at `delta`.

        Raises:
            InputError: `mu` is no finite number above 0, the participation cannot be accounted for, or no noise
                reaches the target.
        """
        check_positive("mu", mu)
        if not isinstance(order := self.participation, MinSeparation):
            mu = order.calibrated_mu(self._running_sums(mechanism), mu, delta)
        return self._cost(mechanism, mu)

    def cost_of_workload(self, mechanism: Mechanism, workload: Workload, mu: float) -> MechanismCost:
        """Compute the cost at μ > 0 for another workload in a public order, such as that of an algorithm.

        Raises:
            InputError: `mu` is no finite number above 0, or the mechanism has no certificate for the workload.
        """
        check_positive("mu", mu)
        certified = mechanism.certified(workload)
        return compute_cost(mechanism, workload, certified, self._calibrate_noise(certified.value, mu))

    def cost_at_std(self, mechanism: Mechanism, std: float) -> MechanismCost:
        """Compute the cost of noise of standard deviation `std`, that of one party's fresh vectors.

        Raises:
            InputError: `std` is no finite number above 0 or next to nothing beside the clip, or the participation
                cannot be accounted for.
        """
        return self._cost(mechanism, 1.0 / self._noise_multiplier(mechanism, std))

    def _cost(self, mechanism: Mechanism, mu: float) -> MechanismCost:
        return compute_cost(
            mechanism,
            self.workload,
            self._certified_sensitivity(mechanism),
            self._calibrate_noise(self._distance(mechanism), mu),
        )

    def guarantee_at_std(self, mechanism: Mechanism, std: float) -> Guarantee:
        """Compute the guarantee of noise of standard deviation `std`, that of one party's fresh vectors.

        Raises:
            InputError: `std` is no finite number above 0 or next to nothing beside the clip, or the participation
                cannot be accounted for.
        """
        order, multiplier = self.participation, self._noise_multiplier(mechanism, std)
        if isinstance(order, MinSeparation):
            return GaussianDP(1.0 / multiplier)
        sums = self._running_sums(mechanism)
        # `guarantee` is for the noise of a single stream, which is the multiplier times the displacement.
        return order.guarantee(sums, multiplier * sums.displacement(order.distance(sums)))

    def compare_mechanisms(self, mu: float, delta: float = DEFAULT_DELTA) -> dict[str, MechanismCost]:
        """Compute the cost of several mechanisms at μ, by name.

        In a public order they are the mechanisms of fedpriv that need no fit.  With secret participation they are
        independent noise for decay 0 and banded noise otherwise, and the target is the ε of μ-GDP at `delta`.

        Raises:
            InputError: `mu` is no finite number above 0, the participation cannot be accounted for, or no noise
                reaches the target.
        """
        unamplified = ((name, self, mechanism) for name, mechanism in unfitted_mechanisms(self.workload).items())
        candidates = self._amplified_mechanisms() if self.has_secret_order else unamplified
        return {name: setting.cost_at_mu(mechanism, mu, delta) for name, setting, mechanism in candidates}

    def _amplified_mechanisms(self) -> Iterator[tuple[str, "AccountingSetting", Mechanism]]:
        """Yield mechanisms that secret participation amplifies, as (name, setting, mechanism).

        For decay 0 this is independent noise.  Otherwise it is banded noise with k bands, for k public groups of
        records, between which rounds alternate.  k is `groups`, or each of the up to eight smallest divisors of
        an epoch's rounds if `groups` is 1.
        """
        if self.decay == 0.0:
            yield IndependentGaussian.name, self, IndependentGaussian()
            return
        rounds = self.rounds // self.epochs
        divisors = [divisor for divisor in range(1, rounds + 1) if rounds % divisor == 0][:_MAX_COMPARED_GROUPS]
        for groups in [self.groups] if self.groups > 1 else divisors:
            mechanism = BandedSquareRoot(self.decay, groups)
            yield f"{mechanism.label}, {groups} groups", replace(self, groups=groups), mechanism

    def _noise_multiplier(self, mechanism: Mechanism, std: float) -> float:
        """Return `std` as a multiple of the noise that the mechanism needs for μ = 1.

        Raises:
            InputError: `std` is no finite number above 0, or is next to nothing beside the clip.
        """
        multiplier = check_positive("std", std) / float(
            self._calibrate_noise(self._distance(mechanism), 1.0).sources[0].std
        )
        if multiplier < 1e-300:
            raise InputError("std: next to the clip it is no noise at all; give a larger one")
        return multiplier

    def _running_sums(self, mechanism: Mechanism) -> RunningSums:
        return RunningSums(mechanism, self.workload, relation_named(self.relation))

    def _distance(self, mechanism: Mechanism) -> float:
        order, workload = self.participation, self.workload
        return (
            mechanism.sensitivity(workload)
            if isinstance(order, MinSeparation)
            else order.distance(self._running_sums(mechanism))
        )

    def _certified_sensitivity(self, mechanism: Mechanism) -> Sensitivity:
        """Return the sensitivity of all releases, or, for secret rounds, to one round of a record."""
        if not self.has_secret_order:
            return mechanism.certified(self.workload)
        displacement = self._distance(mechanism) * RELATION_FACTOR[relation_named(self.relation)]
        return Sensitivity(
            displacement,
            True,
            "rounds of a record move disjoint blocks, or what they share is counted as known: of one round",
        )

    def _calibrate_noise(self, sensitivity: float, mu: float) -> Noise:
        batches, shares = (self.batch,) * self.silos, (1.0 / self.silos,) * self.silos
        return self.trust_setting.calibrate_noise(sensitivity, batches, shares, relation_named(self.relation), mu)


MAX_ROUNDS_OF_SLOW_MECHANISMS = 4096
"""Most rounds T for which a table has mechanisms without a fit that keep T vectors or more."""


@dataclass(frozen=True)
class MechanismLine:
    """Row of a table of mechanisms at one guarantee."""

    name: str
    mechanism: Mechanism
    cost: MechanismCost
    published: PublishedNoise
    """Noise of the mean over silos in the queries and in the output, for steps of size 1.

    Both are standard deviations per coordinate.
    """
    ratio: PublishedNoise
    """Ratio of `published` to the lower bound of all mechanisms."""
    is_auto: bool
    """Whether `mechanism = "auto"` selects this mechanism, up to ties of noise within a relative 1e-6."""


@dataclass(frozen=True)
class MechanismTable:
    """Rows of mechanisms, and the lower bound of their noise."""

    lines: tuple[MechanismLine, ...]
    lower_bound: PublishedNoise
    """Lower bound, in the units of `MechanismLine.published`."""


def tabulate_mechanisms(
    setting: AccountingSetting, mu: float, response: NoiseResponse, workload: Workload, max_vectors: int = 4
) -> MechanismTable:
    """Tabulate mechanisms for a workload at one guarantee, including fitted ones.

    Above 4,096 rounds T, mechanisms without a fit that keep T vectors or more are left out, because they are slow.

    Args:
        setting: Silos, batch size, trust and relation.  Noise is calibrated for the clip norms of `workload`.
        mu: Guarantee, μ of Gaussian DP.
        response: Weights of the released running sums in the algorithm's queries and output.
        workload: Running sums that are released.
        max_vectors: Largest number of vectors in the state of a mechanism that "auto" selects, 0 or more.

    Raises:
        InputError: `mu` is no finite number above 0, or no mechanism or no lower bound fits the workload.
    """
    # Of fitted mechanisms with one name and size, the first counts.
    candidate_by_key = dict[tuple[str, int], MechanismCandidate]()
    for candidate in all_candidates(make_noise_cost(response, workload), max_vectors):
        candidate_by_key.setdefault((candidate.name, candidate.vector_count), candidate)
    candidates, bound, lines = (
        list(candidate_by_key.values()),
        least_published_noise(response, workload),
        list[MechanismLine](),
    )
    best = choose_candidate([candidate for candidate in candidates if candidate.vector_count <= max_vectors])
    for name, mechanism in _mechanisms_by_name(workload, candidates).items():
        cost, comparison = (
            setting.cost_of_workload(mechanism, workload, mu),
            compare_mechanism(mechanism, response, workload),
        )
        # `compare_mechanism` has the noise of one sum at μ = 1, and the table that of the mean over silos at `mu`.
        published = _scale_published(comparison.published_noise, cost.error_in_mean / comparison.rows_rms)
        output = comparison.published_noise.output
        output_ratio = None if output is None or bound.output is None else output / bound.output
        ratio = PublishedNoise(comparison.published_noise.queries / bound.queries, output_ratio)
        lines.append(MechanismLine(name, mechanism, cost, published, ratio, mechanism == best.mechanism))
    # The factor from the noise at μ = 1 to that at `mu` is the first mechanism's.
    unit = lines[0].published.queries / (lines[0].ratio.queries * bound.queries)
    return MechanismTable(tuple(lines), _scale_published(bound, unit))


def _mechanisms_by_name(workload: Workload, candidates: list[MechanismCandidate]) -> dict[str, Mechanism]:
    """Return the mechanisms of a table by name, the fitted `candidates` last.

    Above 4,096 rounds T, mechanisms without a fit that keep T vectors or more are left out.  So is a fitted
    mechanism that equals an earlier one.  A name that is taken gets the number of vectors added.
    """
    mechanism_by_name = {
        name: mechanism
        for name, mechanism in unfitted_mechanisms(workload).items()
        if workload.rounds <= MAX_ROUNDS_OF_SLOW_MECHANISMS or mechanism.memory_vectors(workload) < workload.rounds
    }
    for candidate in candidates:
        if candidate.mechanism not in mechanism_by_name.values():
            name = f"{candidate.name}, {candidate.vector_count} vectors"
            mechanism_by_name[name if candidate.name in mechanism_by_name else candidate.name] = (
                candidate.mechanism
            )
    return mechanism_by_name


def _scale_published(published: PublishedNoise, factor: float) -> PublishedNoise:
    output = None if published.output is None else published.output * factor
    return PublishedNoise(published.queries * factor, output)


_TIMED_ROUNDS = 16
_MAX_TIMED_VECTORS = 128


def measure_seconds_per_round(mechanism: Mechanism, workload: Workload, dimension: int) -> float | None:
    """Measure the seconds in which a mechanism correlates one round of float32 noise, in one thread.

    The measurement is the mean over up to 16 rounds after a warm-up, without the time to draw fresh vectors.

    Args:
        mechanism: Mechanism of the noise.
        workload: Running sums that are released, whose number of rounds is the run's.
        dimension: Length of a vector.

    Returns:
        Mean seconds of a round, or None for a state of more than 128 vectors or a run of less than 2 rounds.
    """
    vectors, rounds = mechanism.memory_vectors(workload), workload.rounds
    if vectors > _MAX_TIMED_VECTORS or rounds < 2:
        return None
    first_timed = max(1, min(vectors, rounds - _TIMED_ROUNDS))
    last_timed = min(first_timed + _TIMED_ROUNDS, rounds)
    import torch

    fresh, state = torch.randn(dimension), mechanism.start()
    with limit_to_one_thread():
        for t in range(1, first_timed + 1):
            _, state = mechanism.noise(state, t, fresh)
        start_time = time.perf_counter()
        for t in range(first_timed + 1, last_timed + 1):
            _, state = mechanism.noise(state, t, fresh)
    return (time.perf_counter() - start_time) / (last_timed - first_timed)
