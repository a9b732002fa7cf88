"""Theorems and bounds of Kornowski, Liu & Talwar for the algorithms in `kornowski`.

The module chooses the parameters of a run, with the bound that holds for them: Theorems 3.1 and 6.1 (single pass)
and Theorem 4.1 (multi pass), corrected as docs/goldstein.md explains.  Logarithms of the printed O~ are left out,
and the Gaussian-DP parameter μ stands for the paper's ε.

The oracle is the noisy estimate of the smoothed loss's gradient at a query, the point that a round asks about.  A
period of Σ rounds begins with an anchor round, which estimates the gradient from B1 records.  Each other round
adds an estimate of the difference of the gradients at the last two queries, from B2 records.  The oracle sees of a
record its exact smoothed gradient, or is of first order (gradients at random points) or of zeroth order (values at
random points), where the points lie in random directions from the query.  In the theorems' single pass the noise
is that of a binary tree over each period, whose nodes are noisy sums over intervals of rounds.  The bounds are on
the Goldstein measure at radius 2α: the smallest norm of a weighted mean of gradients at points within 2α.

| here | paper | unit |
|---|---|---|
| `lipschitz` | L: Lipschitz constant of every record's loss | loss / length |
| `gap` | Φ ≥ F(x_0) - inf F | loss |
| `smoothing` | α: radius of the random smoothing, for a result at radius 2α | length |
| `radius` | D: largest step | length |
| `step` | η | length² / loss |
| `window`, `windows` | M (W below), K = ⌊T/M⌋ | rounds, number |
| `rounds`, `period` | T, and Σ: rounds from anchor to anchor | rounds |
| `anchor_batch`, `batch` | B1, B2: records of all silos in an anchor round, in another round | |
| `anchor_clip`, `clip` | C1, C2: norm bounds on one record's gradient, difference of gradients | loss / length |
| `dimension`, `records` | d, n | |
| `direction_count` | J: random directions for each record and query of a difference | |
| `error`, `norm` | G0, G1: bounds on the rms error and the rms norm of the oracle | loss / length |

κ_d is the largest smoothness of a loss with L = 1 that is smoothed over the ball of radius 1
(`smoothness_constant`), and c_d is 1 for d = 1 and else d²/(d - 1).
"""

import math
from dataclasses import dataclass
from typing import Literal

from fedpriv.core.errors import InputError
from fedpriv.noise.tree import level_count

Order = Literal["exact", "first", "zeroth"]
"""Oracle's view of a record: its exact smoothed gradient, or gradients or values at random points."""

ROUNDING = 1e-9
"""Slack of `_floor` and of the number of rounds, against rounding errors next to an integer."""


def smoothness_constant(dimension: int) -> float:
    """Return the smoothness constant κ_d ≤ √d of smoothing over a ball in d dimensions.

    An L-Lipschitz loss smoothed over a ball of radius α is (κ_d L/α)-smooth, and no smaller constant serves all
    such losses.

    Example:
        >>> round(smoothness_constant(2), 6)
        1.27324
    """
    half = dimension / 2.0
    return 2.0 * math.exp(math.lgamma(half + 1.0) - math.lgamma(half + 0.5)) / math.sqrt(math.pi)


def direction_energy(dimension: int) -> float:
    """Return c_d, for which a zeroth-order estimate along one direction has mean square at most c_d L².

    c_d is d²/(d - 1), and 1 in dimension 1.

    Example:
        >>> direction_energy(2)
        4.0
    """
    return 1.0 if dimension == 1 else dimension**2 / (dimension - 1.0)


def paper_window(radius: float, smoothing: float) -> int:
    """Return the paper's window ⌊α / (4 D)⌋, at least 1 and at most 10^18.

    Args:
        radius: D, above 0.
        smoothing: α, above 0.

    Example:
        >>> paper_window(radius=0.01, smoothing=1.0)
        25
    """
    return max(1, _floor(smoothing / (4.0 * radius)))


def max_window(radius: float, smoothing: float) -> int:
    """Return the largest window W with ((W + 1)/2 - 1/W) D ≤ α, up to rounding.

    All queries of such a window are within α of their mean.  The result is at most 10^18.

    Args:
        radius: D, above 0.
        smoothing: α, above 0.

    Example:
        >>> max_window(radius=0.01, smoothing=1.0)
        199
    """
    middle = 2.0 * smoothing / radius - 1.0
    return max(1, _floor((middle + math.hypot(middle, math.sqrt(8.0))) / 2.0))


