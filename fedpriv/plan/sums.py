"""Released running sums as accounting asks about them: sensitivities, blocks and overlaps."""

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
"""Relative, of a norm of a column."""


class IntegerRelease(NamedTuple):
    """The arithmetic of a release that is exact: sums are integers, noise is a discrete Gaussian."""

    exponent: int
    """The lattice's unit is 2 to this power."""
    sigma: float
    """Of a fresh vector of one owner and scale 1, in units."""
    dimension: int
    owners: int
    """How many add noise of `sigma` each."""


@dataclass(frozen=True)
class RunningSums:
    """Released running sums as accounting asks about them; see `participation.base.Sums`."""

    mechanism: Mechanism
    workload: Workload
    relation: Relation
    record_weight: float = 1.0
    increment_diameter: float = APART
    exact: bool = False
    """Whether they are released as integers."""

    @cached_property
    def certified(self) -> Sensitivity:
        return self.mechanism.certified(self.workload)

    def sensitivity(self) -> float:
        return self.certified.value

    def block_displacement(self, groups: int) -> float:
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

    def displacement_and_overlap(self, groups: int) -> tuple[float, float]:
        """κ, and the largest ⟨C_s, C_t⟩ clip_s clip_t / κ² of two rounds of one record: 0 for disjoint blocks.

        Guarantee: both are those of `accounting.overlap`, rounded up; asked of noise that fades, C ≥ 0, in real
        numbers. InputError for anything else, with the reason.
        """
        if not self.mechanism.fades or self.exact or self.mechanism.assumption is not None:
            return self.block_displacement(groups), 0.0
        clips, columns = self.workload.clips, self.mechanism.columns(self.workload)
        held = [np.arange(first, len(clips), groups) for first in range(min(groups, len(clips)))]
        if len(held[0]) > MAX_ROUNDS:
            raise InputError(
                f"secret participation with {self.mechanism.name} noise: a record may take part in {len(held[0])} "
                f"rounds, and overlaps are looked at up to {MAX_ROUNDS:,}; set federation.groups higher"
            )
        largest = float(np.max(clips**2 * columns.squared_norms)) * (1.0 + _ROUNDING)
        products = (columns.inner(each) * np.outer(clips[each], clips[each]) for each in held)
        shared = max(float(np.max(np.triu(each, 1))) for each in products)
        return math.sqrt(largest) * (1.0 + _ROUNDING), shared * (1.0 + 1e-12) / largest

    def fading_overlaps(self, groups: int, bins: int) -> FadingOverlaps | None:
        """How overlaps fade, over κ²; None for disjoint blocks, and where an epoch has too many rounds.

        Guarantee: chains above all that two rounds of one record overlap by, whatever its group, asked of what
        `overlap` is asked of.
        """
        if self.displacement_and_overlap(groups)[1] == 0.0 or bins > LONGEST_CHAIN:
            return None
        distance, columns = self.displacement_and_overlap(groups)[0], self.mechanism.columns(self.workload)
        rounds, clips = len(self.workload.clips), self.workload.clips / distance * (1.0 + _ROUNDING)
        epochs = -(-rounds // (groups * bins))
        products, longest = np.zeros((epochs * bins,) * 2), np.zeros(epochs * bins)
        for first in range(min(groups, rounds)):
            held = np.arange(first, rounds, groups)
            here = slice(0, len(held))
            products[here, here] = np.maximum(products[here, here], columns.inner(held))
            longest[here] = np.maximum(longest[here], clips[held])
        return find_overlaps(products, longest, bins)

    def displacement(self, distance: float) -> float:
        return moved_by(self.relation, self.record_weight, distance, self.increment_diameter)
