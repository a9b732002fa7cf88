"""Buffered linear Toeplitz (BLT) noise: nearly optimal for a stream, with few vectors of state.

C is the Toeplitz matrix with the coefficients c_0 = 1 and c_k = Σ_i ω_i θ_i^(k-1).  Its poles θ and zeros φ
interlace, θ_1 > φ_1 > θ_2 > …, and ω_i = Π_j (θ_i - φ_j) / Π_{j≠i} (θ_i - θ_j).  s_t is the sum of the increments
of round t, the clipped contributions of its records.  A s are the running sums with a decay, and B = A C^-1, so
that the noise of round t is (B z)_t for fresh vectors z of independent normal values.  A record is charged the
distance by which it moves C s.  Special cases, without the `column_scale` below:

| θ | φ | noise | vectors of state |
|---|---|---|---|
| () | () | independent on the increments, C = I | 1, or 0 for decay 0 |
| (λ,), λ ≠ decay | (0,) | λ-CGD, C^-1 = I - λ · shift by one round | 1 |
| (decay,), decay > 0 | (0,) | independent on the sums, C = A | 0 |

`column_scale` holds D_1 … D_T: the noise of increment t is divided by D_t, so that C diag(D) replaces C.  Late
columns of C are short.  In a single pass a D can lengthen them and cost no record more than the worst record costs
without it.

A workload has the decay, the clip of every round and the rounds in which records take part.

On integers θ and the residues ω are multiples of 2^-31, and φ, which B needs, follows from them.

Sources: McMahan, Xiao, Pillutla 2024 and Dvijotham et al. 2024 for BLT, Kalinin et al. 2026 (DP-λCGD) for λ-CGD.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from fedpriv.core.errors import InputError, refuse
from fedpriv.core.replicates import SHARED
from fedpriv.noise import sensitivity as nonincreasing
from fedpriv.noise import series
from fedpriv.noise.integers.fixed_point import (
    COEFFICIENT_ONE,
    Ints,
    round_coefficient,
    scale_bound,
    scale_integers,
    to_coefficient,
)
from fedpriv.noise.integers.strategies import (
    IntegerBounds,
    IntegerStrategy,
    IntState,
    Lattice,
    LoadBounds,
    NoiseGroup,
    accumulated_rounding,
    participations_per_record,
)
from fedpriv.noise.mechanism import Columns, Factorization, MechanismState, Sensitivity, column_scale
from fedpriv.noise.series import Floats, Workload, powers
from fedpriv.noise.toeplitz import Toeplitz

if TYPE_CHECKING:
    from torch import Tensor


_Root = Annotated[float, Field(ge=0, le=1, strict=True)]
_Roots = Annotated[tuple[_Root, ...], Field(max_length=16, strict=False)]  # TOML and JSON have lists


class BufferedOptions(BaseModel):
    """Scenario keys of buffered noise, whose roots are fitted before the run if they are left out."""

    theta: _Roots = Field(
        (), description='poles of C, falling, for "blt", or λ alone for "lambda-cgd"; fitted if left out'
    )
    phi: _Roots = Field((), description='zeros of C for "blt", one below each pole')
    scale: bool = Field(
        False,
        description='"blt" and "lambda-cgd" in one pass with equal clips: late noise shrinks where C is short, at '
        "the same price",
    )


@dataclass(frozen=True)
class BufferedToeplitz(Toeplitz):
    """Noise C^-1 z on the increments, added to the running sum with them, for the C of interlacing roots.

    Guarantee: the roots are checked to interlace, so C ≥ 0 with nonincreasing coefficients, whoever fitted them.
    The worst record of a fixed order is charged exactly.  So is that of separated participations with equal clips,
    if there is no `column_scale`.  In other separated participations, and in phases, the charge is exact or an
    upper bound.
    """

    name: ClassVar[str] = "blt"
    fades: ClassVar[bool] = True
    words: ClassVar[str] = "Gaussian noise correlated over the rounds (a few decaying buffers)"

    decay: float = field(default=1.0, metadata=SHARED)
    """Decay of the running sum, 0 to 1."""
    theta: series.Roots = field(default=(), metadata=SHARED)
    """Poles of C, in falling order, each at most `decay`, or at most 1 for decay 0."""
    phi: series.Roots = field(default=(), metadata=SHARED)
    """Zeros of C, one below each pole."""
    column_scale: tuple[float, ...] = field(default=(), metadata=SHARED)
    """D_t of every planned round, or empty for 1 everywhere."""
    period: None = None
    """None, since the sums never restart."""

    def __post_init__(self) -> None:
        if self.period is not None:
            raise InputError(f'period = {self.period}: "{self.name}" noise is for sums that never restart')
        if not all(0.0 < factor < math.inf for factor in self.column_scale):
            raise InputError("column_scale: every factor is a finite number above 0")
        series.check_roots(self.theta, self.phi, self.decay)

    @classmethod
    def of(cls, workload: Workload, options: BufferedOptions) -> Self:
        """Return the mechanism of the roots in `options`.

        Raises:
            InputError: There are no roots, they do not interlace or are out of range, or noise cannot be scaled.
        """
        if not options.theta:
            raise InputError(
                f"mechanism = {cls.name!r}: its roots are fitted before a run starts and sent as numbers, and "
                'here are none; give theta, and phi with it for "blt"'
            )
        plain = cls(workload.decay, options.theta, cls._option_zeros(options))
        return plain.with_equal_columns(workload) if options.scale else plain

    @classmethod
    def comparisons(cls, workload: Workload, options: BufferedOptions) -> dict[str, Self]:
        """Return no comparisons, because their roots have to be fitted first."""
        return {}

    def options(self) -> dict[str, Any]:
        return {"theta": list(self.theta), "phi": list(self.phi)} | ({"scale": True} if self.column_scale else {})

    @property
    def label(self) -> str:
        return f"{self.name} ({len(self.theta)}{', scaled' if self.column_scale else ''})"

    def with_equal_columns(self, workload: Workload) -> Self:
        """Return the mechanism with the `column_scale` that makes every column of C as long as the first.

        Guarantee: the sensitivity is that without this scale, up to rounding.

        Raises:
            InputError: Participation is secret, in fresh permutations or no single pass, clips differ, or the
                mechanism does not factor the workload.
        """
        if not (workload.public_order.single_pass and workload.equal_clips):
            raise InputError("scale: noise is scaled in a single pass with the same clip in every round only")
        plain_norms = replace(self, column_scale=()).columns(workload).squared_norms
        return replace(self, column_scale=tuple(column_scale(plain_norms, workload).tolist()))

    def certified(self, workload: Workload) -> Sensitivity:
        self.check_workload(workload)
        longer = replace(workload, clips=workload.clips * self._column_scale(workload.rounds))
        return nonincreasing.sensitivity_from_series(longer, self.strategy_series(workload.rounds))

    def columns(self, workload: Workload) -> Columns:
        plain, scale = super().columns(workload), self._column_scale(workload.rounds)
        return Columns(
            plain.squared_norms * scale**2,
            lambda rounds: plain.inner(rounds) * np.outer(scale[rounds], scale[rounds]),
        )

    @property
    def fresh_std(self) -> float:
        """Smallest entry of B's diagonal: 1, or 1 / max(D) with `column_scale`."""
        return 1.0 / max(self.column_scale, default=1.0)

    def variance(self, workload: Workload) -> Floats:
        if not self.column_scale:
            return super().variance(workload)
        self.check_workload(workload)
        return self._scaled_variance(workload.rounds)

    def noise_series(self, workload: Workload) -> Floats | None:
        return None if self.column_scale else super().noise_series(workload)

    def memory_vectors(self, workload: Workload) -> int:
        return len(self.phi) + (self.decay > 0.0) if self.column_scale else len(self._modes)

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """Return (B z)_t and the next state.

        Without `column_scale`, the coefficient of z_(t-k) in row t of B z is 1 for k = 0 and Σ_m g_m p_m^(k-1) for
        k ≥ 1, with the gain g_m and the pole p_m of each `series.Mode`.  So the row is z_t + Σ_m g_m b_m, for
        decayed sums b_m of earlier fresh vectors, which the state holds.  Then b_m becomes p_m b_m + z_t.

        Args:
            state: State before round t, which is not read in round 1.
            t: Round, from 1.
            fresh: Fresh vector z_t.

        Raises:
            InputError: The mechanism has a `column_scale` that is not planned for this round.
        """
        if self.column_scale:  # B is not Toeplitz, and has another state
            return self._scaled_noise(state, t, fresh)
        if not self._modes:  # B = I
            return fresh, ()
        if t == 1:
            return fresh, (fresh,) * len(self._modes)
        noise = fresh.add(state[0], alpha=self._modes[0].gain)
        for mode, buffer in zip(self._modes[1:], state[1:], strict=True):
            noise.add_(buffer, alpha=mode.gain)
        return noise, tuple(
            _advance_buffer(buffer, mode.pole, fresh) for mode, buffer in zip(self._modes, state, strict=True)
        )

    def strategy_series(self, count: int) -> Floats:
        """Return the leading coefficients of C without `column_scale`, (count,), or (1,) for C = I."""
        return series.series_from_roots(self.theta, self.phi, count if self.theta else 1)

    def noise_row(self, count: int) -> Floats:
        """Return the leading coefficients of B without `column_scale`, (count,)."""
        row: Floats = np.eye(1, count)[0]
        for mode in self._modes:
            row[1:] += mode.gain * powers(mode.pole, count - 1)
        return row

    def integer(self, workload: Workload) -> Factorization:
        """Return the factorization A = B C on integers, with the C of rounded poles and residues.

        θ, the residues ω and the decay of A are rounded to multiples of 2^-31.  φ follows from θ and ω, so that B
        belongs to the rounded C.  Roots are rounded until they stay (`_round_roots`).  With `column_scale`
        increments are multiplied by D_t before they become integers.

        Guarantee: `integer` of the result's mechanism has the result's strategy again.  So a claim that is
        computed from a ledger, which has this mechanism, is of the C to whose outputs the noise was added.

        Raises:
            InputError: The rounded roots do not interlace or never stay, or the rounded residues add up to more
                than 1.
        """
        # Rounded again and again, up to the first mechanism that stays as it is.
        steps = accumulate(range(_MAX_ROUNDINGS), lambda mechanism, _: mechanism._round_roots(), initial=self)
        exact = next((rounded for before, rounded in pairwise(steps) if rounded == before), None)
        if exact is None:
            raise InputError(
                f"theta = {list(self.theta)}, phi = {list(self.phi)}: rounded to multiples of 2^-31 these roots "
                "become others again and again; take roots that differ more"
            )
        strategy = make_integer_buffered(exact.theta, exact.phi)
        # More digits of the buffers than those of the roundings to whole units would gain little.
        strategy = replace(strategy, digits=min(_DIGITS, strategy.max_roundings(workload.rounds).bit_length()))
        workload = replace(workload, decay=exact.decay)
        spread = _series_spread(strategy, exact, workload)
        return (
            ScaledFactorization(strategy, exact, workload, spread, scaled_mechanism=exact)
            if exact.column_scale
            else Factorization(strategy, exact, workload, spread)
        )

    def _round_roots(self) -> Self:
        """Return the mechanism of the integer strategy of these roots, with the decay rounded, too.

        The result may have other roots once more if it is rounded again, where a zero of about 0 is taken for 0,
        or roots are close to each other.
        """
        strategy = make_integer_buffered(self.theta, self.phi)
        # Rounding moves a zero φ_m = 0 to either side of 0, and zeros may not be negative.
        theta, phi = (
            tuple(root / COEFFICIENT_ONE for root in strategy.theta),
            tuple(
                max(0.0, root) if root > -_ZERO_TOLERANCE else root for root in rounded_zeros(strategy).tolist()
            ),
        )
        return replace(self, decay=round_coefficient(self.decay), theta=theta, phi=phi)

    @classmethod
    def _option_zeros(cls, options: BufferedOptions) -> series.Roots:
        return options.phi

    def _scaled_noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """Return (B z)_t, (..., d), for a C with `column_scale`, and the next state.

        The noise n_t of the running sum is decay n_(t-1) plus that of increment t, (z_t + Σ_m w_m u_m) / D_t.  The
        w_m are the residues of C^-1 at its poles φ_m, and u_m, 0 before round 1, becomes φ_m u_m + z_t in round t.
        The state is n_t, which is left out for decay 0, followed by u_m for each φ_m.

        Args:
            state: State before round t, which is not read in round 1.
            t: Round, from 1.
            fresh: Fresh vector z_t, (..., d).

        Raises:
            InputError: The scale is not planned for this round.
        """
        if t > len(self.column_scale):
            raise InputError(f"round {t}: column_scale is planned for {len(self.column_scale)} rounds")
        inverse_scale = 1.0 / self.column_scale[t - 1]
        has_last_noise, increment, buffers = int(self.decay > 0.0), fresh * inverse_scale, list["Tensor"]()
        if t == 1:
            return increment, ((increment,) * has_last_noise) + (fresh,) * len(self.phi)
        for weight, pole, buffer in zip(self._inverse_residues, self.phi, state[has_last_noise:], strict=True):
            increment.add_(buffer, alpha=weight * inverse_scale)
            buffers.append(_advance_buffer(buffer, pole, fresh))
        if not has_last_noise:
            return increment, tuple(buffers)
        noise = increment.add_(state[0], alpha=self.decay)
        return noise, (noise, *buffers)

    def _scaled_variance(self, rounds: int) -> Floats:
        """Return the variance of the noise of every round, (rounds,), for fresh vectors of variance 1.

        The last noise n and a number u for each φ (`_scaled_noise`) are linear in the fresh vectors.  So their
        covariance follows round by round: Cov ← M Cov Mᵀ + v vᵀ, for the transition M from round to round and the
        weights v of z_t.
        """
        size = len(self.phi) + 1  # the last noise, and u of each φ
        covariance, variances = np.zeros((size, size)), np.empty(rounds)
        transition, input_weights = np.diag([float(self.decay), *self.phi]), np.ones(size)
        weights, factors = np.array(self._inverse_residues), self._column_scale(rounds)
        for t in range(1, rounds + 1):
            transition[0, 1:] = weights / factors[t - 1]
            input_weights[0] = 1.0 / factors[t - 1]
            covariance = transition @ covariance @ transition.T + np.outer(input_weights, input_weights)
            variances[t - 1] = covariance[0, 0]
        return variances

    def check_workload(self, workload: Workload) -> None:
        super().check_workload(workload)
        if self.column_scale and workload.rounds > len(self.column_scale):
            raise InputError(
                f"column_scale is planned for {len(self.column_scale)} rounds, the workload has {workload.rounds}"
            )

    def _column_scale(self, rounds: int) -> Floats:
        return np.array(self.column_scale[:rounds]) if self.column_scale else np.ones(rounds)

    @cached_property
    def _modes(self) -> tuple[series.Mode, ...]:
        return series.noise_modes(self.decay, self.theta, self.phi)

    @cached_property
    def _inverse_residues(self) -> tuple[float, ...]:
        return tuple(series.residues(self.phi, self.theta).tolist())