@dataclass(frozen=True)
class NonsmoothProblem:
    """Public numbers of a problem with L-Lipschitz losses, and the oracle's view of a record.

    The module's table has the symbols and units of the fields without a text.
    """

    dimension: int
    lipschitz: float
    gap: float
    smoothing: float
    order: Order = "exact"
    """Oracle's view of a record."""
    direction_count: int = 1
    """Number J of random directions for each record and query of a difference."""
    shares_directions: bool = True
    """Whether a difference of gradients uses the same directions at both of its queries."""
    anchor_direction_count: int | None = None
    """Number m of random directions for each record at an anchor of the multi-pass oracle.

    None stands for 1 for gradients, and for J for values.
    """

    @property
    def smoothness(self) -> float:
        """Bound κ_d L / α on the smoothness of the smoothed loss."""
        return smoothness_constant(self.dimension) * self.lipschitz / self.smoothing

    def difference_clip(self, radius: float) -> float:
        """Return the bound L · min(2, 2 κ_d D / α) of a difference of smoothed gradients.

        The gradients are those of one record at consecutive queries, which are at most 2D apart.
        """
        return min(2.0 * self.lipschitz, 2.0 * self.smoothness * radius)

    def anchor_energy(self) -> float:
        """Bound on the mean square of one record's estimate at an anchor of a single pass.

        The bound is L², or L² (1 + c_d/J) for a zeroth-order oracle, which has J directions there, too.
        """
        spread = direction_energy(self.dimension) / self.direction_count if self.order == "zeroth" else 0.0
        return self.lipschitz**2 * (1.0 + spread)

    def difference_energy(self, radius: float) -> float:
        """Bound on the mean square of one record's estimated difference of gradients.

        The bound is (2 κ_d L D/α)², plus that of the random directions.
        """
        return 4.0 * (self.smoothness * radius) ** 2 + self.direction_energy_of_differences(radius)

    def direction_energy_of_differences(self, radius: float) -> float:
        """Bound on the mean square that random directions add to one record's estimated difference.

        | oracle | directions of its own at each query | shared directions |
        |---|---|---|
        | exact | 0 | 0 |
        | first order | 2 L²/J | (2L)²/J |
        | zeroth order | 2 c_d L²/J | L² min{(2 d D/α)², 4 c_d}/J |

        J is the number of directions, over which the estimate is a mean.

        Args:
            radius: D, or infinity if it is unknown.  It counts for shared directions of zeroth order only.
        """
        if self.order == "exact":
            return 0.0
        if self.order == "first":
            # Without D: gradients of a loss that is not smooth jump, however near the two queries are.
            return (4.0 if self.shares_directions else 2.0) * self.lipschitz**2 / self.direction_count
        energy = direction_energy(self.dimension)
        if self.shares_directions:
            displacement_energy = (2.0 * self.dimension * radius / self.smoothing) ** 2
            return self.lipschitz**2 * min(displacement_energy, 4.0 * energy) / self.direction_count
        return 2.0 * energy * self.lipschitz**2 / self.direction_count


def max_nodes(period: int) -> int:
    """Largest number of nodes of a period's tree that a release is composed of."""
    return level_count(period + 1) - 1


def single_pass_error(
    problem: NonsmoothProblem, radius: float, period: int, anchor_batch: int, batch: int, std: float
) -> float:
    """Return the bound G0 on the error of the single-pass oracle at the end of a period, without clipping.

    G0² = E_a/B1 + (Σ - 1) E_d/B2 + d std², with E_a from `anchor_energy` and E_d from `difference_energy`.

    Args:
        problem: Numbers of the problem.
        radius: D, the largest step.
        period: Σ.
        anchor_batch: B1.
        batch: B2.
        std: Standard deviation of the noisiest release, in units of the mean over a round's records.
    """
    return math.sqrt(
        problem.anchor_energy() / anchor_batch
        + (period - 1) * problem.difference_energy(radius) / batch
        + problem.dimension * std**2
    )


