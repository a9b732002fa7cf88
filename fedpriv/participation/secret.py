"""Secret samplings, in which only the silo knows the rounds of its records.

`RandomAllocation` draws one secret round of every epoch for each record, `BalancedSubsampling` draws as many
secret rounds of the whole run for each record as there are epochs, and `PoissonSampling` draws independently for
every record and round whether the record takes part.  Rows and rounds may be dealt out in turn to `groups`, and
then a record takes part in rounds of its group only.  A batch is the expected number of records of a round, which
is public, and a silo has as many batches as an epoch has rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.allocation import AllocatedGaussian, calibrate
from fedpriv.accounting.budget import Capacity, find_capacity
from fedpriv.accounting.chain import FadingOverlaps
from fedpriv.accounting.gaussian import RELATION_FACTOR, Relation, epsilon_of
from fedpriv.accounting.guarantees import Sampled
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.accounting.poisson import calibrate as calibrated_poisson
from fedpriv.core.errors import InputError
from fedpriv.core.random import SamplingRandomness
from fedpriv.participation.orders import (
    OWN_FACTS,
    Dependence,
    FixedOrder,
    ParticipationKeys,
    PlainDataclass,
    ReleasedSums,
)

if TYPE_CHECKING:
    from fedpriv.participation.orders import Participation


@dataclass(frozen=True)
class SecretOrder(PlainDataclass):
    """Participation of every record in rounds that a silo draws with its key and keeps secret.

    Records are in public *groups* 0 … groups - 1.  Those of group j, the rows j, j + groups, … of a silo's order,
    take part only in rounds t with t ≡ j + 1 (mod groups).  So two rounds of one record lie `groups` or more
    apart, and correlated noise whose strategy C (fedpriv/noise/mechanism.py) has at most that many bands is
    amplified as if it were independent.

    Guarantee: the curve of (ε, δ) holds against everyone who sees all releases and does not learn which records
    take part in which rounds.  The records of a silo that releases its own sums are protected against the server,
    too.
    """

    secret: ClassVar[bool] = True
    client_initiated: ClassVar[bool] = False
    allowed_dependence: ClassVar[Dependence] = OWN_FACTS
    """Facts that do not depend on which other records take part."""

    rounds: int
    """Number of rounds of the run."""
    rounds_per_epoch: int
    """Number of rounds of one pass, expected if sampled."""
    groups: int = 1
    """Number of groups of records, a divisor of `rounds_per_epoch`."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.rounds_per_epoch < 1:
            raise InputError(
                f"rounds = {self.rounds}, rounds of an epoch = {self.rounds_per_epoch}: both are 1 or more"
            )
        if self.groups < 1 or self.rounds_per_epoch % self.groups:
            raise InputError(
                f"federation.groups = {self.groups}: groups share out the {self.rounds_per_epoch} rounds of an "
                "epoch, so it is a number that divides them"
            )

    @classmethod
    def from_schedule(cls, order: "Participation", keys: ParticipationKeys) -> Self:
        keys.refuse_timers(cls.name)
        return cls(order.rounds, order.rounds_per_epoch, keys.groups)

    @property
    def batches_per_silo(self) -> int:
        """Number of batches, of the expected size, that a silo holds."""
        return self.rounds_per_epoch

    @property
    def bins(self) -> int:
        """Number of rounds of an epoch in which a record of one group can take part."""
        return self.rounds_per_epoch // self.groups

    @property
    def single_pass(self) -> bool:
        """False, since no one but the silo knows a record's rounds, even if there is only one."""
        return False

    def expected_batches(self, t: int) -> int:
        return 1

    def max_batches(self, t: int) -> int:
        """Return `bins`, since all records of a group, which are `bins` batches, can meet in one round."""
        return self.bins

    def capacity(self, batch: int) -> Capacity:
        """Return a number of rows that a round exceeds with probability 2^-40 at most, and this probability.

        A round that fills up to this number with dummy records hides by its duration how many were drawn.

        Args:
            batch: Expected number of records of a round.

        Raises:
            InputError: `batch` is below 1.
        """
        return find_capacity(self.bins * batch, 1.0 / self.bins)

    def group_rows(self, t: int) -> slice:
        """Return the rows of the records that can take part in round t (from 1), those of one group.

        Raises:
            ValueError: Round t does not exist.
        """
        if not 1 <= t <= self.rounds:
            raise ValueError(f"round {t} is not one of 1 … {self.rounds}")
        return slice((t - 1) % self.groups, None, self.groups)

    def calibrate(self, epsilon: float, delta: float, relation: Relation) -> Sampled:
        """Return the guarantee of about the least noise for which the run is (ε, δ)-DP under this relation.

        The noise multiplier is 0.1 or more, even if less noise were enough.

        Args:
            epsilon: Target ε, above 0.
            delta: Target δ, from 1e-10 to below 1.
            relation: Neighbouring relation.

        Raises:
            InputError: No noise that is tried is enough, or a number is out of its range.
        """
        raise NotImplementedError

    def guarantee_for_noise(self, multiplier: float, relation: Relation) -> Sampled:
        """Return the guarantee for independent noise of this multiplier in every round.

        Args:
            multiplier: Standard deviation of the noise, over the largest distance by which a record moves the
                releases through one of its rounds under zero-out, such as its clip, above 0.
            relation: Neighbouring relation.

        Raises:
            InputError: The multiplier or another number is out of its range.
        """
        raise NotImplementedError

    def guarantee(self, sums: ReleasedSums, std: float) -> Sampled:
        return self.guarantee_for_noise(std / sums.displacement(self.distance(sums)), sums.relation)

    @property
    def public_order(self) -> FixedOrder:
        """Single pass in a public order, since accounting starts from the distance of one round of a record."""
        return FixedOrder(self.rounds, self.rounds)

    def guarantee_for_mu(self, mu: float, relation: Relation) -> Sampled:
        """Return the guarantee for noise that is μ-GDP for a record in one known round.

        The noise multiplier is 1 / `mu` under zero-out and 2 / `mu` under replace-one, rounded down.

        Args:
            mu: μ of one known round, above 0.
            relation: Neighbouring relation.

        Raises:
            InputError: `guarantee_for_noise` refuses the noise multiplier.
        """
        return self.guarantee_for_noise((1.0 - 1e-12) * RELATION_FACTOR[relation] / mu, relation)

    def distance(self, sums: ReleasedSums) -> float:
        """Return the largest distance by which a record moves the releases through one of its rounds.

        The distance is divided by 2 under replace-one, since the accounting has this factor already.

        Raises:
            InputError: There is no such distance for these sums.
        """
        return sums.block_displacement(self.groups) / RELATION_FACTOR[sums.relation]

    def calibrated_mu(self, sums: ReleasedSums, mu: float, delta: float) -> float:
        """Return an inverse noise multiplier, 10 or less, that gives at most the ε of μ-GDP at δ.

        The multiplier is rounded up.

        Args:
            sums: Running sums that are released.
            mu: μ of the target, above 0.
            delta: δ at which ε is compared.

        Raises:
            InputError: The sums cannot be accounted for, no noise that is tried is enough, or a number is out of
                its range.
        """
        return (1.0 - 1e-12) / self._calibrate_sums(sums, epsilon_of(mu, delta), delta).noise_multiplier

    def _calibrate_sums(self, sums: ReleasedSums, epsilon: float, delta: float) -> Sampled:
        return self.calibrate(epsilon, delta, sums.relation)