@dataclass(frozen=True)
class LambdaCgd(BufferedToeplitz):
    """λ-CGD: one buffer with φ = 0.

    Without `column_scale` round t adds z_t - λ z_(t-1) to its increment, with z_0 = 0.

    Guarantee: that of `BufferedToeplitz`.

    Example:
        >>> from fedpriv.participation.orders import FixedOrder
        >>> workload = Workload(FixedOrder(rounds=8, rounds_per_epoch=8), decay=1.0, clips=np.ones(8))
        >>> round(LambdaCgd(1.0, (0.5,), (0.0,)).certified(workload).value, 4)
        1.1547
    """

    name: ClassVar[str] = "lambda-cgd"
    words: ClassVar[str] = "Gaussian noise correlated over the rounds (each increment takes back some of the last)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.theta) != 1 or self.phi != (0.0,):
            raise InputError(
                f"theta = {list(self.theta)}, phi = {list(self.phi)}: lambda-cgd has one root and no zero above 0"
            )

    @property
    def label(self) -> str:
        return f"{self.name} ({self.theta[0]:.6g}{', scaled' if self.column_scale else ''})"

    @classmethod
    def _option_zeros(cls, options: BufferedOptions) -> series.Roots:
        return options.phi or (0.0,)


def _advance_buffer(buffer: "Tensor", pole: float, fresh: "Tensor") -> "Tensor":
    return fresh.add(buffer, alpha=pole) if pole else fresh


