"""What floating point can hold: a guarantee in real numbers needs clips, noise and sums that do not get lost."""

import sys
from collections.abc import Iterable

from fedpriv.errors import InputError
from fedpriv.estimators.round import Round
from fedpriv.privacy.trust import Noise

SMALLEST_CLIP, LARGEST_CLIP = 2.0**-40, 2.0**40
"""`fedpriv.objectives.clipping` holds between these."""
_SMALLEST_SHARE = 2.0**-70  # of a record: float32 ends at 2^-126, and factors go down by a norm of 2^50
_SMALLEST_STD, _LARGEST_STD = 2.0**-100, 2.0**100
MOST_DEVIATIONS = 2.0**30
"""The largest sum, in standard deviations of its noise: then 22 digits of float64 lie below one of them."""


def check_clips(rounds: Iterable[Round], largest_batch: int, private: bool) -> None:
    """InputError for a clip that increments cannot be held to; without noise it may be any large number.

    `largest_batch` is the most records of one silo in a round.
    """
    for current in rounds:
        for clip in current.clips:
            if not SMALLEST_CLIP <= clip <= (LARGEST_CLIP if private else sys.float_info.max):
                raise InputError(
                    f"algorithm: increments of round {current.t} would be clipped to norm {clip:.3g}; clips "
                    f"between {SMALLEST_CLIP:.2g} and {LARGEST_CLIP:.2g} hold in floating point"
                )
            if clip / largest_batch < _SMALLEST_SHARE:
                raise InputError(
                    f"algorithm: a clip of {clip:.3g} over a batch of {largest_batch} records is too small for "
                    "floating point; use a larger clip or a smaller batch"
                )


def check_noise(noise: Noise) -> None:
    """InputError for noise that floating point cannot draw or add."""
    for source in noise.sources:
        std = float(source.std)
        if not _SMALLEST_STD <= std <= _LARGEST_STD:
            raise InputError(
                f"privacy: noise of standard deviation {std:.3g} is nothing that floating point can add; between "
                f"{_SMALLEST_STD:.2g} and {_LARGEST_STD:.2g} it can"
            )


def check_sums(noise: Noise, largest_sum: float, fresh_std: float) -> None:
    """InputError for noise that would be lost in the rounding of what it is added to.

    `largest_sum` bounds the norm of that; `fresh_std` is how much of the noise is fresh in every release.
    """
    for source in noise.sources:
        fresh = float(source.std) * fresh_std
        if not largest_sum <= MOST_DEVIATIONS * fresh:
            raise InputError(
                f"privacy: sums of up to {largest_sum:.3g} would hide noise of standard deviation {fresh:.3g} in "
                f"their rounding; at most {MOST_DEVIATIONS:.2g} standard deviations, so ask for more privacy"
            )
