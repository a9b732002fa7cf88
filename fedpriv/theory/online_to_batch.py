"""Differentially private online-to-batch: the bounds on its increments, from which its noise follows.

Source: Zhang, Tran & Cutkosky 2022, "Differentially Private Online-to-Batch for Smooth Losses" (NeurIPS), with
weights α_t = t^k.  The increment of round t is α_t ∇f(x_t; z) - α_{t-1} ∇f(x_{t-1}; z), the x_t are the weighted
averages of an online learner's iterates in a convex set of diameter D, losses are G-Lipschitz and H-smooth.

The bound below is derived here; the paper states it up to constants:

    ‖increment‖ ≤ (α_t - α_{t-1}) G + α_{t-1} H ‖x_t - x_{t-1}‖,   x_t - x_{t-1} = (α_t/α_{1:t}) (w_t - x_{t-1})
                ≤ t^{k-1} (k G + (k+1) H D)    as α_t - α_{t-1} ≤ k t^{k-1} and α_{1:t} ≥ t^{k+1}/(k+1)
"""

from fedpriv.accounting.checks import check_positive
from fedpriv.errors import InputError


def increment_bound(t: int, power: float, lipschitz: float, smoothness: float, diameter: float) -> float:
    """t^{k-1} (k G + (k+1) H D), a clip norm for round t (from 1) that never bites; k = `power` ≥ 1."""
    if t < 1 or not power >= 1.0:
        raise InputError(f"t = {t}, power = {power}: rounds count from 1, and the weights t^k have k of 1 or more")
    for name, value in (("lipschitz", lipschitz), ("smoothness", smoothness), ("diameter", diameter)):
        check_positive(name, value)
    return float(t ** (power - 1.0) * (power * lipschitz + (power + 1.0) * smoothness * diameter))
