"""Distances and overlaps of released running sums: rounded up, and looked at up to a number of rounds."""

from fractions import Fraction

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.noise.buffered import BufferedToeplitz
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.series import Workload
from fedpriv.participation.secret import RandomAllocation
from fedpriv.plan import sums as plan_sums
from fedpriv.plan.sums import RunningSums

FADING = BufferedToeplitz(1.0, (0.75,), (0.5,))


def sums_of(rounds: int, groups: int = 1) -> RunningSums:
    order = RandomAllocation(rounds, 4 * groups, groups)
    return RunningSums(FADING, Workload(order, 1.0, np.ones(rounds)), "zero-out")


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_displacement_and_overlap_of_the_rounds_of_a_record_are_rounded_up(groups: int) -> None:
    """C has 1 and then 0.75^(k-1)/4 in every column, whose squares and products are fractions."""
    series = [Fraction(1), *(Fraction(3, 4) ** k / 4 for k in range(7))]
    square = sum(value**2 for value in series)
    overlap = sum(series[k] * series[k + groups] for k in range(8 - groups))
    distance, share = map(Fraction, sums_of(8, groups).displacement_and_overlap(groups))
    assert square <= distance**2 <= square * (1 + Fraction(1, 10**12))
    assert overlap <= share * distance**2 <= overlap * (1 + Fraction(3, 2 * 10**12))


def test_displacement_and_overlap_are_rounded_up_if_columns_fade_over_thousands_of_rounds() -> None:
    """C has 1 and then ω θ^(k-1): squares that are lost one by one in a sum of floats are fractions here."""
    rounds, lag, theta, phi = 2000, 1000, 1.0 - 1e-8, 1.0 - 1e-7
    order = RandomAllocation(rounds, rounds, lag)
    noise = BufferedToeplitz(1.0, (theta,), (phi,))
    sums = RunningSums(noise, Workload(order, 1.0, np.ones(rounds)), "zero-out")
    pole, weight = Fraction(theta), Fraction(theta) - Fraction(phi)
    square = 1 + weight**2 * (1 - pole ** (2 * (rounds - 1))) / (1 - pole**2)
    overlap = weight * pole ** (lag - 1) + weight**2 * pole**lag * (1 - pole ** (2 * (rounds - lag - 1))) / (
        1 - pole**2
    )
    distance, share = map(Fraction, sums.displacement_and_overlap(lag))
    assert square <= distance**2 <= square * (1 + Fraction(1, 10**10))
    assert overlap <= share * distance**2 <= overlap * (1 + Fraction(1, 10**10))


def test_overlaps_of_too_many_rounds_of_one_record_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_sums, "MAX_ROUNDS", 6)
    for rounds, groups in ((6, 1), (12, 2), (11, 2)):
        assert sums_of(rounds, groups).displacement_and_overlap(groups)[1] > 0.0
    for rounds, groups in ((7, 1), (13, 2)):
        with pytest.raises(InputError, match="may take part in 7 rounds, and overlaps are looked at up to 6"):
            sums_of(rounds, groups).displacement_and_overlap(groups)


def test_a_bound_of_overlaps_exists_only_for_overlapping_rounds_in_at_most_200_bins() -> None:
    for bins, has_chains in ((4, True), (200, True), (201, False)):
        order = RandomAllocation(bins, bins)
        fading = RunningSums(FADING, Workload(order, 1.0, np.ones(bins)), "zero-out")
        assert (fading.fading_overlaps(1, bins) is not None) == has_chains
    alone = RunningSums(IndependentGaussian(), Workload(RandomAllocation(8, 4), 0.0, np.ones(8)), "zero-out")
    assert alone.displacement_and_overlap(1)[1] == 0.0
    assert alone.fading_overlaps(1, 4) is None
