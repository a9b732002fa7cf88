"""Buffered linear Toeplitz noise: nearly optimal for a stream with a handful of vectors.

C is the Toeplitz matrix of interlacing roots (see `roots`), B = A C^-1.  Members: no roots at all are noise on the
increments (C = I); θ = (λ,), φ = (0,) is λ-CGD, C^-1 = I - λ · shift, with one vector of state; θ = (decay,),
φ = (0,) is independent noise (C = A), with none.

`column_scale` holds D_1 … D_T: the noise of increment t is divided by D_t, so that C diag(D) takes the place of C.
Late columns of C are short, and a D that lengthens them costs no record more than the worst one costs anyway.

Strategy matrices from interlacing roots: their series, their inverse, and how their noise streams.

    C(x) = Π (1 - φ_i x) / Π (1 - θ_i x),    θ_1 > φ_1 > θ_2 > φ_2 > … > θ_m > φ_m ≥ 0

C is the lower-triangular Toeplitz matrix of this power series.  In partial fractions c_0 = 1 and
c_j = Σ ω_i θ_i^(j-1) with every ω_i > 0, because the roots interlace, and c_1 = Σ θ - Σ φ ≤ θ_1 ≤ 1: the
coefficients are never negative and never increase.  Likewise 1/C(x) has the coefficients 1, Σ ω̂_i φ_i^(j-1) with
every ω̂_i < 0.

Sources: McMahan, Xiao, Pillutla 2024 and Dvijotham, McMahan, Pillutla, Steinke, Thakurta 2024 (buffered linear
Toeplitz); Choquette-Choo et al. 2023 for λ-CGD, which is m = 1 with φ_1 = 0.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, Field

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import SHARED
from fedpriv.noise import buffered as roots
from fedpriv.noise import sensitivity as nonincreasing
from fedpriv.noise.mechanism import (
    Columns,
    Mechanism,
    MechanismState,
    Sensitivity,
    check_matches,
    column_scale,
    toeplitz_columns,
)
from fedpriv.noise.workload import Floats, Workload, powers

if TYPE_CHECKING:
    from torch import Tensor


Roots = tuple[float, ...]


class Mode(NamedTuple):
    """A vector M that streaming keeps: the row gets gain · M, and then M = pole · M + z."""

    pole: float
    gain: float


def check(theta: Roots, phi: Roots, decay: float) -> None:
    """InputError unless the roots interlace, and lie in [0, decay], or in [0, 1] for decay = 0.

    Guarantee: what passes has a C with coefficients ≥ 0 that never increase, whoever chose the numbers.
    """
    if len(theta) != len(phi):
        raise InputError(f"theta has {len(theta)} roots and phi {len(phi)}: both need the same number")
    largest = decay if decay > 0.0 else 1.0
    falling = tuple(root for pair in zip(theta, phi, strict=True) for root in pair)
    inside = all(0.0 <= root <= largest for root in falling)  # not so for nan
    if not inside or any(not after < before for before, after in pairwise(falling)):
        raise InputError(
            f"theta = {list(theta)}, phi = {list(phi)}: needed is {largest:g} ≥ θ_1 > φ_1 > θ_2 > φ_2 > … ≥ 0"
        )


def residues(over: Roots, under: Roots) -> Floats:
    """ω of Π (1 - under_j x) / Π (1 - over_i x) = 1 + Σ ω_i x / (1 - over_i x); as many of both."""
    poles, zeros = np.array(over), np.array(under)
    distance = np.subtract.outer(poles, poles)
    np.fill_diagonal(distance, 1.0)
    # ratios in order: neighbours are close, and products of small numbers alone could underflow
    return np.asarray(np.prod(np.subtract.outer(poles, zeros) / distance, axis=1), np.float64)


def coefficients(over: Roots, under: Roots, count: int) -> Floats:
    """The first `count` ≥ 1 coefficients of Π (1 - under_j x) / Π (1 - over_i x).

    C is `coefficients(theta, phi, T)`, its inverse `coefficients(phi, theta, T)`.
    """
    series = np.zeros(count)
    series[0] = 1.0
    for root, weight in zip(over, residues(over, under), strict=True):
        series[1:] += weight * powers(root, count - 1)
    return series


def noise_modes(decay: float, theta: Roots, phi: Roots) -> tuple[Mode, ...]:
    """The modes of B = A C^-1: row t is z_t + Σ gain · M_{t-1}.

    B(x) = Π (1 - θ_i x) / ((1 - decay x) Π (1 - φ_i x)) has a mode for each pole p > 0, with gain r_p p.  A pole
    that a zero cancels (θ_1 = decay) has none.  With decay = φ_m = 0 the pole at 0 is double, and one more mode,
    which is the last fresh vector, makes up for what b_1 lacks.
    """
    poles = (decay, *phi)
    modes = []
    for place, pole in enumerate(poles):
        if pole == 0.0:
            continue
        others = [pole - other for number, other in enumerate(poles) if number != place]
        gain = pole
        for above, below in zip([pole - root for root in theta], others, strict=True):
            gain *= above / below
        if gain != 0.0:
            modes.append(Mode(pole, gain))
    if poles.count(0.0) == 2:
        first = sum(phi) - sum(theta)
        modes.append(Mode(0.0, first - sum(mode.gain for mode in modes)))
    return tuple(modes)


_Root = Annotated[float, Field(ge=0, le=1, strict=True)]
_MostRoots = Annotated[tuple[_Root, ...], Field(max_length=16, strict=False)]  # TOML and JSON have lists


class BufferedOptions(BaseModel):
    """What a scenario can say of it; without roots they are fitted before the run, and sent as numbers."""

    theta: _MostRoots = Field(
        (), description='poles of C, falling, for "blt", or λ alone for "lambda-cgd"; fitted if left out'
    )
    phi: _MostRoots = Field((), description='zeros of C for "blt", one below each pole')
    scale: bool = Field(
        False,
        description='"blt" and "lambda-cgd" in one pass with equal clips: late noise shrinks where C is short, at '
        "the same price",
    )


@dataclass(frozen=True)
class BufferedToeplitz(Mechanism):
    """Noise C^-1 z on the increments, summed like them, for the C of interlacing roots.

    Guarantee: the roots are checked to interlace, so C ≥ 0 with nonincreasing coefficients, whoever fitted
    them: the
    worst record of a fixed order, and of separated participations with equal clips, is charged exactly; of
    separated participations with unequal clips it is bounded.
    """

    name: ClassVar[str] = "blt"
    words: ClassVar[str] = "Gaussian noise correlated over the rounds (a few decaying buffers)"

    decay: float = field(default=1.0, metadata=SHARED)
    theta: roots.Roots = field(default=(), metadata=SHARED)
    """Poles of C, in falling order; each at most `decay`, or at most 1 for decay = 0."""
    phi: roots.Roots = field(default=(), metadata=SHARED)
    """Zeros of C, one below each pole."""
    column_scale: tuple[float, ...] = field(default=(), metadata=SHARED)
    """D_t of every planned round; none is 1 everywhere."""
    period: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0:
            raise InputError(f"decay = {self.decay}: the decay of a running sum lies between 0 and 1")
        if self.period is not None and self.period < 1:
            raise InputError(f"period = {self.period}: the sums restart after 1 or more rounds, or never (None)")
        if not all(0.0 < factor < math.inf for factor in self.column_scale):
            raise InputError("column_scale: every factor is a finite number above 0")
        roots.check(self.theta, self.phi, self.decay)

    @classmethod
    def of(cls, workload: Workload, options: BufferedOptions) -> Self:
        """The mechanism of given roots; InputError for none: whoever builds a plan never fits."""
        if not options.theta:
            raise InputError(
                f"mechanism = {cls.name!r}: its roots are fitted before a run starts and sent as numbers, and "
                "here are none; give theta"
            )
        plain = cls(workload.decay, options.theta, cls._zeros(options), period=workload.period)
        return plain.lengthened(workload) if options.scale else plain

    @classmethod
    def comparisons(cls, workload: Workload, options: BufferedOptions) -> dict[str, Self]:
        """None: whoever compares fits them first."""
        return {}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        numbers: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        return cls(**numbers)

    def options(self) -> dict[str, Any]:
        given = {"theta": list(self.theta), "phi": list(self.phi)}
        return given | ({"scale": True} if self.column_scale else {})

    @property
    def label(self) -> str:
        return f"{self.name} ({len(self.theta)}{', scaled' if self.column_scale else ''})"

    def lengthened(self, workload: Workload) -> Self:
        """With the `column_scale` that makes every column as long as the first; one pass with equal clips.

        Guarantee: the sensitivity stays what it was; InputError for participations of which that is not known.
        """
        if workload.period is not None or not (workload.order.single_pass and workload.equal_clips):
            raise InputError("scale: noise is scaled in a single pass with the same clip in every round only")
        plain = replace(self, column_scale=())
        return replace(
            self, column_scale=tuple(column_scale(plain.columns(workload).squared_norms, workload).tolist())
        )

    def certified(self, workload: Workload) -> Sensitivity:
        self._check(workload)
        scaled = replace(workload, clips=workload.clips * self._scale(workload.rounds))
        return nonincreasing.of_series(scaled, self.strategy(workload.block))

    def columns(self, workload: Workload) -> Columns:
        self._check(workload)
        plain, scale = toeplitz_columns(self.strategy(workload.block), workload), self._scale(workload.rounds)
        return Columns(
            plain.squared_norms * scale**2, lambda held: plain.inner(held) * np.outer(scale[held], scale[held])
        )

    @property
    def fresh_std(self) -> float:
        """B has ones on its diagonal, divided by D."""
        return 1.0 / max(self.column_scale, default=1.0)

    def variance(self, workload: Workload) -> Floats:
        self._check(workload)
        if self.column_scale:
            return self._scaled_variance(workload.rounds)
        return self._over_periods(workload, lambda rounds: np.cumsum(self._rows(rounds) ** 2))

    def noise_series(self, workload: Workload) -> Floats | None:
        self._check(workload)
        return None if self.column_scale or self.period is not None else self._rows(workload.rounds)

    def memory_vectors(self, workload: Workload) -> int:
        return len(self.phi) + (self.decay > 0.0) if self.column_scale else len(self._modes)

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """The state holds a vector for each mode of B; with column_scale the last noise and one for each φ."""
        if self.column_scale:
            return self._scaled_noise(state, t, fresh)
        if not self._modes:
            return fresh, ()
        if self._restarts(t):
            return fresh, (fresh,) * len(self._modes)
        noise = fresh.add(state[0], alpha=self._modes[0].gain)
        for mode, kept in zip(self._modes[1:], state[1:], strict=True):
            noise.add_(kept, alpha=mode.gain)
        return noise, tuple(
            _advanced(kept, mode.pole, fresh) for mode, kept in zip(self._modes, state, strict=True)
        )

    def strategy(self, count: int) -> Floats:
        """The coefficients of C that are not 0, at most `count`; without `column_scale`."""
        return roots.coefficients(self.theta, self.phi, count if self.theta else 1)

    @classmethod
    def _zeros(cls, options: BufferedOptions) -> roots.Roots:
        return options.phi

    def _scaled_noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        if t > len(self.column_scale):
            raise InputError(f"round {t}: column_scale is planned for {len(self.column_scale)} rounds")
        share = 1.0 / self.column_scale[t - 1]
        last = 1 if self.decay > 0.0 else 0
        if self._restarts(t):
            noise = fresh * share
            return noise, ((noise,) * last) + (fresh,) * len(self.phi)
        increment = fresh * share
        after = []
        for weight, pole, kept in zip(self._inverse_residues, self.phi, state[last:], strict=True):
            increment.add_(kept, alpha=weight * share)
            after.append(_advanced(kept, pole, fresh))
        if not last:
            return increment, tuple(after)
        noise = increment.add_(state[0], alpha=self.decay)
        return noise, (noise, *after)

    def _scaled_variance(self, rounds: int) -> Floats:
        """By the covariance of what streaming holds, one fresh vector of variance 1 a round."""
        size = len(self.phi) + 1  # the last noise, and U of each φ
        spread, variances = np.zeros((size, size)), np.empty(rounds)
        advance, added = np.diag([self.decay, *self.phi]), np.ones(size)
        weights, factors = np.array(self._inverse_residues), self._scale(rounds)
        for t in range(1, rounds + 1):
            if self._restarts(t):
                spread = np.zeros((size, size))
            advance[0, 1:] = weights / factors[t - 1]
            added[0] = 1.0 / factors[t - 1]
            spread = advance @ spread @ advance.T + np.outer(added, added)
            variances[t - 1] = spread[0, 0]
        return variances

    def _check(self, workload: Workload) -> None:
        check_matches(workload, self.decay, self.period)
        if self.column_scale and workload.rounds > len(self.column_scale):
            raise InputError(
                f"column_scale is planned for {len(self.column_scale)} rounds, the workload has {workload.rounds}"
            )

    def _scale(self, rounds: int) -> Floats:
        return np.array(self.column_scale[:rounds]) if self.column_scale else np.ones(rounds)

    def _restarts(self, t: int) -> bool:
        return t == 1 or (self.period is not None and (t - 1) % self.period == 0)

    def _rows(self, count: int) -> Floats:
        """The coefficients of B: every row of B z adds the same weights of the last fresh vectors."""
        row = np.zeros(count)
        for mode in self._modes:
            row[1:] += mode.gain * powers(mode.pole, count - 1)
        row[0] = 1.0
        return row

    def _over_periods(self, workload: Workload, squared_norms: Callable[[int], Floats]) -> Floats:
        """The squared norms of every round: full periods are alike, the last may be shorter."""
        full, rest = divmod(workload.rounds, workload.block)
        of_rest = [squared_norms(rest)] if rest else []
        return np.concatenate([np.tile(squared_norms(workload.block), full), *of_rest])

    @cached_property
    def _modes(self) -> tuple[roots.Mode, ...]:
        return roots.noise_modes(self.decay, self.theta, self.phi)

    @cached_property
    def _inverse_residues(self) -> tuple[float, ...]:
        return tuple(roots.residues(self.phi, self.theta).tolist())


@dataclass(frozen=True)
class LambdaCgd(BufferedToeplitz):
    """λ-CGD: one buffer with φ = 0; a round's noise takes back λ of the one before.

    Guarantee: that of `BufferedToeplitz`.
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
    def _zeros(cls, options: BufferedOptions) -> roots.Roots:
        return options.phi or (0.0,)


def _advanced(kept: "Tensor", pole: float, fresh: "Tensor") -> "Tensor":
    return fresh.add(kept, alpha=pole) if pole else fresh