_DIGITS, _MAX_DIGITS = 10, 24  # most binary digits that are chosen, and that are accepted
_MAX_ROUNDINGS = 32
"""Most times that roots are rounded.  Fitted ones stay after one time or two."""
_ZERO_TOLERANCE = 2.0**-20  # rounded residues give a φ_m near 0, on either side, for φ_m = 0


@dataclass(frozen=True)
class ScaledFactorization(Factorization):
    """Factorization with a `column_scale`: increments are D_t s_t, and B divides by D_t.

    Guarantee: C is charged for increments of norm D_t S_t, with the clip S_t.
    """

    scaled_mechanism: BufferedToeplitz = field(kw_only=True)
    """Mechanism B with its `column_scale` D."""

    def increment_scale(self, t: int) -> float:
        return self.scaled_mechanism.column_scale[t - 1]

    def part_clips(self, t: int) -> tuple[float, ...]:
        return (float(self.workload.clips[t - 1]) * self.increment_scale(t),)

    def sensitivity_in_units(self, lattice: Lattice) -> float:
        rounds = range(1, self.workload.rounds + 1)
        norms = np.array([float(lattice.norm(clip)) for t in rounds for clip in self.part_clips(t)])
        return replace(self.scaled_mechanism, column_scale=()).sensitivity(replace(self.workload, clips=norms))


