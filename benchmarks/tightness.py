"""How far each bound of privacy is above an independent computation, and above the best bound known.

    python -m benchmarks.tightness [POINTS] [NAME …]     300 points of every kind if left out: an hour

A ratio is of ε at one δ, or of sensitivities where there is no ε.  "smallest" is against the independent
computation: of samples less 4 standard errors, of dp-accounting its lower end where it has one.  A ratio below 1
would be wrong.  "largest" is against its best estimate.  The best bound known is that of others where there is
one, else the truth.  For lambda-CGD and buffers it is the one by Rényi orders (Schuchardt & Kalinin 2026 compute
such moments without samples; their other bound, by conditional composition, is not computed here).
"""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as their
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp, ndtr
from scipy.stats import binom

from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.curves import epsilon_at
from fedpriv.accounting.gaussian import Relation
from fedpriv.accounting.guarantees import Sampled
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.accounting.selection import NegativeBinomialRunCount, PoissonRunCount, PrivateSelection
from fedpriv.data.encode import MOMENTS_DIAMETER, bounded_moments
from fedpriv.noise.buffered import BufferedToeplitz, LambdaCgd
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import MinSeparation
from fedpriv.participation.secret import PoissonSampling, RandomAllocation
from fedpriv.plan.sums import RunningSums
from tests.accounting.ratios import replaced_by_sampling
from tests.accounting.test_selection import density
from tests.noise.matrices import patterns

Floats = NDArray[np.float64]
Point = tuple[float, float, float, float]
"""Ours, the independent computation at its lowest, its best estimate, and the best bound known."""

_ERRORS = 4.0
_RARE, _COMMON = (1e-3, 1e-5, 1e-6), (1e-1, 3e-2, 1e-2, 3e-3)
_DRAWS, _TOLD = 60_000, 0.95
_ORDERS = (*np.linspace(1.05, 4.0, 40).tolist(), *np.linspace(4.2, 40.0, 120).tolist())


def _solved(excess: Callable[[float], float], most: float) -> float:
    """Where a falling function of ε is 0."""
    return 0.0 if excess(0.0) <= 0.0 else float(brentq(excess, 0.0, most, xtol=1e-4))


class Law(NamedTuple):
    """Samples of privacy losses, each with its weight."""

    losses: Floats
    weights: Floats

    @classmethod
    def of(cls, losses: Floats) -> Self:
        return cls(losses, np.ones_like(losses))

    def gain(self, epsilon: float, errors: float = 0.0) -> float:
        """δ at ε, less so many of its standard errors."""
        values = self.weights * np.maximum(0.0, -np.expm1(epsilon - self.losses))
        return float(values.mean() - errors * values.std() / math.sqrt(len(values)))

    def epsilon(self, delta: float, errors: float = 0.0) -> float:
        return _solved(lambda at: self.gain(at, errors) - delta, float(self.losses.max()) + 1.0)


def of_losses(laws: list[Law], delta: float) -> tuple[float, float]:
    """The ε of samples at `delta`, less their errors and as it is: the larger of both directions."""
    least, middle = (max(law.epsilon(delta, errors) for law in laws) for errors in (_ERRORS, 0.0))
    return least, middle


def by_orders(laws: list[Law], delta: float) -> float:
    """The ε that Rényi orders would give at best: moments of samples of losses, which miss tails, at 160 orders.

    Canonne, Kamath & Steinke 2020, Proposition 12; the larger of both directions.
    """

    def at(law: Law, order: float) -> float:
        lifted = (order - 1.0) * law.losses
        most = float(lifted.max())
        moment = most + math.log(np.mean(law.weights * np.exp(lifted - most)))
        return (moment - math.log(delta * order)) / (order - 1.0) + math.log1p(-1.0 / order)

    return max(min(at(law, order) for order in _ORDERS) for law in laws)


def compared(
    run: Sampled,
    laws: list[Law],
    others: Callable[[list[Law], float], float] | None = None,
    deltas: Sequence[float] = _COMMON,
) -> Iterator[Point]:
    """`others` is the best bound of others, as far as samples show it: no less than the truth.

    Points whose samples tell ε to no better than a twentieth are left out.
    """
    for delta in deltas:
        least, middle = of_losses(laws, delta)
        if least > max(0.05, _TOLD * middle):  # below, a difference of nothing, or an error, is a large ratio
            best = middle if others is None else max(middle, others(laws, delta))
            yield run.epsilon_of(delta), least, middle, best


