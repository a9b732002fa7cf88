"""Released running sums as accounting needs them: sensitivities, blocks and overlaps.

Running sums A s of the increments s of T rounds, the clipped contributions of records, are released with the noise
B z of a mechanism, A = B C.  The release is post-processing of C s + z.  The increment of round t adds its product
with column C_t, (T,), to C s.  Under secret participation a record's rounds are unknown, but two of them are at
least `groups` rounds apart.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fedpriv.accounting.chain import MAX_ROUNDS as LONGEST_CHAIN
from fedpriv.accounting.chain import FadingOverlaps, find_overlaps
from fedpriv.accounting.gaussian import APART, Relation, moved_by
from fedpriv.core.errors import InputError
from fedpriv.noise.mechanism import Mechanism, Sensitivity
from fedpriv.noise.sensitivity import MAX_ROUNDS
from fedpriv.noise.series import Workload

_ROUNDING = 1e-14
"""Relative rounding of the squared norm of a column, for each of its rounds."""


class IntegerRelease(NamedTuple):
    """Arithmetic of an exact release: integer sums with discrete Gaussian noise."""

    exponent: int
    """Exponent of the lattice's unit, a power of 2."""
    sigma: float
    """Noise parameter σ of one party's fresh vector of scale 1, in units."""
    dimension: int
    """Number of values of a vector."""
    owners: int
    """Number of parties that each add noise of `sigma`."""


