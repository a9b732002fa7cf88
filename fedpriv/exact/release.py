"""One round: from integer sums to y_t = (C s)_t + z_t, and from y to what leaves.

B y = A s + B z, since A = B C: the mechanism that makes correlated noise from z makes the noisy running sum from
y. It never sees s, so that everything that leaves is a function of y.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedpriv.errors import RunError
from fedpriv.exact.claim import Claim
from fedpriv.exact.discrete_gaussian import KeyedIntegers
from fedpriv.exact.fixed_point import Ints
from fedpriv.exact.strategies import IntegerStrategy, IntState
from fedpriv.mechanisms.base import Mechanism, MechanismState

if TYPE_CHECKING:
    from torch import Tensor


def private_sums(
    strategy: IntegerStrategy,
    claim: Claim,
    state: IntState,
    t: int,
    sums: Ints,
    noise_of: Callable[[Ints], KeyedIntegers],
) -> tuple[Ints, IntState]:
    """y_t, shaped like `sums` ((d,) or (draws, d)), and the strategy's next state, as secret as the records.

    `noise_of` gives the round's source of noise for (C s)_t: see `round_noise`.

    Guarantee: the y of all rounds together keep `claim`, whatever the sums were computed from.
    """
    exact, state = strategy.step(state, t, sums)
    return exact + drawn(strategy, claim, t, exact.shape[-1], noise_of(exact)), state


def drawn(strategy: IntegerStrategy, claim: Claim, t: int, size: int, source: KeyedIntegers) -> Ints:
    """z_t of one owner, (size,) or (draws, size): node k of the round's stream for the k-th vector."""
    vectors = [source.vector(size, claim.sigma_of(scale), node) for node, scale in enumerate(strategy.scales(t))]
    return vectors[0] if strategy.draws(t) is None else np.stack(vectors)


def leaving(
    mechanism: Mechanism, scales: Sequence[float], state: MechanismState, t: int, noisy: Ints, factor: float
) -> tuple["Tensor", MechanismState]:
    """`factor` · (B y)_t, float64 (d,), and B's next state: what leaves in round t, or what a server goes on with.

    The mechanism multiplies its fresh vectors by their scales, so y is divided by them; `factor` is the unit over
    the public denominator.

    Guarantee: a function of y and public values.
    """
    import torch

    fresh = noisy / (scales[0] if noisy.ndim == 1 else np.array(scales)[:, None])
    row, state = mechanism.noise(state, t, torch.from_numpy(fresh))
    return row * factor, state


def added(sums: Sequence[Ints], bounds: Sequence[int]) -> Ints:
    """The sum of the silos' exact sums, at a server that is trusted with them; RunError for one out of its bounds.

    `bounds[i]` is B_i K_t: no honest silo's sum is beyond it in any coordinate, and 64 bits hold what they add up
    to.
    """
    total = np.zeros_like(sums[0])
    for silo, (values, bound) in enumerate(zip(sums, bounds, strict=True)):
        if values.shape != total.shape or values.dtype != np.int64:
            raise RunError(f"silo {silo}: sums of shape {values.shape} and type {values.dtype} came")
        if not (-bound <= int(values.min(initial=0)) and int(values.max(initial=0)) <= bound):
            raise RunError(f"silo {silo}: a sum is beyond what its records can add up to")
        total += values
    return total