def replaced(draw: np.random.Generator) -> Iterator[Point]:
    z, rounds = float(np.exp(draw.uniform(-0.7, 0.7))), int(np.exp(draw.uniform(math.log(4), math.log(200))))
    seed, epsilon = int(draw.integers(1 << 30)), float(draw.uniform(0.1, 6.0))
    delta = AllocatedGaussian(z, rounds, 1, "replace-one").delta_of(epsilon)

    def excess(at: float, errors: float) -> float:
        mean, error = replaced_by_sampling(z, rounds, at, 2_000_000 // rounds, seed)
        return mean - errors * error - delta

    if 1e-6 <= delta <= 1e-2:
        least, middle = (_solved(lambda at, n=n: excess(at, n), epsilon + 1.0) for n in (_ERRORS, 0.0))
        if least > 0.05:
            yield epsilon, least, middle, middle


def balanced(draw: np.random.Generator) -> Iterator[Point]:
    """The true law: `times` of all rounds, any set of them alike."""
    times = int(draw.integers(2, 7))
    rounds, relation = times * int(draw.integers(2, 8)), _relation(draw)
    z = math.sqrt(times) * float(np.exp(draw.uniform(-0.4, 0.7)))

    def log_mean(at: Floats) -> Floats:
        """ln of the mean over all sets of the likelihood ratio; each set's is e^(Σ x_i)."""
        sums = np.full((times + 1, len(at)), -np.inf)
        sums[0] = 0.0
        for column in at.T:
            sums[1:] = np.logaddexp(sums[1:], sums[:-1] + column)
        return np.asarray(sums[-1] - math.log(math.comb(rounds, times)))

    still = draw.standard_normal((_DRAWS, rounds))
    moved = still.copy()
    moved[:, :times] += 1.0 / z  # by symmetry
    half = 0.5 / z**2
    if relation == "replace-one":
        laws = [log_mean(moved / z - half) - log_mean(-moved / z - half)]
    else:
        laws = [log_mean(moved / z - half), -log_mean(still / z - half)]
    yield from compared(AllocatedGaussian(z, rounds // times, times, relation), list(map(Law.of, laws)))


def _relation(draw: np.random.Generator) -> Relation:
    return "replace-one" if draw.random() < 0.5 else "zero-out"


def _strategy(mechanism: Mechanism, rounds: int) -> Floats:
    """C, (rounds, rounds)."""
    series = getattr(mechanism, "strategy_series")(rounds)  # noqa: B009 - buffers and bands alike
    lag = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    return np.where(lag >= 0, series[np.clip(lag, 0, len(series) - 1)] * (lag < len(series)), 0.0)


def _promised(
    mechanism: Mechanism, order: RandomAllocation | PoissonSampling, relation: Relation, sigma: float
) -> Sampled:
    workload = Workload(order, 1.0, np.ones(order.rounds))
    run = order.guarantee(RunningSums(mechanism, workload, relation), sigma)
    assert isinstance(run, Sampled)
    return run


def correlated(
    mechanism: Mechanism,
    groups: int,
    epochs: int,
    draw: np.random.Generator,
    others: Callable[[list[Law], float], float] | None = None,
) -> Iterator[Point]:
    """What a run promises against what the columns of C move, round by round, in every group's worst direction.

    Half of the samples of the larger direction are drawn from moves twice as long, for small δ.
    """
    epoch, relation = groups * int(draw.integers(3, 9 if epochs < 4 else 5)), _relation(draw)
    order = RandomAllocation(epoch * epochs, epoch, groups)
    matrix = _strategy(mechanism, order.rounds)
    sigma = math.sqrt(epochs) * float(np.exp(draw.uniform(-0.45, 0.7))) * float(np.linalg.norm(matrix[:, 0]))
    run = _promised(mechanism, order, relation, sigma)
    moves = np.zeros((1, order.rounds))
    for start in range(0, order.rounds, epoch):
        own = matrix[:, start : start + epoch : groups].T / sigma
        moves = (moves[:, None] + own[None]).reshape(-1, order.rounds)
    still = draw.standard_normal((_DRAWS // 2, order.rounds))
    longer = 1.0 + (np.arange(len(still)) % 2)
    moved = still + longer[:, None] * moves[draw.integers(len(moves), size=len(still))]
    halves = 0.5 * np.sum(moves**2, axis=1)

    def log_mean(at: Floats, times: float = 1.0) -> Floats:
        """ln of the mean density of moves so many times as long, over that of none."""
        return np.asarray(logsumexp(times * (at @ moves.T) - times**2 * halves, axis=1) - math.log(len(moves)))

    seen = log_mean(moved)
    weights = 2.0 / (1.0 + np.exp(np.minimum(log_mean(moved, 2.0) - seen, 700.0)))
    if relation == "replace-one":
        laws = [Law(seen - log_mean(-moved), weights)]
    else:
        laws = [Law(seen, weights), Law.of(-log_mean(still))]
    yield from compared(run, laws, others, (*_COMMON, *_RARE))


def banded(draw: np.random.Generator) -> Iterator[Point]:
    bands = int(draw.integers(1, 9))
    yield from correlated(BandedSquareRoot(1.0, bands), bands, int(draw.integers(1, 3)), draw)


def lambda_cgd(draw: np.random.Generator) -> Iterator[Point]:
    mechanism = LambdaCgd(1.0, (float(draw.uniform(0.5, 0.98)),), (0.0,))
    yield from correlated(mechanism, int(draw.integers(4, 13)), int(draw.integers(1, 5)), draw, by_orders)


def buffers(draw: np.random.Generator) -> Iterator[Point]:
    mechanism = BufferedToeplitz(1.0, (float(draw.uniform(0.8, 0.98)), 0.5), (0.6, 0.1))
    yield from correlated(mechanism, int(draw.integers(4, 13)), int(draw.integers(1, 5)), draw, by_orders)


def banded_poisson(draw: np.random.Generator) -> Iterator[Point]:
    """A coin for each of the first group's rounds: what C's columns move then, and no two of them overlap."""
    bands, relation = int(draw.integers(1, 9)), _relation(draw)
    passes, epoch = int(draw.integers(1, 4)), bands * int(draw.integers(3, 25))
    order, mechanism = PoissonSampling(epoch * passes, epoch, bands), BandedSquareRoot(1.0, bands)
    columns = _strategy(mechanism, order.rounds)[:, ::bands]
    sigma = math.sqrt(passes) * float(np.exp(draw.uniform(-0.7, 0.7))) * float(np.linalg.norm(columns[:, 0]))
    moves = np.sqrt(np.diag(columns.T @ columns)) / sigma
    assert np.allclose(columns.T @ columns, np.diag((moves * sigma) ** 2))
    still, coins = (draw.standard_normal((_DRAWS, len(moves))), draw.random((_DRAWS, len(moves))))
    moved = still + moves * (coins < order.rate)

    def log_ratio(at: Floats) -> Floats:
        """ln of the density with the record over that without it, of every round together."""
        drawn = at * moves - 0.5 * moves**2
        return np.asarray(np.logaddexp(math.log(order.rate) + drawn, math.log1p(-order.rate)).sum(1))

    run = _promised(mechanism, order, relation, sigma)
    laws = [log_ratio(moved) - log_ratio(-moved)]
    if relation == "zero-out":
        laws = [log_ratio(moved), -log_ratio(still)]
    yield from compared(run, list(map(Law.of, laws)))


def poisson(draw: np.random.Generator) -> Iterator[Point]:
    z, rate = float(np.exp(draw.uniform(-0.3, 1.2))), float(np.exp(draw.uniform(-6.0, -1.0)))
    rounds = int(np.exp(draw.uniform(2.0, 7.0)))
    run = PoissonGaussian(z, rate, rounds)
    low, high = (
        their.from_gaussian_mechanism(
            z,
            value_discretization_interval=1e-4,
            sampling_prob=rate,
            pessimistic_estimate=up,
            use_connect_dots=up,
        ).self_compose(rounds)
        for up in (False, True)
    )
    for delta in _RARE:
        best = high.get_epsilon_for_delta(delta)
        if best > 0.05:
            yield run.epsilon_of(delta), low.get_epsilon_for_delta(delta), best, best


def groups_of_poisson(draw: np.random.Generator) -> Iterator[Point]:
    size, rounds = int(draw.integers(2, 6)), int(np.exp(draw.uniform(2.0, 5.0)))
    z, rate = size * float(np.exp(draw.uniform(-0.5, 0.5))), float(np.exp(draw.uniform(-4.0, -1.5)))
    curve = PoissonGaussian(z, rate, rounds).group_curve(size)
    assert curve is not None
    chances = binom.pmf(range(size + 1), size, rate)
    one = their.from_mixture_gaussian_mechanism(
        z, list(range(size + 1)), list(chances / chances.sum()), value_discretization_interval=2e-3
    ).self_compose(rounds)
    for delta in _RARE:
        best = one.get_epsilon_for_delta(delta)
        if best > 0.05:
            yield epsilon_at(curve, delta), best, best, best


def selection(draw: np.random.Generator) -> Iterator[Point]:
    """Runs that release their Gaussian score, both laws and orders; the best bound known is by Rényi orders."""
    mu, mean = float(draw.uniform(0.1, 4.0)), float(np.exp(draw.uniform(0.1, 5.0)))
    eta = float(draw.choice([0.0, 0.5, 1.0, math.inf]))
    choice = PrivateSelection(
        mu, PoissonRunCount(mean) if math.isinf(eta) else NegativeBinomialRunCount(mean, eta)
    )
    x = np.linspace(-11.0, 15.0, 20_001)
    weight, width = density(choice.run_count), float(x[1] - x[0])
    best = [
        [np.exp(-((x - c) ** 2) / 2) / math.sqrt(2 * math.pi) * weight(ndtr(side * (x - c))) for c in (0.0, mu)]
        for side in (-1.0, 1.0)
    ]

    def stick(epsilon: float) -> float:
        factor = math.exp(epsilon)
        pairs = itertools.chain.from_iterable(itertools.permutations(pair) for pair in best)
        return max(float(np.sum(np.maximum(0.0, p - factor * q))) * width for p, q in pairs)

    for delta in _RARE:
        ours = choice.epsilon_of(delta)
        least = _solved(lambda e, d=delta: stick(e) - d, 2.0 * ours)
        yield ours, least, least, choice.epsilon_by_orders(delta)


def moments(draw: np.random.Generator) -> Iterator[Point]:
    """What records are charged with, against the farthest of values of a column and their pairs."""
    x = np.concatenate([[-1.0, 0.0, 1.0], draw.uniform(-1.0, 1.0, 1000)])
    first, second = x / 1.25, (2.0 * x**2 - 1.25) / 1.25
    assert np.allclose(bounded_moments(x[:, None]), np.stack([first, second], axis=1), atol=1e-15)
    longest = float(np.hypot(first, second).max())
    yield 1.0, longest, longest, longest
    apart = float(np.hypot(np.subtract.outer(first, first), np.subtract.outer(second, second)).max())
    yield MOMENTS_DIAMETER / 1.25, apart, apart, apart


def _trees(draw: np.random.Generator, equal: bool) -> Iterator[Point]:
    rounds, decay = int(draw.integers(3, 15)), float(draw.choice([1.0, 1.0, 0.9, 0.5]))
    pattern = MinSeparation(rounds, int(draw.integers(2, 6)), int(draw.integers(1, 6)))
    clips = np.ones(rounds) if equal else np.exp(draw.uniform(-1.5, 1.5, rounds))
    workload, tree = Workload(pattern, decay, clips), BinaryTree(decay)
    moved = tree.columns(workload).inner(np.arange(rounds)) * np.outer(clips, clips)
    worst = math.sqrt(max(float(moved[np.ix_(held, held)].sum()) for held in patterns(workload)))
    yield tree.sensitivity(workload), worst, worst, worst


def equal_trees(draw: np.random.Generator) -> Iterator[Point]:
    yield from _trees(draw, equal=True)


def unequal_trees(draw: np.random.Generator) -> Iterator[Point]:
    yield from _trees(draw, equal=False)


KINDS: dict[str, Callable[[np.random.Generator], Iterator[Point]]] = {
    "Poisson": poisson,
    "allocation, banded noise": banded,
    "allocation, lambda-CGD": lambda_cgd,
    "allocation, buffers (BLT)": buffers,
    "private selection, by curve": selection,
    "centred moments": moments,
    "trees, equal clips": equal_trees,
    "trees, unequal clips": unequal_trees,
    "balanced, k of T rounds": balanced,
    "groups under Poisson": groups_of_poisson,
    "allocation, replace-one": replaced,
    "under Poisson, banded noise": banded_poisson,  # names in order seed the draws: a new one is the last
}


def row(name: str, points: int) -> str:
    """A line of the table: of so many points, or a few more."""
    draw, found, started = np.random.default_rng(sorted(KINDS).index(name)), list[Point](), time.process_time()
    while len(found) < points:
        found += KINDS[name](draw)
    ours, least, middle, best = np.array(found).T
    shown = f"{(ours / least).min():.4f} | {(ours / middle).max():.4f} | {(ours / best).max():.4f}"
    return (
        f"| {name} | {len(found)} | {shown} | {np.median(ours / best):.4f} | {time.process_time() - started:.0f} |"
    )


def run(points: int, names: list[str]) -> None:
    """Print the table."""
    print("| | points | smallest | largest | over the best bound known, at most | median | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name in names or list(KINDS):
        print(row(name, points), flush=True)


if __name__ == "__main__":
    asked = sys.argv[1:]
    count = int(asked.pop(0)) if asked and asked[0].isdigit() else 300
    run(count, asked)
