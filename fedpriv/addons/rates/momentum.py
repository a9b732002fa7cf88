"""Noise of Tran & Cutkosky's momentum against the number of records N, by accounting alone.

Source: Tran & Cutkosky, "Momentum Aggregation for Private Non-convex ERM" (NeurIPS 2022), Theorems 6 and 9.  The
problem has G = L = 1 and a gap R = 1, the relation is replace-one, and the order of records is fixed.  A round
reads one record, α = 1/N, η = 1/√(NT) and γ = min(1/2, ηN).  T is that of the theorems, rounded to whole epochs in
`count_first` and `count_second`.

The momentum m_t is the mean of gradients in which a new one has the weight α, and m^_t is m_t with noise.
Algorithm 1 sums gradients over prefixes, which are the rounds 1 … t.  Algorithm 2 splits a gradient into that at
the query of the epoch's start, and a residual.  It sums gradients, and their differences between epochs, over
windows of N rounds (an epoch), mixed with the weight γ per epoch, and residuals over prefixes.  η is the length of
a step.  With G_t and Δ_t the sums of gradients and of differences over the window that ends at t, decayed by 1-α
per round,

    w_t = (1-γ) (w_(t-N) + Δ_t) + γ G_t,   p_t = w_t + (1-α)^N p_(t-N),

and m_t/α is p_t plus the residuals.

The noise of a momentum is √d times the root mean square over rounds of a coordinate of m^_t - m_t.  A tree node
over rounds a … b holds the sum of (1-α)^(b-t) times the increment of round t, a record's contribution.  Nodes of a
level have 2^level rounds.  A record's place is its number in the order of an epoch, from 0.  Two quantities of a
group of nodes decide the noise for a guarantee μ:

| name | meaning |
|---|---|
| energy E | largest squared displacement of all nodes of the group together, by one record |
| amplification A | mean over rounds of the sum of squared coefficients of the nodes in m_t/α |

The mean for prefixes is over the first 2^22 rounds at most, and `count_second` takes that for windows over a
random sample of rounds.  μ is that of (ε, δ), δ = 1e-5.  Arguments `records`, `rounds` and `dimension` are N, T
and d, the number of parameters.

One group needs a variance of α² A E/μ², and several with the best shares of the guarantee (α Σ √(A E))²/μ².
Algorithm 2 has four groups: gradients of the first two epochs, gradients of later ones, differences between
epochs, and residuals within one.

`count_first` and `count_second` count nodes for the worst record of each group.  `estimate_first` and
`estimate_second` take the mean record for the worst, for large N.  `bound_over_orders` is for epochs with fresh
permutations.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.gaussian import mu_of
from fedpriv.addons.rates.figure import Line, RateFigure, Triangle, log_space, make_line
from fedpriv.core.errors import InputError
from fedpriv.noise.series import Floats, geometric_sums
from fedpriv.noise.tree import level_count
from fedpriv.papers.tran_cutkosky import paper_node_count

DELTA = 1e-5
_SAMPLED_ROUNDS = 60
_EXACT_SIZES = (250.0, 1000.0)


def first_rounds(records: float, dimension: int, epsilon: float) -> float:
    """Return T of Theorem 6, the solution of T log2 T √(d ln(1/δ)) = ε N², if it is 3 or more.

    For a smaller solution the result may be another number.
    """
    budget = epsilon * records**2 / math.sqrt(dimension * math.log(1.0 / DELTA))
    rounds = budget
    for _ in range(200):  # a fixed-point iteration, which contracts near a T above e
        rounds = budget / math.log2(max(rounds, 2.0))
    return rounds


def second_rounds(records: float, dimension: int, epsilon: float) -> float:
    """Return T of Theorem 9, N^(7/3) ε^(4/3) / d^(2/3)."""
    return float(records ** (7 / 3) * epsilon ** (4 / 3) / dimension ** (2 / 3))


def theorem_6(records: float, dimension: int, epsilon: float) -> float:
    """Return Theorem 6's bound on the mean gradient norm, with 48 for the printed 12 (docs/errata.md)."""
    ratio = records / first_rounds(records, dimension, epsilon)
    return (1.5 + 12.0 + 48.0) * math.sqrt(ratio) + 6.0 / math.sqrt(records) + 6.0 * ratio