def multi_pass_error(
    problem: NonsmoothProblem,
    period: int,
    records: int,
    anchor_std: float,
    difference_std: float,
    radius: float = math.inf,
) -> float:
    """Return the bound G0 on the error of the multi-pass oracle at the end of a period, without clipping.

    Every round reads all n records, so that only random directions and noise cause errors:

        G0² = (E_a + (Σ - 1) E_d)/n + d (σ1² + (Σ - 1) σ2²)

    E_a and E_d bound the mean squares that random directions add to one record's estimate at an anchor, and to its
    difference.  σ1 and σ2 are the noise of an anchor and of a difference.

    Args:
        problem: Numbers of the problem.
        period: Σ.
        records: n.
        anchor_std: Standard deviation of an anchor's own noise, in units of the mean.
        difference_std: Standard deviation of a difference's own noise, in units of the mean.
        radius: D, or infinity if it is unknown.
    """
    anchor_energy = 0.0
    if problem.order == "first":
        anchor_energy = problem.lipschitz**2 / (problem.anchor_direction_count or 1)
    elif problem.order == "zeroth":
        count = problem.anchor_direction_count or problem.direction_count
        anchor_energy = problem.lipschitz**2 * direction_energy(problem.dimension) / count
    directions = anchor_energy + (period - 1) * problem.direction_energy_of_differences(radius)
    return math.sqrt(directions / records + problem.dimension * (anchor_std**2 + (period - 1) * difference_std**2))


