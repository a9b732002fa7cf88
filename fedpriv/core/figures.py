"""Format figures of privacy on the safe side: leakage is rounded up, added noise is rounded down.

A float counts as the decimal number that it prints as (`repr`), so that μ = 0.1 is not called 0.1001.  The
guarantees of the functions `format_…` are about this decimal number.
"""

import math
from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

MAX_USEFUL_EPSILON = 20.0
"""ε above which a guarantee bounds nothing of practical use, since e^20 is about 5 · 10^8."""
EXACT_RELEASE_SLACK = 2.0**-60
"""Bound on the total variation distance of an exact release from one that keeps the stated guarantee.

For the pair (ε, δ), (1 + e^ε) times this number is added to δ.
"""
_LARGE_DELTA = 1e-3  # smallest δ with a caveat if n is not known
_VISIBLE_SHARE = 1e-3  # a smaller share of δ changes its third digit by one at most


def format_upper(value: float, digits: int = 4) -> str:
    """Format a bound on leakage: `value` with `digits` significant digits, rounded up.

    Guarantee: for up to 15 digits and absolute values from 1e-300 to 1e300, the printed number is never below
    `value`, and less than a unit of the last of the `digits` digits above it.  Zeros at the end of a fraction are
    not printed.
    """
    return _format_rounded(value, digits, ROUND_CEILING)


def format_lower(value: float, digits: int = 4) -> str:
    """Format a lower bound of noise: `value` with `digits` significant digits, rounded down.

    Guarantee: for up to 15 digits and absolute values from 1e-300 to 1e300, the printed number is never above
    `value`, and less than a unit of the last of the `digits` digits below it.  Zeros at the end of a fraction are
    not printed.
    """
    return _format_rounded(value, digits, ROUND_FLOOR)


def format_upper_range(values: Sequence[float], digits: int = 4) -> str:
    """Format the smallest and the largest of some figures of leakage, or their common text."""
    return _format_range(format_upper(min(values), digits), format_upper(max(values), digits))


def format_lower_range(values: Sequence[float], digits: int = 4) -> str:
    """Format the smallest and the largest of some figures of noise, or their common text."""
    return _format_range(format_lower(min(values), digits), format_lower(max(values), digits))


def _format_range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _format_rounded(value: float, digits: int, direction: str) -> str:
    if not math.isfinite(value) or value == 0.0:
        return f"{value:g}"
    exact = Decimal(repr(float(value)))
    unit = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(unit, rounding=direction)):.{digits}g}"


def format_count(number: int, noun: str) -> str:
    """Format a count with its noun: "1 release", "600 releases"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_count_range(counts: Iterable[int]) -> str:
    """Format one integer, or the smallest and the largest of several: "1,000", "1 to 10"."""
    numbers = list(counts)
    return _format_range(f"{min(numbers):,}", f"{max(numbers):,}")


def format_with_spread(mean: float, spread: float | None, digits: int, *, signed: bool = False) -> str:
    """Format a figure, with its sign if `signed`, and its spread unless that is None: "70.0 ± 1.0"."""
    text = f"{mean:+z.{digits}f}" if signed else f"{mean:.{digits}f}"
    return text if spread is None else f"{text} ± {spread:.{digits}f}"


def best_guess(mu: float) -> float:
    """Bound the probability of guessing which of two equally likely neighbours was used: Φ(μ/2).

    Guarantee: no test on the output of a μ-GDP mechanism has a higher probability, and the best test of N(0, 1)
    against N(μ, 1) attains it up to rounding.  The result is above one half for every μ > 0, and 1 if μ is NaN.
    """
    return 0.5 if mu <= 0.0 else min(1.0, 0.5 * math.erfc(-mu / math.sqrt(8.0)) * (1.0 + 1e-15))


def format_upper_percent(share: float) -> str:
    """Format a probability in percent with one decimal, rounded up.

    Guarantee: "50.0 %" stands for one half or less, "over 99.9 %" for every probability above .999.
    """
    tenths = (Decimal(repr(float(share))) * 1000).to_integral_value(rounding=ROUND_CEILING)
    return f"{float(tenths) / 10.0:.1f} %" if tenths < 1000 else "over 99.9 %"


def format_upper_epsilon(epsilon: float, digits: int = 4) -> str:
    """Format an ε, with a text for ε = 0 that names δ, since "0" alone would read as perfect privacy."""
    return "0 (all in δ)" if epsilon == 0.0 else format_upper(epsilon, digits)


def format_epsilon_range(values: Sequence[float]) -> str:
    """Format the smallest and the largest of some ε."""
    return _format_range(format_upper_epsilon(min(values)), format_upper_epsilon(max(values)))


def format_upper_delta(delta: float) -> str:
    """Format a δ with at most 6 significant digits, rounded up."""
    return format_upper(delta, 6)


def format_epsilon_delta(epsilon: float, delta: float, digits: int = 4) -> str:
    """Format a pair as "ε = 4.378 at δ = 1e-05"."""
    return f"ε = {format_upper_epsilon(epsilon, digits)} at δ = {format_upper_delta(delta)}"


def privacy_caveats(
    epsilon: float, delta: float, units: int | None = None, unit: str = "record", *, slack: bool = False
) -> list[str]:
    """Return one sentence for each fact that weakens the pair (`epsilon`, `delta`), or none.

    Such facts are a δ of 1/n or more, which the publication of one of n records satisfies, an ε above
    `MAX_USEFUL_EPSILON`, and a slack (`EXACT_RELEASE_SLACK`) that adds more than a thousandth of δ to δ.

    Args:
        epsilon: ε of the pair.
        delta: δ of the pair.
        units: Public upper bound n on the records, persons or clients of the smallest silo, or None.  With None a
            δ of .001 or more counts as too large.
        unit: Noun for a record, person or client.
        slack: Whether the pair is that of an exact release, one of integers.
    """
    caveats = []
    if units is not None and delta * units >= 1.0:
        caveats.append(
            f"δ = {format_upper_delta(delta)} is not below 1/n for the n = {units:,} {unit}s of the smallest "
            f"silo: publishing one {unit} picked at random would be allowed by it."
        )
    if units is None and delta >= _LARGE_DELTA:
        caveats.append(
            f"δ = {format_upper_delta(delta)} is not below 1/n for silos of {math.ceil(1.0 / delta):,} {unit}s "
            f"or more: publishing one {unit} picked at random would be allowed by it."
        )
    if epsilon > MAX_USEFUL_EPSILON:
        caveats.append(
            f"ε = {format_upper(epsilon)} is above {MAX_USEFUL_EPSILON:g}: it lets the odds about a {unit} grow "
            "more than 10^8-fold, which is next to no protection."
        )
    added_delta = slack_in_delta(epsilon)
    if slack and added_delta > _VISIBLE_SHARE * delta:
        caveats.append(
            f"The 2^-60 in total variation adds (1 + e^ε) · 2^-60 to δ: at ε = {format_upper(epsilon)} that is "
            f"{format_upper(min(1.0, added_delta), 2)}, beside δ = {format_upper_delta(delta)}."
        )
    return caveats


def slack_in_delta(epsilon: float) -> float:
    """Return the δ at ε of a total variation of `EXACT_RELEASE_SLACK`, rounded up: (1 + e^ε) · 2^-60.

    The result is infinite for ε of 700 or more.
    """
    return (1.0 + math.exp(epsilon)) * EXACT_RELEASE_SLACK * (1.0 + 1e-12) if epsilon < 700.0 else math.inf