@dataclass(frozen=True)
class IntegerBuffered(IntegerStrategy):
    """C on integers: returns s_t + Σ_i ⌊ω_i b_i / 2^g⌉, and then b_i ← ⌊θ_i b_i⌉ + 2^g s_t.

    θ and ω count multiples of 2^-31.  `digits` is g, the number of fractional bits of the buffers: b_i is an
    integer that counts multiples of 2^-g.

    In T rounds the roundings of buffer i change the difference of outputs of neighbours by at most ω_i min(T, 1 /
    (1 - θ_i)) / 2^g, and the rounding of its product by at most 1.
    """

    theta: tuple[int, ...]
    """θ_i of each buffer, in multiples of 2^-31."""
    omega: tuple[int, ...]
    """ω_i of each buffer, in multiples of 2^-31."""
    digits: int = 0

    def __post_init__(self) -> None:
        """Check that the coefficients of C, 1, Σ ω_i, Σ ω_i θ_i, …, are not negative and never increase.

        This follows from 0 ≤ θ_i ≤ 1, ω_i ≥ 0 and Σ ω_i ≤ 1, which are checked.

        Raises:
            InputError: One of these does not hold, there are not as many ω_i as θ_i, or `digits` is out of its
                range.
        """
        refuse(
            {
                f"{len(self.theta)} decays, {len(self.omega)} weights, {self.digits} digits: as many decays "
                f"as weights are needed, and 0 to {_MAX_DIGITS} digits": (
                    len(self.theta) != len(self.omega) or not 0 <= self.digits <= _MAX_DIGITS
                ),
                "buffers decay by 0 to 1 a round and have weights of 0 or more": (
                    any(not 0 <= theta <= COEFFICIENT_ONE for theta in self.theta)
                    or min(self.omega, default=0) < 0
                ),
                "the buffers' weights add up to more than 1: C would not fall": sum(self.omega) > COEFFICIENT_ONE,
            }
        )

    def noise_groups(self, rounds: int, participations: int) -> tuple[NoiseGroup, ...]:
        return (NoiseGroup(rounds, 1.0, len(self.theta) + self._exact_roundings(rounds) / 2**self.digits),)

    def max_roundings(self, rounds: int) -> int:
        """Bound the difference of outputs from the buffers' roundings, in units of 2^-digits, rounded up."""
        return math.ceil(self._exact_roundings(rounds))

    def _exact_roundings(self, rounds: int) -> Fraction:
        return sum(
            (
                Fraction(omega, COEFFICIENT_ONE) * accumulated_rounding(theta, rounds)
                for theta, omega in zip(self.theta, self.omega, strict=True)
            ),
            Fraction(0),
        )

    def bound_integers(self, loads: Sequence[LoadBounds]) -> IntegerBounds:
        """Bound |(C s)_t| and the buffers over all rounds, given bounds of the sums s_t.

        The bounds follow the recursion of the class, with every rounding upwards.

        Args:
            loads: Largest absolute value of a coordinate of s_t for each round, as a tuple of one.

        Returns:
            Bound of the outputs, and a bound of outputs and buffers.
        """
        largest, max_state, buffers = 0, 0, [0] * len(self.theta)
        for (load,) in loads:
            output_share = sum(
                scale_bound(b, omega, self.digits) for b, omega in zip(buffers, self.omega, strict=True)
            )
            largest = max(largest, load + output_share)
            buffers = [
                scale_bound(b, theta) + (load << self.digits) for b, theta in zip(buffers, self.theta, strict=True)
            ]
            max_state = max(max_state, largest, *buffers)
        return IntegerBounds(largest, max_state)

    def step(self, state: IntState, t: int, sums: Ints) -> tuple[Ints, IntState]:
        """Return (C s)_t and the next state, which holds the buffers b_i, each shaped like `sums`.

        `sums` are the sums s_t of round t, int64 of any shape.  The state before round 1 is empty.
        """
        fresh = sums << self.digits
        if not state:
            return sums, (fresh,) * len(self.theta)
        # The output takes the buffers as they were before this round's sums.
        total, buffers = sums.copy(), []
        for buffer, theta, omega in zip(state, self.theta, self.omega, strict=True):
            total += scale_integers(buffer, omega, self.digits)
            buffers.append((buffer if theta == COEFFICIENT_ONE else scale_integers(buffer, theta)) + fresh)
        return total, tuple(buffers)