def leaf_noise_ratio(anchor_clip: float, clip: float, rounds: int, period: int) -> float:
    """Return the ratio σ1/σ2 that minimizes σ1² + (Σ - 1) σ2² at a fixed privacy cost.

    The minimized number is the noise variance in the last round of a period.  The cost is n_a C1²/σ1² + n_d
    C2²/σ2², for n_a = ⌈T/Σ⌉ anchors and n_d = T - n_a differences.  The ratio is √(C1/C2 · √(n_a (Σ - 1)/n_d)), or
    1 if all rounds are anchors.

    Args:
        anchor_clip: C1.
        clip: C2.
        rounds: T.
        period: Σ.

    Example:
        >>> round(leaf_noise_ratio(anchor_clip=1.0, clip=1.0, rounds=100, period=10), 6)
        1.0
    """
    anchors = -(-rounds // period)
    differences = rounds - anchors
    return (
        1.0
        if differences == 0
        else math.sqrt(anchor_clip / clip * math.sqrt(anchors * (period - 1) / differences))
    )


def explicit_bound(
    problem: NonsmoothProblem, radius: float, window: int, windows: int, norm: float, error: float
) -> float:
    """Return (Φ + L α)/(D K W) + 2.5 G1/√W + 2 G0, or infinity without a complete window.

    The result bounds the expected Goldstein measure of a random window: Proposition 2.6 with corrected constants.

    Args:
        problem: Numbers of the problem, Φ, L and α.
        radius: D.
        window: W.
        windows: K, the number of complete windows.
        norm: G1.
        error: G0.
    """
    if windows == 0:
        return math.inf
    initial_term = (problem.gap + problem.lipschitz * problem.smoothing) / (radius * windows * window)
    return initial_term + 2.5 * norm / math.sqrt(window) + 2.0 * error


def _floor(value: float) -> int:
    return math.floor(min(value, 1e18) + ROUNDING)


@dataclass(frozen=True)
class GoldsteinParameters:
    """Parameters of a run, and the theory's bound on its output.

    Standard deviations are in units of the mean over the records of a round.  All parameters are for replace-one
    neighbours, a trusted server, and increments clipped to `anchor_clip` and `clip`.  The module's table has the
    symbols and units of the fields without a text.
    """

    rounds: int
    radius: float
    window: int
    period: int
    anchor_batch: int
    batch: int
    anchor_clip: float
    clip: float
    anchor_std: float
    """Noise of every tree node (single pass), or of an anchor (multi pass), as a standard deviation."""
    difference_std: float
    """Noise of every tree node (single pass), or of a difference (multi pass), as a standard deviation."""
    error: float
    norm: float
    step: float
    bound: float
    """Bound on the expected Goldstein measure of the output at radius 2α, without clipping bias."""

    @property
    def windows(self) -> int:
        """Number K of complete windows."""
        return self.rounds // self.window

    @property
    def anchors(self) -> int:
        """Number of anchor rounds."""
        return -(-self.rounds // self.period)

    @property
    def records(self) -> int:
        """Number of records that a single pass reads."""
        return self.anchor_batch * self.anchors + self.batch * (self.rounds - self.anchors)


def printed_directions(
    problem: NonsmoothProblem, parameters: GoldsteinParameters, delta: float, *, multi_pass: bool
) -> float:
    """Return the number J of random directions of Theorem 3.1, 6.1 or 4.1 at the parameters of a run.

    | theorem | J, not rounded |
    |---|---|
    | 4.1, multi pass | L² d/n · (Σ/σ1² + 1/σ2²) |
    | 6.1, single pass with gradients | max{1, ln(d B2/δ) B2² (α/D)²/d} |
    | 3.1, single pass otherwise | ln(d (B1 + B2)/δ) · ((d B1)² + d B2² (α/D)²) |

    The constant that the paper leaves open is 1.  Where increments are clipped, as here, privacy does not rest on
    J.

    Args:
        problem: Numbers of the problem.
        parameters: Parameters of the theorem, with σ1 = `anchor_std` and σ2 = `difference_std`.  In a multi-pass
            run n = B1 = B2, and σ1 and σ2 are above 0.
        delta: δ.
        multi_pass: Whether the parameters are those of Theorem 4.1.
    """
    d, squared_ratio = problem.dimension, (problem.smoothing / parameters.radius) ** 2
    if multi_pass:
        gradient_energy = problem.lipschitz**2 * d / parameters.batch
        return gradient_energy * (
            parameters.period / parameters.anchor_std**2 + 1.0 / parameters.difference_std**2
        )
    if problem.order == "first":
        return max(1.0, math.log(d * parameters.batch / delta) * parameters.batch**2 * squared_ratio / d)
    logarithm = math.log(d * (parameters.anchor_batch + parameters.batch) / delta)
    return logarithm * ((d * parameters.anchor_batch) ** 2 + d * parameters.batch**2 * squared_ratio)


def needed_directions(problem: NonsmoothProblem, radius: float, failure: float) -> float:
    """Return the number J of directions that a theorem's sensitivity requires, up to a constant.

    J is ln(1/p) max{1, (α/D)²/d} for gradients, and ln(1/p) (d + (α/D)²) otherwise, where p is `failure`.  Only
    the replaced record's estimates have to be near their means, so J depends on no batch size.

    Args:
        problem: Numbers of the problem.
        radius: D.
        failure: Probability with which the estimates may be farther away.
    """
    squared_ratio = (problem.smoothing / radius) ** 2
    first_order_count = max(1.0, squared_ratio / problem.dimension)
    return math.log(1.0 / failure) * (
        first_order_count if problem.order == "first" else problem.dimension + squared_ratio
    )


def plan_single_pass(
    problem: NonsmoothProblem, records: int, mu: float, radius_factor: float = 1.0, period_factor: float = 1.0
) -> GoldsteinParameters:
    """Choose the parameters of Theorems 3.1 and 6.1, for one pass over the records.

    With T = ⌊n/2⌋ rounds, q = Φ/(L T), and h = ⌊log2 Σ⌋ + 1 levels of a period's tree,

        D = min{(q² α)^(1/3), (q² α/√d)^(1/3), √(q α μ/d), (q³ α² μ/d^(3/2))^(1/5)}, at most α/4
        Σ = (α/(μ D))^(2/3) + α/(D √d), rounded to an integer from 1 to T
        B1 = Σ,  B2 = 1,  C1 = L,  C2 = L min{2, 2 κ_d D/α}
        std of a node = (2/μ) max{(C1/Σ) √h, C2 √(h - 1)}

    in units of the mean over a round's records.  An anchor is in at most h nodes, and a difference in at most h -
    1, so that no record of either costs more than μ.  If a pass would read more than n records, T then falls until
    they suffice.

    Args:
        problem: Numbers of the problem, with Φ above 0.
        records: n.
        mu: μ above 0, or infinity for a run without privacy.
        radius_factor: Factor of the theorem's D, before the limit α/4.
        period_factor: Factor of the theorem's Σ, before it is rounded.

    Raises:
        InputError: n is below 2.
    """
    if records < 2:
        raise InputError(f"a single pass has a round for every two records: give 2 or more, not {records}")
    dimension, lipschitz, gap, smoothing = problem.dimension, problem.lipschitz, problem.gap, problem.smoothing
    rounds = records // 2
    drop = gap / (lipschitz * rounds)
    candidates = [(drop**2 * smoothing) ** (1 / 3), (drop**2 * smoothing / math.sqrt(dimension)) ** (1 / 3)]
    if math.isfinite(mu):
        candidates.append(math.sqrt(drop * smoothing * mu / dimension))
        candidates.append((drop**3 * smoothing**2 * mu / dimension**1.5) ** 0.2)
    radius = min(radius_factor * min(candidates), smoothing / 4.0)
    private = (smoothing / (mu * radius)) ** (2 / 3)
    ideal = period_factor * (private + smoothing / (radius * math.sqrt(dimension)))
    period = _clamp(_nearest(ideal), 1, rounds)
    while (excess := (period - 1) * -(-rounds // period) + rounds - records) > 0:
        rounds -= min(excess, (rounds - 1) % period) or 1  # drop differences first, then the last anchor
    anchor_clip, clip = lipschitz, problem.difference_clip(radius)
    # Most nodes of an anchor, and of a difference.
    heights = level_count(period), level_count(period) - 1
    node_std = 2.0 * max(anchor_clip / period * math.sqrt(heights[0]), clip * math.sqrt(heights[1])) / mu
    worst_std = node_std * math.sqrt(max_nodes(period))
    error = single_pass_error(problem, radius, period, period, 1, worst_std)
    return _make_parameters(
        problem, rounds, radius, period, (period, 1), (anchor_clip, clip), (node_std, node_std), error
    )


def plan_multi_pass(
    problem: NonsmoothProblem, records: int, target: float, mu: float, rounds_factor: float = 8.0
) -> GoldsteinParameters:
    """Choose the parameters of Theorem 4.1 with corrected D and T, for all records in every round.

        D = min{α β²/(4 L²), α/4},  T' = ⌈8 Φ L²/(α β³)⌉,  T the larger of T' and one window
        Σ = α/(D √d), rounded to an integer from 1 to T', or 1 if T' is 0
        B1 = B2 = n,  C1 = L,  C2 = L min{2, 2 κ_d D/α}
        σ1 = r σ2,  σ2 = 2 √(n_a C1²/r² + n_d C2²)/(n μ)

    σ1 and σ2 are the noise of anchors and differences, in units of the mean over all records, n_a and n_d their
    numbers in the run, and r is the ratio σ1/σ2 of `leaf_noise_ratio`.

    Args:
        problem: Numbers of the problem.
        records: n.
        target: β, the Goldstein measure at which the theorem aims.
        mu: μ above 0, or infinity for a run without privacy.
        rounds_factor: Factor 8 in the formula of T'.
    """
    lipschitz, smoothing = problem.lipschitz, problem.smoothing
    radius = min(smoothing * target**2 / (4.0 * lipschitz**2), smoothing / 4.0)
    rounds = math.ceil(rounds_factor * problem.gap * lipschitz**2 / (smoothing * target**3) - ROUNDING)
    period = _clamp(_nearest(smoothing / (radius * math.sqrt(problem.dimension))), 1, rounds)
    rounds = max(rounds, paper_window(radius, smoothing))
    anchor_clip, clip = lipschitz, problem.difference_clip(radius)
    anchors = -(-rounds // period)
    ratio = leaf_noise_ratio(anchor_clip, clip, rounds, period)
    price = anchors * anchor_clip**2 / ratio**2 + (rounds - anchors) * clip**2
    difference_std = 2.0 * math.sqrt(price) / (records * mu)
    stds = ratio * difference_std, difference_std
    error = multi_pass_error(problem, period, records, *stds, radius)
    return _make_parameters(problem, rounds, radius, period, (records, records), (anchor_clip, clip), stds, error)


def _make_parameters(
    problem: NonsmoothProblem,
    rounds: int,
    radius: float,
    period: int,
    batches: tuple[int, int],
    clips: tuple[float, float],
    stds: tuple[float, float],
    error: float,
) -> GoldsteinParameters:
    window, norm = paper_window(radius, problem.smoothing), problem.lipschitz + error
    return GoldsteinParameters(
        rounds,
        radius,
        window,
        period,
        *batches,
        *clips,
        *stds,
        error,
        norm,
        step=radius / (norm * math.sqrt(window)),
        bound=explicit_bound(problem, radius, window, rounds // window, norm, error),
    )


def _nearest(value: float) -> int:
    return math.floor(value + 0.5)


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
