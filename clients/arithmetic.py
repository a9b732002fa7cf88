"""Whether floating-point numbers can do what a plan asks: decided from public numbers, before a record is read."""

import torch

from fedpriv.plan import Plan
from fedpriv.release import MOST_DEVIATIONS
from fedpriv.rounds import Poisson

SMALLEST_CLIP, LARGEST_CLIP = 2.0**-40, 2.0**40
"""Between them norms, their squares and shares of a batch are normal numbers, in float32 too."""


def largest_clip(plan: Plan) -> float:
    """The largest norm bound of any round and part, as records meet it: not divided by the batches of a round."""
    return max(max(clips) for clips in _clips(plan))


def unsound(plan: Plan, silo: int) -> str | None:
    """Why this silo's part of `plan` cannot be computed as its proof says; None if it can.

    Guarantee: where it returns None, clips, shares of a record and the noise's standard deviation are normal
    numbers of the types they are used in, and no sum is so large beside its noise that rounding removes noise.
    """
    clips = [clip for of_round in _clips(plan) for clip in of_round]
    if not (min(clips) >= SMALLEST_CLIP and max(clips) <= LARGEST_CLIP):
        return f"it clips at {min(clips):.4g} to {max(clips):.4g}; floating point is sound from 2^-40 to 2^40"
    computed = torch.finfo(plan.objective.initial().dtype)
    share = 1.0 / (plan.batch_sizes[silo] * max(_batches(plan, t) for t in _rounds(plan)))
    if not share * min(clips) >= computed.tiny:
        return f"one record's share of a batch, {share * min(clips):.4g}, is no normal number"
    std = float(plan.noise.std_of(silo))
    if std == 0.0:
        return None
    sent = torch.finfo(torch.float64 if plan.grid is not None else plan.message_dtype)
    least = std * (plan.mechanism.innovation or 1.0)
    if not (least >= sent.tiny / sent.eps and std <= sent.max * sent.eps):
        return f"noise of standard deviation {std:.4g} is nothing that {sent.dtype} can hold"
    if not (largest := _largest_sum(plan)) <= MOST_DEVIATIONS * least:
        return f"sums of up to {largest:.4g} swallow digits of noise of standard deviation {least:.4g}"
    return None


def _largest_sum(plan: Plan) -> float:
    """A bound on the norm of a silo's running sum in every round."""
    total = largest = 0.0
    for t in _rounds(plan):
        current = plan.estimator.round(t)
        total = current.keep * total + current.largest
        largest = max(largest, total)
    return largest


def _clips(plan: Plan) -> list[tuple[float, ...]]:
    """The norm bounds of every round's parts."""
    found = []
    for t in _rounds(plan):
        current = plan.estimator.round(t)
        parts = () if current.split is None else (current.split.difference_clip, current.split.residual_clip)
        found.append(tuple(map(float, (current.clip, *parts))))
    return found


def _batches(plan: Plan, t: int) -> int:
    """How many batches a silo reads in a round."""
    return 1 if isinstance(plan.schedule, Poisson) else len(plan.schedule.batches(t))


def _rounds(plan: Plan) -> range:
    return range(1, plan.schedule.rounds + 1)