def make_integer_buffered(theta: Sequence[float], phi: Sequence[float], digits: int = 0) -> IntegerBuffered:
    """Return the integer strategy of the roots 1 ≥ θ_1 > φ_1 > θ_2 > φ_2 > … ≥ 0.

    The residues ω_i are computed from the roots as exact fractions, and then θ_i and ω_i are rounded to multiples
    of 2^-31.

    Args:
        theta: Poles θ.
        phi: Zeros φ, as many as poles.
        digits: Number g of fractional bits, 0 to 24: the buffers hold multiples of 2^-g.

    Raises:
        InputError: The roots do not interlace in this way, the rounded ω_i add up to more than 1, or `digits` is
            out of its range.
    """
    series.check_roots(tuple(theta), tuple(phi), 1.0)
    exact = [[Fraction(root) for root in roots] for roots in (theta, phi)]
    return IntegerBuffered(
        tuple(to_coefficient(root) for root in theta),
        tuple(round(_residue(exact[0], exact[1], i) * COEFFICIENT_ONE) for i in range(len(theta))),
        digits,
    )


def rounded_zeros(strategy: IntegerBuffered) -> NDArray[np.float64]:
    """Return the zeros φ_1 > φ_2 > … of C for the rounded θ and ω, (buffers,).

    The zeros are the eigenvalues of diag(θ) - √ω √ωᵀ (the matrix determinant lemma), which is symmetric.
    """
    theta, omega = (np.array(values, np.float64) / COEFFICIENT_ONE for values in (strategy.theta, strategy.omega))
    return np.asarray(np.linalg.eigvalsh(np.diag(theta) - np.sqrt(np.outer(omega, omega)))[::-1], np.float64)