@dataclass(frozen=True)
class RunningSums:
    """Running sums and their noise, with the bounds that accounting needs of them (`ReleasedSums`)."""

    mechanism: Mechanism
    """Mechanism of the noise, which factors the workload."""
    workload: Workload
    """Running sums, their clips and the participation."""
    relation: Relation
    """Neighbouring relation."""
    record_weight: float = 1.0
    """Weight of one record's increment in the sums, as 1 / batch in a mean."""
    increment_diameter: float = APART
    """Largest distance of two increments, in clips."""
    exact: bool = False
    """Whether the sums are released as integers."""

    @cached_property
    def certified(self) -> Sensitivity:
        return self.mechanism.certified(self.workload)

    def sensitivity(self) -> float:
        return self.certified.value

    def block_displacement(self, groups: int) -> float:
        """Compute κ = max_t clip_t ‖C_t‖, rounded up, if no column C_t has more than `groups` bands.

        A column with b bands is 0 outside of the rows t … t + b - 1.  So a record of round t changes only these
        rows of C s, its block, and moves it by at most κ.

        Guarantee: if a number is returned, the blocks of two rounds that lie `groups` or more apart are disjoint.
        The record's increment depends on no release of its own block.  So blocks are accounted for as rounds with
        independent noise, under either relation.

        Args:
            groups: Least distance of two rounds of one record.

        Raises:
            InputError: The columns have more bands than `groups` or are not known to have few, or the mechanism is
                for other sums.
        """
        decay, blocks = self.workload.decay, self.mechanism.blocks(self.workload)
        refusal = "secret participation (federation.sampling) cannot be accounted for"
        if blocks is None and self.mechanism.fades:
            raise InputError(
                f"{refusal} with {self.mechanism.name} noise, which fades and never ends, by Poisson sampling or "
                'on integers; take sampling = "allocation" in floating point, or mechanism = "banded"'
            )
        if blocks is None:
            raise InputError(
                f"{refusal} with {self.mechanism.name} noise on running sums of decay = {decay:g}: a record's "
                "influence is unbounded there; take an algorithm that releases each round by itself, such as "
                'dp-sgd, or mechanism = "banded" with federation.groups of at least its bands'
            )
        if blocks.bands > groups:
            raise InputError(
                f"{refusal} with {blocks.bands} bands of correlated noise and federation.groups = {groups}: what "
                f"a record moves in two of its rounds would overlap; set groups to {blocks.bands} or more, or "
                "take fewer bands"
            )
        return float(np.max(self.workload.clips * blocks.norms) * (1.0 + _ROUNDING * self.workload.rounds))

    def displacement_and_overlap(self, groups: int) -> tuple[float, float]:
        """Compute κ and the largest overlap of two rounds of one record, 0 for disjoint blocks.

        κ = max_t clip_t ‖C_t‖ bounds what an increment of norm clip_t adds to C s.  The overlap of rounds s and t
        is ⟨C_s, C_t⟩ clip_s clip_t / κ².  Overlaps are computed for sums that are released in floating point, with
        noise whose columns fade without an end and whose sensitivity rests on clipping alone.  Otherwise records
        move blocks, which have to be disjoint (`block_displacement`).

        Guarantee: κ² and the overlap times κ² are v and a of `accounting.fading` at σ = 1, rounded up, for noise
        that fades, C ≥ 0, in real numbers.  These are the largest clip_t² ‖C_t‖², and the largest
        clip_s clip_t ⟨C_s, C_t⟩ of two different rounds of one group.

        Args:
            groups: Distance of two consecutive rounds in which a record may take part.

        Raises:
            InputError: `block_displacement` refuses the noise, the mechanism is for other sums, or there are more
                than 2,000 rounds in which a record may take part.
        """
        if not self.mechanism.fades or self.exact or self.mechanism.assumption is not None:
            return self.block_displacement(groups), 0.0
        clips, columns = self.workload.clips, self.mechanism.columns(self.workload)
        # Rounds of one record are all in one group.
        rounds_by_group = [np.arange(first, len(clips), groups) for first in range(min(groups, len(clips)))]
        if len(rounds_by_group[0]) > MAX_ROUNDS:
            raise InputError(
                f"secret participation with {self.mechanism.name} noise: a record may take part in "
                f"{len(rounds_by_group[0]):,} rounds, and overlaps are looked at up to "
                f"{MAX_ROUNDS:,}; set federation.groups higher"
            )
        round_up = 1.0 + _ROUNDING * len(clips)
        max_square = float(np.max(clips**2 * columns.squared_norms)) * round_up
        # Above the diagonal stand the products of two different rounds.
        max_product = max(
            float(np.max(np.triu(columns.inner(group) * np.outer(clips[group], clips[group]), 1)))
            for group in rounds_by_group
        )
        return math.sqrt(max_square) * (1.0 + _ROUNDING), max_product * (1.0 + 1e-12) * round_up / max_square

    def fading_overlaps(self, groups: int, bins: int) -> FadingOverlaps | None:
        """Compute a bound of the overlaps of a record's rounds as chains that fade, in units of κ².

        The overlap of rounds s and t is clip_s clip_t ⟨C_s, C_t⟩, and κ the largest clip_t ‖C_t‖.  A chain
        (`accounting.chain`) bounds the overlaps by a covariance that falls with the distance of two rounds.  All
        rounds of a record are in one group: every `groups`-th round, from one of the first `groups` on.  The k-th
        rounds of all groups are treated as one, with the largest clip and inner products of any group.

        Guarantee: before the chain is split into one for each epoch, its covariances plus an overlap that all
        rounds share are at least all overlaps of two rounds of one record, whatever the record's group, for the
        noise of `displacement_and_overlap`.  Products of 1e-290 or less may count as 0 (`dominating_chain`).  The
        shared overlap is charged as a release for which the record's participation is known.  The split lowers no
        expectation that accounting uses (`find_overlaps`).

        Args:
            groups: Distance of two consecutive rounds in which a record may take part.
            bins: Number of rounds of an epoch in which a record may take part.

        Returns:
            Overlaps, or None if no two rounds overlap, or if `bins` is above 200.

        Raises:
            InputError: `displacement_and_overlap` refuses the noise or the number of rounds.
        """
        max_norm, max_overlap = self.displacement_and_overlap(groups)
        if max_overlap == 0.0 or bins > LONGEST_CHAIN:
            return None
        columns, clips = self.mechanism.columns(self.workload), self.workload.clips / max_norm * (1.0 + _ROUNDING)
        # Entry k is the k-th round of any group.
        epochs = -(-len(clips) // (groups * bins))
        products, norms = np.zeros((epochs * bins,) * 2), np.zeros(epochs * bins)
        for first in range(min(groups, len(clips))):
            rounds_of_group = np.arange(first, len(clips), groups)
            prefix = slice(0, len(rounds_of_group))
            products[prefix, prefix] = np.maximum(products[prefix, prefix], columns.inner(rounds_of_group))
            norms[prefix] = np.maximum(norms[prefix], clips[rounds_of_group])
        return find_overlaps(products, norms, bins)

    def displacement(self, distance: float) -> float:
        return moved_by(self.relation, self.record_weight, distance, self.increment_diameter)