def theorem_9(records: float, dimension: int, epsilon: float) -> float:
    """Return Theorem 9's bound on the mean gradient norm, as printed."""
    logs = 16.0 * math.log2(second_rounds(records, dimension, epsilon)) * math.log(1.0 / DELTA)
    rate = math.pow(dimension, 1 / 3) / math.pow(epsilon * records, 2 / 3)
    last = (36.0 + 9.0) * logs * math.sqrt(dimension) / (epsilon * records)
    return (1.5 + 72.0 * logs + 12.0) * rate + 6.0 / math.sqrt(records) + last


def lemma_12(records: int, dimension: int, epsilon: float) -> float:
    """Return the noise of the momentum that Lemma 12 allows for Algorithm 1."""
    rounds = int(first_rounds(records, dimension, epsilon))
    nodes = paper_node_count(rounds, records) * math.log2(rounds)
    return 8.0 / records * math.sqrt(math.log(1.0 / DELTA) * dimension * nodes) / epsilon


def lemma_7(records: int, dimension: int, epsilon: float) -> float:
    """Return the noise of the momentum that Lemma 7 allows for Algorithm 2."""
    rounds, log = second_rounds(records, dimension, epsilon), math.log(1.0 / DELTA)
    step, levels = 1.0 / math.sqrt(records * rounds), math.log2(rounds)
    terms = (
        192.0 * math.sqrt(dimension * log)
        + 384.0 * math.sqrt(step * dimension * rounds * log)
        + 16.0 * step * math.sqrt(3.0 * dimension * rounds * records * log)
    )
    return terms * levels / (records * epsilon)


def gradient_descent(records: float, dimension: int, epsilon: float) -> float:
    """Return the bound of DP gradient descent: full gradients, a step of 1/L, the best T, counted noise."""
    return math.sqrt(4.0 * math.sqrt(2.0) * math.sqrt(dimension) / (records * mu_of(epsilon, DELTA)))


def count_first(records: int, dimension: int, epsilon: float) -> float:
    """Return the noise of Algorithm 1 for the worst record."""
    rounds = _whole_epochs(first_rounds(records, dimension, epsilon), records, 1)
    energy, _ = _prefix_energies(records, rounds)
    amplification = _prefix_amplification(rounds, 1.0 / records)
    return 2.0 / records * math.sqrt(energy.max() * amplification * dimension) / mu_of(epsilon, DELTA)


def count_second(records: int, dimension: int, epsilon: float) -> float:
    """Return the noise of Algorithm 2, with the worst record of each group of nodes.

    Energies are those of increments of norm 1, times the square of an increment's largest change: 2 for a
    gradient, 2 η N for a difference, and 2 η times the place in the order for a residual.  Nodes of at most N
    rounds that no window uses count, too.
    """
    rounds = _whole_epochs(second_rounds(records, dimension, epsilon), records, 4)
    step = 1.0 / math.sqrt(records * rounds)
    _, residual_energy = _prefix_energies(records, rounds)
    energies = (
        4.0 * _window_energy(records, 0, 2 * records).max(),
        4.0 * _window_energy(records, 2 * records, rounds).max(),
        4.0 * (step * records) ** 2 * _window_energy(records, records, rounds).max(),
        4.0 * step**2 * residual_energy.max(),
    )
    amplifications = (*_window_amplifications(records, rounds), _prefix_amplification(rounds, 1.0 / records))
    return _combine(energies, amplifications, records, dimension, epsilon)


def estimate_first(records: float, dimension: int, epsilon: float) -> float:
    """Return the noise of Algorithm 1 for the mean record."""
    rounds = first_rounds(records, dimension, epsilon)
    energy = _mean_prefix_energy(records, rounds) * _mean_prefix_amplification(rounds, 1.0 / records)
    return 2.0 / records * math.sqrt(energy * dimension) / mu_of(epsilon, DELTA)