def integer_series(strategy: IntegerBuffered, rounds: int) -> NDArray[np.float64]:
    """Return c_0, c_1, …, the first column of C, (rounds,).

    Args:
        strategy: Strategy with poles θ and residues ω in multiples of 2^-31.
        rounds: Number of coefficients.
    """
    lags, column = np.arange(rounds - 1, dtype=np.float64), np.zeros(rounds - 1)
    for theta, omega in zip(strategy.theta, strategy.omega, strict=True):
        column += omega / COEFFICIENT_ONE * (theta / COEFFICIENT_ONE) ** lags
    return np.concatenate([[1.0], column])


def _residue(theta: list[Fraction], phi: list[Fraction], index: int) -> Fraction:
    """Compute ω_i = Π_j (θ_i - φ_j) / Π_{j≠i} (θ_i - θ_j) for i = `index`, from 0.

    Args:
        theta: Poles θ, all different.
        phi: Zeros φ.
        index: Index i.
    """
    pole, result = theta[index], Fraction(1)
    for root in phi:
        result *= pole - root
    for other, root in enumerate(theta):
        if other != index:
            result /= pole - root
    return result


def _series_spread(strategy: IntegerBuffered, mechanism: BufferedToeplitz, workload: Workload) -> Fraction:
    """Return a factor of the sensitivity that covers the difference of C and the rounded C on integers.

    The factor is 1 + participations · ‖c - c'‖, with the rounding of both series added to the norm.  c is the
    series of the integer strategy, and c' that of the roots.  A column of C differs by at most ‖c - c'‖, and the
    sensitivity is at least the largest norm of an increment, since c'_0 = 1.
    """
    # Without roots C is the identity, whose series ends after its first term.
    rounds = workload.rounds if strategy.theta else 1
    norm = float(np.linalg.norm(integer_series(strategy, rounds) - mechanism.strategy_series(rounds)))
    # Rounding of either series, whose terms are at most 1, adds 2^-44 a term.
    return 1 + Fraction(participations_per_record(workload) * (norm + 2.0**-44 * math.sqrt(rounds)))
