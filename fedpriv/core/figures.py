"""Print figures of privacy on the safe side: leakage rounds up, noise rounds down.

Every text that shows an ε, δ, μ, slack, best guess, sensitivity or standard deviation takes its digits from here;
floats as they are go into JSON and CSV only.  A float counts as the decimal number that it prints as (`repr`),
which is within a relative 1e-16 of it: the noise of μ = 0.1 is not called 0.1001.
"""

import math
from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

MAX_USEFUL_EPSILON = 20.0
"""An ε above it bounds nothing of practical use: e^20 is 5 · 10^8."""
EXACT_RELEASE_SLACK = 2.0**-60
"""Up to which total variation an exact release holds; (1 + e^ε) times as much of it goes into δ."""
_LARGE_DELTA = 1e-3  # a δ from which on it is said where n is not known
_VISIBLE_SHARE = 1e-3  # of δ: less of it than this the slack does not change in three digits


def format_upper(value: float, digits: int = 4) -> str:
    """`value` in `digits` significant digits, rounded up: a bound on what leaks.

    Guarantee: the number that is printed is never below `value`, and a unit of its last digit above it at most.
    """
    return _format_rounded(value, digits, ROUND_CEILING)


def format_lower(value: float, digits: int = 4) -> str:
    """`value` in `digits` significant digits, rounded down: how much noise there is at least.

    Guarantee: the number that is printed is never above `value`, and a unit of its last digit below it at most.
    """
    return _format_rounded(value, digits, ROUND_FLOOR)


def format_upper_range(values: Sequence[float], digits: int = 4) -> str:
    """The smallest and the largest of some figures of leakage, or the one figure that they print as."""
    return _format_range(format_upper(min(values), digits), format_upper(max(values), digits))


def format_lower_range(values: Sequence[float], digits: int = 4) -> str:
    """The same of noise."""
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
    """ "1 release", "600 releases"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_count_range(counts: Iterable[int]) -> str:
    """One whole number, or the smallest and the largest of several: "1,000", "1 to 10"."""
    found = list(counts)
    return _format_range(f"{min(found):,}", f"{max(found):,}")


def format_with_spread(mean: float, spread: float | None, digits: int, *, signed: bool = False) -> str:
    """A measured figure with so many decimals, and how far it spreads where that is known: "70.0 ± 1.0"."""
    text = f"{mean:+z.{digits}f}" if signed else f"{mean:.{digits}f}"
    return text if spread is None else f"{text} ± {spread:.{digits}f}"


def best_guess(mu: float) -> float:
    """Bound how often a guess is right which of two equally likely neighbours was used: Φ(μ/2).

    Guarantee: no test on everything that is released does better; telling N(0, 1) from N(μ, 1) comes within a
    rounding of it.  Above one half for every μ > 0.
    """
    return min(1.0, 0.5 * math.erfc(-mu / math.sqrt(8.0)) * (1.0 + 1e-15)) if mu > 0.0 else 0.5


def format_upper_percent(share: float) -> str:
    """A probability in percent with one decimal, rounded up, and never up to certainty.

    Guarantee: "50.0 %" stands for one half or less, "over 99.9 %" for all that is above .999.
    """
    tenths = (Decimal(repr(float(share))) * 1000).to_integral_value(rounding=ROUND_CEILING)
    return f"{float(tenths) / 10.0:.1f} %" if tenths < 1000 else "over 99.9 %"


def format_upper_epsilon(epsilon: float, digits: int = 4) -> str:
    """An ε, and for one of 0 where the leakage is: it would read as perfect privacy."""
    return "0 (all in δ)" if epsilon == 0.0 else format_upper(epsilon, digits)


def format_epsilon_range(values: Sequence[float]) -> str:
    """The smallest and the largest of some ε."""
    return _format_range(format_upper_epsilon(min(values)), format_upper_epsilon(max(values)))


def format_upper_delta(delta: float) -> str:
    """A δ, in up to 6 digits."""
    return format_upper(delta, 6)


def format_epsilon_delta(epsilon: float, delta: float, digits: int = 4) -> str:
    """ "ε = 4.378 at δ = 1e-05"."""
    return f"ε = {format_upper_epsilon(epsilon, digits)} at δ = {format_upper_delta(delta)}"


def privacy_caveats(
    epsilon: float, delta: float, units: int | None = None, unit: str = "record", *, slack: bool = False
) -> list[str]:
    """Say in a sentence each what weakens (`epsilon`, `delta`): nothing for a pair that protects.

    `units` is n, how many records, persons or clients the smallest silo has at most, where that is public; `slack`
    says that the pair is of an exact release, which holds up to `SLACK`.
    """
    found = []
    if units is not None and delta * units >= 1.0:
        found.append(
            f"δ = {format_upper_delta(delta)} is not below 1/n for the n = {units:,} {unit}s of the smallest "
            "silo: "
            f"publishing one {unit} picked at random would be allowed by it."
        )
    if units is None and delta >= _LARGE_DELTA:
        found.append(
            f"δ = {format_upper_delta(delta)} is not below 1/n for silos of {math.ceil(1.0 / delta):,} {unit}s "
            "or more: "
            f"publishing one {unit} picked at random would be allowed by it."
        )
    if epsilon > MAX_USEFUL_EPSILON:
        found.append(
            f"ε = {format_upper(epsilon)} is above {MAX_USEFUL_EPSILON:g}: it lets the odds about a {unit} grow "
            "more than "
            "10^8-fold, which is next to no protection."
        )
    added = slack_in_delta(epsilon)
    if slack and added > _VISIBLE_SHARE * delta:
        found.append(
            f"The 2^-60 in total variation adds (1 + e^ε) · 2^-60 to δ: at ε = {format_upper(epsilon)} that is "
            f"{format_upper(min(1.0, added), 2)}, beside δ = {format_upper_delta(delta)}."
        )
    return found


def slack_in_delta(epsilon: float) -> float:
    """Convert a slack of `SLACK` in total variation to δ at ε, rounded up: (1 + e^ε) · 2^-60."""
    return (1.0 + math.exp(epsilon)) * EXACT_RELEASE_SLACK * (1.0 + 1e-12) if epsilon < 700.0 else math.inf