def estimate_second(records: float, dimension: int, epsilon: float) -> float:
    """Estimate the noise of Algorithm 2 by the mean record, which stands for the worst.

    Energies of later gradients and of differences are taken over all rounds.
    """
    rounds = second_rounds(records, dimension, epsilon)
    alpha, step = 1.0 / records, 1.0 / math.sqrt(records * rounds)
    x, mixing = _epoch_decay(records), min(0.5, step * records)
    energies = (
        4.0 * _mean_window_energy(records, 2.0 * records),
        4.0 * _mean_window_energy(records, rounds),
        4.0 * (step * records) ** 2 * _mean_window_energy(records, rounds),
        4.0 / 3.0 * (step * records) ** 2 * _mean_prefix_energy(records, rounds),  # mean of p² over places is N²/3
    )
    # A window of N rounds that is i = 1, 2, … epochs old has the coefficient (y^i - x^i)/(y - x), y = 1-γ,
    # x = (1-α)^N, and `coefficients` is the sum of its squares.
    window, y = _mean_window_amplification(round(records), alpha), 1.0 - mixing
    squares = y * y / (mixing * (2.0 - mixing)) - 2.0 * x * y / (1.0 - x * y) + x**2 / (1.0 - x**2)
    coefficients = squares / (y - x) ** 2
    # Windows of the first two epochs: y^i/(y - x), without x^i.  Their mean over epochs is taken at 2,000 points.
    first_windows = y ** np.linspace(2.0, rounds / records, 2000) / (y - x)
    amplifications = (
        window * float(np.mean(first_windows**2)),
        window * coefficients * mixing**2,
        window * coefficients * y**2,
        _mean_prefix_amplification(rounds, alpha),
    )
    return _combine(energies, amplifications, records, dimension, epsilon)


def _combine(
    energies: tuple[float, ...], amplifications: tuple[float, ...], records: float, dimension: int, epsilon: float
) -> float:
    """Return the noise of all groups with the best shares of the guarantee."""
    roots = sum(math.sqrt(a * e) for a, e in zip(amplifications, energies, strict=True))
    return roots * math.sqrt(dimension) / (records * mu_of(epsilon, DELTA))


def _whole_epochs(rounds: float, records: int, min_epochs: int) -> int:
    return max(min_epochs * records, round(rounds / records) * records)


def _epoch_decay(records: float) -> float:
    """Return (1 - 1/N)^N for N above 1, to rounding also if N is large."""
    return math.exp(records * math.log1p(-1.0 / records))


def _square_sum(length: float, alpha: float) -> float:
    """Return the sum of (1-α)^(2j) over j = 0 … length - 1."""
    return math.expm1(2.0 * length * math.log1p(-alpha)) / math.expm1(2.0 * math.log1p(-alpha))


def _node_energy(records: int, ends: tuple[int, int], stride: int) -> NDArray[np.float64]:
    """Return each record's energy in the nodes of at most N rounds that end within `ends`.

    A node of at most N rounds has a record at most once, and the record that was read j rounds before its end has
    the energy (1-α)^(2j), for an increment of norm 1.  The sum over nodes of a level is a circular convolution
    over places.

    Args:
        records: N.
        ends: Rounds (low, high) with low < end ≤ high for the last round of a node.
        stride: 1 for all nodes of a level, or 2 for every second one, of which prefixes are composed.

    Returns:
        Energies by the record's place in the order, (N,).
    """
    energy = np.zeros(records)
    for level in range(records.bit_length()):
        length = 1 << level
        starts = np.arange(0, ends[1] - length + 1, stride * length)
        counts = np.bincount(starts[starts + length > ends[0]] % records, minlength=records).astype(float)
        squares = np.zeros(records)
        squares[:length] = (1.0 - 1.0 / records) ** (2.0 * np.arange(length - 1, -1, -1))
        energy += np.fft.irfft(np.fft.rfft(counts) * np.fft.rfft(squares), records)
    return energy


def _window_energy(records: int, low: int, high: int) -> NDArray[np.float64]:
    """Return each record's energy in all nodes of at most N rounds that end within (low, high], (N,)."""
    return _node_energy(records, (low, high), stride=1)