@dataclass(frozen=True)
class RandomAllocation(SecretOrder):
    """Random allocation: in every epoch each record takes part in one round, drawn in secret.

    If a run ends within an epoch, a record's round of this epoch may be one that the run does not reach.

    Guarantee: records choose uniformly among the rounds of their group, independently of each other and of other
    epochs, and only the silo that holds a record knows its round.  (Equal batches of a shuffled order are another
    scheme: the rounds of all other records reveal the round of the last record.)

    Raises:
        InputError: A number is below 1, or groups do not divide an epoch's rounds.

    Example:
        >>> order = RandomAllocation(rounds=20, rounds_per_epoch=10)
        >>> order.epochs, order.bins
        (2, 10)
    """

    name: ClassVar[str] = "allocation"
    title: ClassVar[str] = "random allocation"

    def truncate(self, rounds: int) -> Self:
        """Return the whole schedule, since a run that stopped early is charged for all of it.

        Raises:
            ValueError: `rounds` is negative or above the number of rounds.
        """
        if not 0 <= rounds <= self.rounds:
            raise ValueError(f"{rounds} rounds of {self.rounds}")
        return self

    def select_rows(
        self, t: int, batch: int, silo: int, randomness: Callable[[], SamplingRandomness]
    ) -> NDArray[np.int64]:
        """Return the rows whose round of this epoch is t, (B,).

        Args:
            t: Round, from 1.
            batch: Expected number of records of a round.
            silo: Number of the silo.
            randomness: Function that returns the silo's own sampling randomness.

        Raises:
            ValueError: Round t does not exist.
        """
        epoch, round_index = divmod(t - 1, self.rounds_per_epoch)
        count = self.batches_per_silo * batch
        rows = np.arange(count)[self.group_rows(t)]  # refuses a round that does not exist
        bins = randomness().numbers(count, self.bins, silo, epoch)
        return np.asarray(rows[bins[rows] == round_index // self.groups])

    def calibrate(self, epsilon: float, delta: float, relation: Relation) -> AllocatedGaussian:
        return calibrate(epsilon, delta, self.bins, self.epochs, relation)

    def _calibrate_sums(self, sums: ReleasedSums, epsilon: float, delta: float) -> AllocatedGaussian:
        common = sums.displacement_and_overlap(self.groups)[1]
        return calibrate(
            epsilon, delta, self.bins, self.epochs, sums.relation, common, self._fading_overlaps(sums)
        )

    def guarantee_for_noise(self, multiplier: float, relation: Relation) -> AllocatedGaussian:
        return AllocatedGaussian(multiplier, self.bins, self.epochs, relation)

    def guarantee(self, sums: ReleasedSums, std: float) -> AllocatedGaussian:
        guarantee, common = super().guarantee(sums, std), sums.displacement_and_overlap(self.groups)[1]
        return AllocatedGaussian(
            guarantee.noise_multiplier, self.bins, self.epochs, sums.relation, common, self._fading_overlaps(sums)
        )

    def _fading_overlaps(self, sums: ReleasedSums) -> FadingOverlaps | None:
        return sums.fading_overlaps(self.groups, self.bins)

    def distance(self, sums: ReleasedSums) -> float:
        return sums.displacement_and_overlap(self.groups)[0] / RELATION_FACTOR[sums.relation]

    @property
    def epochs(self) -> int:
        """Number of epochs, where an epoch that ends early counts as whole."""
        return -(-self.rounds // self.rounds_per_epoch)

    @property
    def words(self) -> str:
        choices = f"{self.bins} rounds" if self.groups == 1 else f"the {self.bins} rounds of its group"
        epochs_text = "" if self.epochs == 1 else f" in each of {self.epochs} epochs"
        return f"takes part in one of {choices}{epochs_text}, drawn at random, and in which one stays secret"


@dataclass(frozen=True)
class BalancedSubsampling(RandomAllocation):
    """Balanced iteration subsampling: each record takes part in k of the rounds, drawn in secret.

    k is the number of epochs, so that a record is read as often as in k passes, but in any rounds of its group.

    Guarantee: that of `RandomAllocation` with k epochs, in each of which a record draws one of its group's
    rounds.  A uniform set of k rounds is one round of every part of a partition of the rounds into k equal parts,
    if the partition is drawn uniformly, too.  Given the partition this is random allocation, and hockey sticks are
    jointly convex, so that the guarantee for every partition holds for their mixture, under both relations
    (docs/proofs/allocation.md).

    Source: Dong et al. 2026 for the scheme.

    Raises:
        InputError: A number is below 1, groups do not divide an epoch's rounds, or the rounds are no whole number
            of epochs.
    """

    name: ClassVar[str] = "balanced"
    title: ClassVar[str] = "balanced iteration subsampling"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds % self.rounds_per_epoch:
            raise InputError(
                f'federation.sampling = "{self.name}": {self.rounds} rounds are no whole number of epochs of '
                f"{self.rounds_per_epoch}, and a record takes part once an epoch on average"
            )

    def _fading_overlaps(self, sums: ReleasedSums) -> FadingOverlaps | None:
        """Return None: no chain bounds the overlaps, since each round of a record is random in the whole run."""
        return None

    def select_rows(
        self, t: int, batch: int, silo: int, randomness: Callable[[], SamplingRandomness]
    ) -> NDArray[np.int64]:
        """Draw a set of rounds for every row by Floyd's algorithm, and return the rows with round t, (B,).

        A row has as many different rounds of its group as the run has epochs, and every set of that size is
        equally likely.

        Args:
            t: Round, from 1.
            batch: Expected number of records of a round.
            silo: Number of the silo.
            randomness: Function that returns the silo's own sampling randomness.

        Raises:
            ValueError: Round t does not exist.
        """
        count, base = self.batches_per_silo * batch, self.rounds // self.groups - self.epochs
        # (draws, rows)
        drawn_rounds, sampling_randomness = np.empty((self.epochs, count), np.int64), randomness()
        # Draws depend on the row and not on t, so that each round finds the same sets.  Rounds of a group count
        # from 0.  Draw i is one of the first base + i + 1, and a repeated one is replaced by the last of these,
        # which earlier draws could not reach.
        for draw in range(self.epochs):
            candidates = sampling_randomness.numbers(count, base + draw + 1, silo, draw)
            drawn_rounds[draw] = np.where((drawn_rounds[:draw] == candidates).any(0), base + draw, candidates)
        rows = np.arange(count)[self.group_rows(t)]
        return np.asarray(rows[(drawn_rounds[:, rows] == (t - 1) // self.groups).any(0)])

    @property
    def words(self) -> str:
        return (
            f"takes part in {self.epochs} of {self.rounds // self.groups} rounds"
            f"{'' if self.groups == 1 else ' of its group'}, drawn at random, and in which ones stays secret"
        )


@dataclass(frozen=True)
class PoissonSampling(SecretOrder):
    """Poisson sampling: in every round of its group each record takes part with probability `rate`.

    Guarantee: participation is drawn independently for every record in every round, and only the silo that holds
    the record sees it.

    Raises:
        InputError: A number is below 1, or groups do not divide an epoch's rounds.

    Example:
        >>> PoissonSampling(rounds=20, rounds_per_epoch=10).rate
        0.1
    """

    name: ClassVar[str] = "poisson"
    title: ClassVar[str] = "Poisson sampling"

    @property
    def rate(self) -> float:
        """Probability q with which a record takes part in a round of its group."""
        return 1.0 / self.bins

    def truncate(self, rounds: int) -> Self:
        """Return the first `rounds` ≥ 1 rounds of the participation."""
        return type(self)(rounds, self.rounds_per_epoch, self.groups)

    def select_rows(
        self, t: int, batch: int, silo: int, randomness: Callable[[], SamplingRandomness]
    ) -> NDArray[np.int64]:
        """Return the rows that are drawn in round t, (B,).

        Args:
            t: Round, from 1.
            batch: Expected number of records of a round.
            silo: Number of the silo.
            randomness: Function that returns the silo's own sampling randomness.

        Raises:
            ValueError: Round t does not exist.
        """
        group, count = self.group_rows(t), self.batches_per_silo * batch  # refuses a round that does not exist
        return np.asarray(
            self.groups * np.flatnonzero(randomness().bernoulli(count, self.rate, silo, t)[group]) + group.start
        )

    def calibrate(self, epsilon: float, delta: float, relation: Relation) -> PoissonGaussian:
        return calibrated_poisson(epsilon, delta, self.rate, self._sampling_rounds, relation)

    def guarantee_for_noise(self, multiplier: float, relation: Relation) -> PoissonGaussian:
        return PoissonGaussian(multiplier, self.rate, self._sampling_rounds, relation)

    @property
    def _sampling_rounds(self) -> int:
        """Number of rounds in which a record of the first group may be drawn, the most of any group."""
        return -(-self.rounds // self.groups)

    @property
    def words(self) -> str:
        group_text = "" if self.groups == 1 else f" of its group ({self.groups} groups)"
        return f"takes part in each{group_text} with probability {self.rate:.5g}, and in which ones stays secret"
