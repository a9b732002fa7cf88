"""A mechanism adds correlated Gaussian noise to a stream of running sums.

One algebra for all: the running sums are A s, where row t of the lower-triangular workload A holds the decays
and s the increments.  A mechanism is a factorization A = B C; it releases A s + B z with independent Gaussian
z_t, which is post-processing of C s + z.  Streaming, one fresh vector z_t comes in each round and row t of B z
goes out.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from fedpriv.errors import InputError
from fedpriv.mechanisms.columns import Columns
from fedpriv.mechanisms.workload import Floats, Workload

if TYPE_CHECKING:  # the algebra and the command line start without torch
    from torch import Tensor

MechanismState = tuple["Tensor", ...]
"""A flat tuple of vectors shaped like the fresh ones, its length a function of t: silos store it as it is."""


class Sensitivity(NamedTuple):
    """How far one record can move C s, and why that is so."""

    value: float
    exact: bool
    """Whether the distance is attained; otherwise `value` is an upper bound."""
    reason: str


class Blocks(NamedTuple):
    """The columns of a C whose columns each reach over few rounds."""

    bands: int
    """Column t has entries in rounds t … t + bands - 1 only."""
    norms: Floats
    """Their l2 norms, shape (T,)."""


class Mechanism(Protocol):
    """A streaming factorization of the workload: a frozen dataclass, of which `registry` has a line."""

    name: ClassVar[str]
    """In scenarios, ledgers and reports."""
    words: ClassVar[str]
    """What it adds, as a report says it."""
    movement: float | None = None
    """The sensitivity holds if queries move by at most this a round, which silos check; None: for any queries."""

    @property
    def assumption(self) -> str | None:
        """What the sensitivity assumes about the loss and the arithmetic, as a sentence; None: nothing at all.

        Guarantee: where it is None, the sensitivity rests on clipping alone.  A silo that is to promise something
        whatever it is asked takes no other mechanism.
        """
        return None

    @property
    def fresh_std(self) -> float:
        """A lower bound of the standard deviation that a round's fresh vectors add to its row of B z, for unit z.

        0 where a mechanism does not say better: then nothing is known of what is new in a release.
        """
        return 0.0

    @classmethod
    def of(cls, workload: Workload, options: Any) -> Self:
        """The mechanism for a workload, with the `MechanismOptions` of a scenario; InputError if it takes more."""
        raise InputError(f"mechanism = {cls.name!r}: it belongs to one algorithm and cannot be chosen")

    @classmethod
    def comparisons(cls, workload: Workload, options: Any) -> dict[str, Self]:
        """Those worth a line in a comparison, by `label`; `options` are the defaults."""
        one = cls.of(workload, options)
        return {one.label: one}

    def options(self) -> dict[str, Any]:
        """The keys of a scenario, beside the name, from which `of` makes it again; numbers as JSON has them."""
        return {}

    def columns(self, workload: Workload) -> Columns:
        """What is known of the columns of C; InputError if nothing is."""
        raise InputError(f"mechanism = {self.name!r}: the columns of its strategy matrix are not known")

    @property
    def label(self) -> str:
        """The name with what tells two of a kind apart."""
        return self.name

    def as_data(self) -> dict[str, Any]:
        """Plain data, from which `registry.mechanism_from` makes it again."""
        data: Any = self
        return {"name": self.name, **dataclasses.asdict(data)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `as_data`, whose name is left out."""
        return cls(**data)

    def certified(self, workload: Workload) -> Sensitivity:
        """`sensitivity` together with its certificate."""
        ...

    def counted(self, workload: Workload) -> Sensitivity:
        """`certified`, or less where that charges more than a record can move C s, as a paper's constants do."""
        return self.certified(workload)

    def sensitivity(self, workload: Workload) -> float:
        """The l2 distance by which one record can move C s, if zero-out moves its increment by its clip norm.

        Noise z_t ~ N(0, σ² I) then gives exactly (sensitivity / σ)-GDP under zero-out and (2 sensitivity / σ)
        under replace-one, for everything released over the whole run.
        """
        return self.certified(workload).value

    def blocks(self, workload: Workload) -> Blocks | None:
        """The columns of C, where what an increment moves ends after a few rounds; None where it may not.

        Guarantee: increments of rounds that lie `bands` or more apart move disjoint blocks of C s, one whose
        column has norm n by n times its own norm.  That is what secret participation amplifies.
        """
        return None

    def variance(self, workload: Workload) -> Floats:
        """The noise variance of every release per coordinate, for fresh vectors of variance 1; shape (T,)."""
        ...

    def noise_series(self, workload: Workload) -> Floats | None:
        """b_0 … b_{T-1} if row t of B z is Σ_j b_j z_{t-j}, one fresh vector a round; None if it is not."""
        return None

    def mean_variance(self, workload: Workload) -> float:
        """`variance` averaged over the rounds."""
        return float(np.mean(self.variance(workload)))

    def memory_vectors(self, workload: Workload) -> int:
        """The most vectors that a state holds."""
        ...

    def draws(self, t: int) -> int | None:
        """How many fresh vectors round t takes, a public number: nodes 0, 1, … of the owner's stream of noise.

        None stands for one that is handed over as it is; several come stacked on a first axis.
        """
        return None

    def start(self) -> MechanismState:
        """The state before round 1."""
        return ()

    def noise(self, state: MechanismState, t: int, fresh: "Tensor") -> tuple["Tensor", MechanismState]:
        """Row t of B z and the next state, from this round's fresh vector z_t (any leading axes) or `draws(t)`.

        The noise returned may be part of the state, or `fresh` itself: do not write into it.
        """
        ...

    def noise_rounds(
        self, state: MechanismState, t: int, fresh: "Tensor"
    ) -> tuple[Iterable["Tensor"], MechanismState]:
        """`noise` of the rounds t, t+1, … from a block of fresh vectors, shape (rounds, ..., d)."""
        rows = []
        for offset, vector in enumerate(fresh):
            row, state = self.noise(state, t + offset, vector)
            rows.append(row)
        return rows, state


def check_matches(workload: Workload, decay: float, period: int | None) -> None:
    """Refuse a workload that a mechanism built for another decay or period would not factor."""
    if workload.decay != decay:
        raise InputError(f"the mechanism is built for decay = {decay}, the workload has decay = {workload.decay}")
    if workload.period != period:
        raise InputError(
            f"the mechanism is built for period = {period}, the workload has period = {workload.period}"
        )