@cache
def _prefix_energies(records: int, rounds: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each record's energy in the nodes of all prefixes, for two norms of its increments.

    A prefix is composed of nodes by the binary digits of its length, a node for each digit 1.  Such a node starts
    after the rounds of larger nodes, so that every second node of a level is used, the first one included.  A node
    of more than N rounds, whose level is the bit length of N or above, may have a record several times, with a
    factor (1-α)^N for each epoch further back.

    Returns:
        Energies for norm 1, and for norm p of the record at place p in the order, (N,) each.  The latter is for
        residuals, which may grow by a step in each round of an epoch.
    """
    place = np.arange(records, dtype=float)
    energy = _node_energy(records, (0, rounds), stride=2)
    weighted = energy * place**2
    for level in range(records.bit_length(), rounds.bit_length()):
        length = 1 << level
        node_rounds = min(length, 60 * records)  # (1 - 1/N)^(60 N) is below 1e-26
        decays = (1.0 - 1.0 / records) ** np.arange(node_rounds - 1, -1, -1.0)
        starts = np.arange(0, rounds - length + 1, 2 * length, dtype=np.int64) % records
        for start, count in zip(*np.unique(starts, return_counts=True), strict=True):
            places = (start + length - node_rounds + np.arange(node_rounds)) % records
            sums = np.bincount(places, decays, records)
            energy += count * sums**2
            weighted += count * sums**2 * place**2
    return energy, weighted


def _prefix_amplification(rounds: int, alpha: float) -> float:
    """Return the mean, over prefixes 1 … t, of the sum of squared coefficients of a prefix's nodes.

    The mean is over t = 1 … min(T, 2^22).  With 2^k the largest power of 2 that divides t, round t has the nodes
    of round t - 2^k, decayed by 2^k rounds, and one more of 2^k rounds, with the coefficient 1.
    """
    count = min(rounds, 1 << 22)
    squares = np.zeros(count + 1)
    for level in range(count.bit_length() - 1, -1, -1):
        length = 1 << level
        t = np.arange(length, count + 1, 2 * length)
        squares[t] = 1.0 + (1.0 - alpha) ** (2.0 * length) * squares[t - length]
    return float(squares[1:].mean())


def _nodes(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last rounds of the fewest nodes that together are the rounds first … last.

    Rounds are counted from 1.  A node of level k has 2^k rounds, and begins at round 1 plus a multiple of 2^k.
    """
    while first <= last:
        # The number of zeros at the end of first - 1 in binary digits, or a large number for round 1.
        level = ((first - 1) & (1 - first)).bit_length() - 1 if first > 1 else 62
        while first + (1 << level) - 1 > last:
            level -= 1
        yield first, first + (1 << level) - 1
        first += 1 << level


def _window_square(first: int, last: int, alpha: float) -> float:
    """Return the sum of squared coefficients of the nodes of the window first … last."""
    return sum((1.0 - alpha) ** (2 * (last - end)) for _, end in _nodes(first, last))


def _window_amplifications(records: int, rounds: int) -> tuple[float, float, float]:
    """Return the amplifications of early gradients, later gradients and differences.

    They are means over 60 random rounds of 2N … T.  Early gradients are those of windows that end within the first
    two epochs.  A window that ends later counts as later with all its nodes.

    The start of this module's w_t and p_t is w_t = G_t for N ≤ t < 2N, and for t < N p_t is the decayed sum of the
    gradients of rounds 1 … t.  Let y = 1 - γ and x = (1-α)^N.

    Round t is r rounds after the end of epoch q.  So p_t has windows of ages i = 1 … q, in epochs, of which the
    latest, i = 1, ends at t.  A window of age i has the coefficient (y^i - x^i)/(y - x), times γ for gradients and
    y for differences.  The oldest one, i = q, is a w_t of the start: it has the factor 1 in place of γ for
    gradients, and no differences.  The gradients of the r rounds before it have the coefficient x^q = (1-α)^(t-r).
    """
    alpha, step = 1.0 / records, 1.0 / math.sqrt(records * rounds)
    mixing, epoch_decay = min(0.5, step * records), (1.0 - alpha) ** records
    y = 1.0 - mixing
    early = later = differences = 0.0
    for t in map(int, np.random.default_rng(0).integers(2 * records, rounds + 1, _SAMPLED_ROUNDS)):
        q, r = divmod(t, records)
        if r:
            early += (1.0 - alpha) ** (2 * (t - r)) * _window_square(1, r, alpha)
        # The oldest window, whose rounds are r + 1 … r + N.
        ages = np.arange(q)
        oldest_coefficient = float((epoch_decay**ages * y ** (q - ages - 1.0)).sum())
        early += oldest_coefficient**2 * _window_square(r + 1, r + records, alpha)
        # Windows of an age above 40/γ + 2 are left out: their coefficients are below 2 e^-40.
        for age in range(1, min(q - 1, int(40.0 / mixing) + 2) + 1):
            low, high = t - age * records + 1, t - (age - 1) * records
            window = _window_square(low, high, alpha)
            coefficient = (y**age - epoch_decay**age) / (y - epoch_decay)
            squared = (coefficient * mixing) ** 2 * window
            early, later = (early + squared, later) if high <= 2 * records else (early, later + squared)
            differences += (coefficient * y) ** 2 * window
    return early / _SAMPLED_ROUNDS, later / _SAMPLED_ROUNDS, differences / _SAMPLED_ROUNDS


def _mean_window_energy(records: float, rounds: float, stride: int = 1) -> float:
    """Return about the mean record's energy in the nodes of at most N rounds.

    Args:
        records: N.
        rounds: T.  A level has T/(stride · length) nodes, not rounded.
        stride: 1 for all nodes of a level, or 2 for every second one.
    """
    lengths = (2.0**level for level in range(int(math.log2(records)) + 1))
    return sum(rounds / (stride * length) * _square_sum(length, 1.0 / records) for length in lengths) / records


def _mean_prefix_energy(records: float, rounds: float) -> float:
    """Return the mean record's energy in the nodes of all prefixes, approximately.

    A node of more than N rounds is counted as if it had many epochs, or with three quarters of that up to 3 N
    rounds.
    """
    energy, epoch_decay = _mean_window_energy(records, rounds, stride=2), _epoch_decay(records)
    full = _square_sum(records, 1.0 / records) / records / (1.0 - epoch_decay) ** 2
    for level in range(int(math.log2(records)) + 1, int(math.log2(rounds)) + 1):
        length = 2.0**level
        share = 1.0 if length > 3.0 * records else 0.75  # nodes of two epochs have not all of a record's rounds
        energy += math.floor((rounds / length + 1.0) / 2.0) * full * share
    return energy


def _mean_prefix_amplification(rounds: float, alpha: float) -> float:
    """Return about the amplification of a prefix.

    Bit k of t is set half of the time, and its node is t mod 2^k rounds old.
    """
    levels = range(int(math.log2(rounds)) + 1)
    return sum(0.5 * _square_sum(2.0**level, alpha) / 2.0**level for level in levels)


@cache
def _mean_window_amplification(records: int, alpha: float) -> float:
    """Return the mean over 300 windows of seed 1 of the sum of squared coefficients of a window's nodes."""
    starts = map(int, np.random.default_rng(1).integers(1, 1 << 50, 300))
    return sum(_window_square(start, start + records - 1, alpha) for start in starts) / 300


def crossing(first: Callable[[float], float], second: Callable[[float], float], low: float, high: float) -> float:
    """Return the number N from which on `first` is at most `second`, by bisection.

    The functions should cross once between the two powers of ten.

    Args:
        first: Function of N.
        second: Function of N.
        low: Exponent of ten at which `first` is above `second`.
        high: Exponent of ten at which `first` is at most `second`.

    Raises:
        InputError: `first` is not above at the lower power, or is above at the higher one.
    """
    if not first(10.0**low) > second(10.0**low) or first(10.0**high) > second(10.0**high):
        raise InputError(f"the lines do not cross between 10^{low:g} and 10^{high:g} records")
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if first(10.0**middle) > second(10.0**middle) else (low, middle)
    return math.pow(10.0, high)


def momentum_figure(dimension: int = 50, epsilon: float = 4.0) -> RateFigure:
    """Return the figure of the noise and the bounds of Algorithms 1 and 2, for 10³ to 10¹² records.

    Lines have values at the powers of ten N for which the theorems have enough rounds: N by Theorem 6, and 4 N by
    Theorem 9.  Marks are at 250 and 1,000 records, under the same condition.

    Raises:
        InputError: Fewer than three powers of ten have enough rounds, or a crossing of the notes is not found.
    """
    sizes = [n for n in log_space(1e3, 1e12, 1) if second_rounds(n, dimension, epsilon) >= 4.0 * n]
    sizes = [n for n in sizes if first_rounds(n, dimension, epsilon) >= n]
    if len(sizes) < 3:
        raise InputError(f"dimension = {dimension}, epsilon = {epsilon:g}: the theorems need at least N rounds")

    def bind(function: Callable[[float, int, float], float]) -> Callable[[float], float]:
        return lambda n: function(n, dimension, epsilon)

    def bound_first(n: float) -> float:
        return _gradient_bound(n, first_rounds(n, dimension, epsilon), estimate_first(n, dimension, epsilon))

    def bound_second(n: float) -> float:
        return _gradient_bound(n, second_rounds(n, dimension, epsilon), estimate_second(n, dimension, epsilon))

    noise_1, noise_2 = bind(estimate_first), bind(estimate_second)
    lines = [
        make_line("Algorithm 1, noise counted", noise_1, sizes, theory="-1/2 with logarithms"),
        make_line("Algorithm 2, noise counted", noise_2, sizes, theory="-2/3 with logarithms", color=3),
        make_line("Algorithm 1, bound with it", bound_first, sizes, style="dashed"),
        make_line("Algorithm 2, bound with it", bound_second, sizes, style="dashed", color=3),
        make_line("Theorem 6, with 48 for 12", bind(theorem_6), sizes, theory="-1/2", style="dotted"),
        make_line("Theorem 9", bind(theorem_9), sizes, theory="-2/3", style="dotted", color=3),
        make_line(
            "DP gradient descent, bound",
            bind(gradient_descent),
            sizes,
            theory="-1/2",
            style="dash-dotted",
            color=7,
        ),
        *_exact_marks(dimension, epsilon),
    ]
    return RateFigure(
        f"Tran & Cutkosky: noise and bounds against N (d = {dimension}, ε = {epsilon:g}, G = L = R = 1)",
        "records N",
        "noise of the momentum, or bound on the gradient norm",
        lines,
        (1e3, 1e4, 1e6, 1e9, 1e12),
        (
            Triangle(1e5, gradient_descent(1e5, dimension, epsilon) / 6.0, -0.5, "-1/2", 10.0),
            Triangle(1e7, 8.0 * theorem_9(1e7, dimension, epsilon), -2 / 3, "-2/3", 10.0),
        ),
        level=1.0,
        notes=[_crossing_note(noise_1, noise_2, bind(theorem_6), bind(theorem_9)), *_NOTES],
    )


def _gradient_bound(records: float, rounds: float, noise: float) -> float:
    """Return the bound on the gradient norm for a momentum with this noise, without the term 6 N/T."""
    return 13.5 * math.sqrt(records / rounds) + 6.0 / math.sqrt(records) + 3.0 * noise


def _exact_marks(dimension: int, epsilon: float) -> list[Line]:
    """Return marks of the counted noise at 250 and 1,000 records, where the theorems have enough rounds."""
    sizes = [n for n in _EXACT_SIZES if second_rounds(n, dimension, epsilon) >= 4.0 * n]
    sizes = [n for n in sizes if first_rounds(n, dimension, epsilon) >= n]
    first = [count_first(int(n), dimension, epsilon) for n in sizes]
    second = [count_second(int(n), dimension, epsilon) for n in sizes]
    return [
        Line("Algorithm 1, worst record", sizes, first, style="marks"),
        Line("Algorithm 2, worst record", sizes, second, style="marks", color=3),
    ]


def _crossing_note(
    noise_1: Callable[[float], float],
    noise_2: Callable[[float], float],
    bound_1: Callable[[float], float],
    bound_2: Callable[[float], float],
) -> str:
    parts = []
    for text, first, second, low, high in (
        ("Algorithm 2's counted noise is below Algorithm 1's from", noise_2, noise_1, 5.0, 13.5),
        ("Theorem 9's bound is below Theorem 6's from", bound_2, bound_1, 5.0, 40.0),
        ("Theorem 6's bound is below G from", bound_1, lambda n: 1.0, 3.0, 40.0),
        ("Theorem 9's bound is below G from", bound_2, lambda n: 1.0, 3.0, 60.0),
    ):
        parts.append(f"{text} 10^{math.log10(crossing(first, second, low, high)):.2f} records")
    return "; ".join(parts) + "."


_NOTES = (
    "Both rates contain 1/√N: without constants and logarithms the gain of Algorithm 2 is at most 1 + d^(1/4)/√ε, "
    "and half of that at N = d²/ε⁴.",
    "Lines take the mean record for the worst; marks count the worst record of each group of nodes.",
)


def max_node_weights(rounds: int, rounds_per_epoch: int, decay: float, level: int) -> Floats:
    """Compute the largest weight of a record in every node of a level, over all permutations, (nodes,).

    The weight of a record is Σ decay^(z-i) over its rounds i in the node, which ends at z.  It is largest for a
    record that is read in round z and last in each earlier epoch of the node: 1 for round z, decay^r in the epoch
    that ended r rounds before z, and a further factor decay^N for each epoch before.

    Args:
        rounds: T.
        rounds_per_epoch: N.
        decay: Decay per round.
        level: Level of the nodes, which have 2^level rounds.
    """
    last_rounds = np.arange(1 << level, rounds + 1, 1 << level) - 1  # counted from 0
    last_epochs = last_rounds // rounds_per_epoch
    earlier_epochs = last_epochs - (last_rounds + 1 - (1 << level)) // rounds_per_epoch
    rounds_since = last_rounds + 1 - last_epochs * rounds_per_epoch
    return np.asarray(
        1.0
        + float(decay) ** rounds_since * geometric_sums(decay**rounds_per_epoch, earlier_epochs.astype(np.float64))
    )


def bound_over_orders(rounds: int, rounds_per_epoch: int, decay: float, *, all_nodes: bool = False) -> float:
    """Bound the squared norm of a record in a tree at clip 1, over all permutations of all epochs.

    A record's weight in a node that ends at round z is Σ decay^(z-i) over its rounds i in the node, and its
    squared norm is the sum of its squared weights.  A node of at most N rounds meets two epochs at most.  So the
    largest sum over these nodes follows by dynamic programming over the record's position in the last epoch.
    Longer nodes are bounded one by one.

    Guarantee: no sequence of permutations has a record of a larger `visited_squared_norms` (`fedpriv.noise.tree`)
    in one tree over all rounds, up to rounding.  So noise for this bound can be planned before a seed is known.

    Args:
        rounds: T.
        rounds_per_epoch: N.
        decay: Decay per round.
        all_nodes: Whether all nodes of a level count, or every second one, the left halves, which make prefixes.

    Example:
        >>> bound_over_orders(rounds=4, rounds_per_epoch=2, decay=1.0)
        7.0
    """
    positions, node_step = np.arange(rounds_per_epoch), 1 if all_nodes else 2
    levels = range(level_count(rounds))

    def weigh_rounds(epoch: int, level: int) -> tuple[Floats, NDArray[np.int64]]:
        """Return the weight of each round of an epoch in its node, 0 if the node does not count, and the node."""
        epoch_rounds = epoch * rounds_per_epoch + positions
        nodes = epoch_rounds >> level
        ends = (nodes + 1) << level
        is_counted = (nodes % node_step == 0) & (ends <= rounds)
        return np.where(is_counted, float(decay) ** (ends - 1 - epoch_rounds), 0.0), nodes

    best = np.zeros(rounds_per_epoch)  # best[p]: largest sum of a record at position p of the last epoch
    # transitions[p, q]: largest sum of a record at position p of the epoch before and position q of this one,
    # without the squared weights of this epoch.  A node across both epochs has the square of a sum of two weights.
    for epoch in range(-(-rounds // rounds_per_epoch)):
        transitions, squares = np.repeat(best[:, None], rounds_per_epoch, axis=1), np.zeros(rounds_per_epoch)
        for level in (level for level in levels if 1 << level <= rounds_per_epoch):
            weights, nodes = weigh_rounds(epoch, level)
            squares += weights**2
            earlier_weights, earlier_nodes = weigh_rounds(epoch - 1, level)
            if epoch and (crossing := nodes[0]) == earlier_nodes[-1]:
                transitions += 2.0 * np.outer(
                    earlier_weights * (earlier_nodes == crossing), weights * (nodes == crossing)
                )
        best = np.max(transitions, axis=0) + squares
    long_nodes = (
        max_node_weights(rounds, rounds_per_epoch, decay, level)[::node_step]
        for level in levels
        if 1 << level > rounds_per_epoch
    )
    return float(np.max(best)) + sum(float(np.sum(weights**2)) for weights in long_nodes)
