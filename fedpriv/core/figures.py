"""Print figures of privacy on the safe side: leakage rounds up, noise rounds down.

Every text that shows an ε, δ, μ, slack, best guess, sensitivity or standard deviation takes its digits from here;
floats as they are go into JSON and CSV only.  A float counts as the decimal number that it prints as (`repr`),
which is within a relative 1e-16 of it: the noise of μ = 0.1 is not called 0.1001.
"""

import math
from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

TOO_LARGE = 20.0
"""An ε above it bounds nothing of practical use: e^20 is 5 · 10^8."""
SLACK = 2.0**-60
"""Up to which total variation an exact release holds; (1 + e^ε) times as much of it goes into δ."""
_RARELY_BELOW = 1e-3  # a δ from which on it is said where n is not known
_VISIBLE = 1e-3  # of δ: less of it than this the slack does not change in three digits


def upper_figure(value: float, digits: int = 4) -> str:
    """`value` in `digits` significant digits, rounded up: a bound on what leaks.

    Guarantee: the number that is printed is never below `value`, and a unit of its last digit above it at most.
    """
    return _rounded(value, digits, ROUND_CEILING)


def lower_figure(value: float, digits: int = 4) -> str:
    """`value` in `digits` significant digits, rounded down: how much noise there is at least.

    Guarantee: the number that is printed is never above `value`, and a unit of its last digit below it at most.
    """
    return _rounded(value, digits, ROUND_FLOOR)


def upper_range(values: Sequence[float], digits: int = 4) -> str:
    """The smallest and the largest of some figures of leakage, or the one figure that they print as."""
    return _range(upper_figure(min(values), digits), upper_figure(max(values), digits))


def lower_range(values: Sequence[float], digits: int = 4) -> str:
    """The same of noise."""
    return _range(lower_figure(min(values), digits), lower_figure(max(values), digits))


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _rounded(value: float, digits: int, direction: str) -> str:
    if not math.isfinite(value) or value == 0.0:
        return f"{value:g}"
    exact = Decimal(repr(float(value)))
    unit = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(unit, rounding=direction)):.{digits}g}"


def counted(number: int, noun: str) -> str:
    """ "1 release", "600 releases"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def count_range(counts: Iterable[int]) -> str:
    """One whole number, or the smallest and the largest of several: "1,000", "1 to 10"."""
    found = list(counts)
    return _range(f"{min(found):,}", f"{max(found):,}")


def with_spread(mean: float, spread: float | None, digits: int, *, signed: bool = False) -> str:
    """A measured figure with so many decimals, and how far it spreads where that is known: "70.0 ± 1.0"."""
    text = f"{mean:+z.{digits}f}" if signed else f"{mean:.{digits}f}"
    return text if spread is None else f"{text} ± {spread:.{digits}f}"


def best_guess(mu: float) -> float:
    """Bound how often a guess is right which of two equally likely neighbours was used: Φ(μ/2).

    Guarantee: no test on everything that is released does better; telling N(0, 1) from N(μ, 1) comes within a
    rounding of it.  Above one half for every μ > 0.
    """
    return min(1.0, 0.5 * math.erfc(-mu / math.sqrt(8.0)) * (1.0 + 1e-15)) if mu > 0.0 else 0.5


def upper_percent(share: float) -> str:
    """A probability in percent with one decimal, rounded up, and never up to certainty.

    Guarantee: "50.0 %" stands for one half or less, "over 99.9 %" for all that is above .999.
    """
    tenths = (Decimal(repr(float(share))) * 1000).to_integral_value(rounding=ROUND_CEILING)
    return f"{float(tenths) / 10.0:.1f} %" if tenths < 1000 else "over 99.9 %"


def epsilon_figure(epsilon: float, digits: int = 4) -> str:
    """An ε, and for one of 0 where the leakage is: it would read as perfect privacy."""
    return "0 (all in δ)" if epsilon == 0.0 else upper_figure(epsilon, digits)


def epsilon_range(values: Sequence[float]) -> str:
    """The smallest and the largest of some ε."""
    return _range(epsilon_figure(min(values)), epsilon_figure(max(values)))


def delta_figure(delta: float) -> str:
    """A δ, in up to 6 digits."""
    return upper_figure(delta, 6)


def epsilon_words(epsilon: float, delta: float, digits: int = 4) -> str:
    """ "ε = 4.378 at δ = 1e-05"."""
    return f"ε = {epsilon_figure(epsilon, digits)} at δ = {delta_figure(delta)}"


def caveats(
    epsilon: float, delta: float, units: int | None = None, unit: str = "record", *, slack: bool = False
) -> list[str]:
    """Say in a sentence each what weakens (`epsilon`, `delta`): nothing for a pair that protects.

    `units` is n, how many records, persons or clients the smallest silo has at most, where that is public; `slack`
    says that the pair is of an exact release, which holds up to `SLACK`.
    """
    found = []
    if units is not None and delta * units >= 1.0:
        found.append(
            f"δ = {delta_figure(delta)} is not below 1/n for the n = {units:,} {unit}s of the smallest silo: "
            f"publishing one {unit} picked at random would be allowed by it."
        )
    if units is None and delta >= _RARELY_BELOW:
        found.append(
            f"δ = {delta_figure(delta)} is not below 1/n for silos of {math.ceil(1.0 / delta):,} {unit}s or more: "
            f"publishing one {unit} picked at random would be allowed by it."
        )
    if epsilon > TOO_LARGE:
        found.append(
            f"ε = {upper_figure(epsilon)} is above {TOO_LARGE:g}: it lets the odds about a {unit} grow more than "
            "10^8-fold, which is next to no protection."
        )
    added = slack_in_delta(epsilon)
    if slack and added > _VISIBLE * delta:
        found.append(
            f"The 2^-60 in total variation adds (1 + e^ε) · 2^-60 to δ: at ε = {upper_figure(epsilon)} that is "
            f"{upper_figure(min(1.0, added), 2)}, beside δ = {delta_figure(delta)}."
        )
    return found


def slack_in_delta(epsilon: float) -> float:
    """Convert a slack of `SLACK` in total variation to δ at ε, rounded up: (1 + e^ε) · 2^-60."""
    return (1.0 + math.exp(epsilon)) * SLACK * (1.0 + 1e-12) if epsilon < 700.0 else math.inf
