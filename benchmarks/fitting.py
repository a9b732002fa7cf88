"""Fitted noise: what it leaves in a row's output, how long a fit takes, and what a round of it costs.

python -m benchmarks.fitting [T[,N] ...]      N rounds an epoch; 60, 240, 600 and 600,60 if left out
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedpriv.loss.estimators import Estimator, PlainGradient, RecursiveGradient
from fedpriv.noise.buffered import BufferedToeplitz, LambdaCgd
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.fitting.auto import (
    choose_candidate,
    compare_mechanism,
    least_published_noise,
    undominated_candidates,
)
from fedpriv.noise.fitting.cost import make_noise_cost
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.toeplitz import BandedInverseSquareRoot, BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.papers.base import Optimizer
from fedpriv.papers.choquette_choo import NesterovCoupling
from fedpriv.papers.ftrl import FollowTheRegularizedLeader
from fedpriv.papers.reshef_levy import AnytimeSGD
from fedpriv.papers.sgd import ProjectedSGD
from fedpriv.participation.orders import FixedOrder
from fedpriv.plan.calibration import compute_response

DIMENSION = 1_000_000
MOST_VECTORS = 4

_SUMMED, _PLAIN = RecursiveGradient(1.0), PlainGradient(1.0, decay=1.0)
ROWS: dict[str, tuple[Optimizer, Estimator]] = {
    "dp-mu2-fl": (AnytimeSGD(1.0, 1.0), _SUMMED),
    "accelerated-dp-srgd": (NesterovCoupling(1.0, 1.0), _SUMMED),
    "unaccelerated-dp-srgd": (ProjectedSGD(1.0, 1.0), _SUMMED),
    "dp-ftrl, momentum 0": (FollowTheRegularizedLeader(1.0, 1.0), _PLAIN),
    "dp-ftrl, momentum 0.9": (FollowTheRegularizedLeader(1.0, 1.0, 0.9), _PLAIN),
}
STREAMED: dict[str, Mechanism] = {
    "tree": BinaryTree(),
    "λ-CGD": BufferedToeplitz(1.0, (0.96,), (0.0,)),
    "BLT 2, φ_2 = 0": BufferedToeplitz(1.0, (0.97, 0.6), (0.8, 0.0)),
    "BLT 2": BufferedToeplitz(1.0, (0.97, 0.6), (0.8, 0.2)),
    "BLT 3": BufferedToeplitz(1.0, (0.98, 0.8, 0.4), (0.9, 0.6, 0.2)),
    "BLT 2, scaled": BufferedToeplitz(1.0, (0.97, 0.6), (0.8, 0.2), (1.0,) * 64),
    "banded (4)": BandedSquareRoot(1.0, 4),
    "banded (16)": BandedSquareRoot(1.0, 16),
}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` gives, and its seconds of processor time: a busy machine adds little to them."""
    started = time.process_time()
    result = work()
    return result, time.process_time() - started


def fits(rounds: int, rounds_per_epoch: int) -> None:
    """Output noise and rms of queries over their lower bounds, and the seconds that each candidate takes."""
    workload = Workload(FixedOrder(rounds, rounds_per_epoch), 1.0, np.ones(rounds))
    for row, (optimizer, estimator) in ROWS.items():
        response, seconds = timed(lambda o=optimizer, e=estimator: compute_response(o, e.round, rounds))
        objective, bound = make_noise_cost(response, workload), least_published_noise(response, workload)
        print(f"{row}, T = {rounds}, rounds_per_epoch = {rounds_per_epoch}: its linear map in {seconds:.2f} s")
        remaining, total, all_found = undominated_candidates(objective, MOST_VECTORS), seconds, []
        while True:
            found, seconds = timed(lambda rest=remaining: next(rest, None))
            total += seconds
            if found is None:
                break
            all_found.append(found)
            published = compare_mechanism(found.mechanism, response, workload).published_noise
            print(
                f"    {found.name:22} {found.vector_count} vectors, output {published.output / bound.output:.4f}, "
                f"queries {published.queries / bound.queries:.4f}, √(J/2) {found.noise / 2**0.5:.6f}, "
                f"{seconds:.2f} s"
            )
        best = choose_candidate(all_found)
        rivals = [
            (np.sqrt(objective.evaluate(mechanism)), mechanism.label)
            for mechanism in named(rounds)
            if mechanism.memory_vectors(workload) <= MOST_VECTORS
        ]
        worst, rival = min(rivals)
        print(
            f"    auto takes {best.name} in {total:.2f} s; the best that is named, with at most {MOST_VECTORS} "
            f"vectors, is {rival} with {worst / best.noise:.4f} times its noise"
        )


def named(rounds: int) -> list[Mechanism]:
    """What a person could name, with numbers that are rules of thumb."""
    banded = [kind(1.0, bands) for kind in (BandedSquareRoot, BandedInverseSquareRoot) for bands in (1, 2, 3, 4)]
    lambdas = [LambdaCgd(1.0, (max(0.1, 1.0 - kappa / rounds),), (0.0,)) for kappa in (2.5, 12.3)]
    return [IndependentGaussian(), BinaryTree(), *banded, *lambdas]


def rounds_of_noise() -> None:
    """Milliseconds per round at d = 1e6, float32, one thread; best of three runs of 60 rounds."""
    torch.set_num_threads(1)
    fresh = torch.randn(DIMENSION)
    for name, mechanism in STREAMED.items():
        best = float("inf")
        for _ in range(3):
            state = mechanism.start()
            started = time.perf_counter()
            for t in range(1, 61):
                _, state = mechanism.noise(state, t, fresh)
            best = min(best, (time.perf_counter() - started) / 60)
        print(f"    {name:16} {1e3 * best:6.2f} ms per round, {len(state)} vectors")


def run(settings: list[str]) -> None:
    for setting in settings or ["60", "240", "600", "600,60"]:  # 60000 takes a few minutes
        rounds, _, rounds_per_epoch = setting.partition(",")
        fits(int(rounds), int(rounds_per_epoch or rounds))
    print(f"streaming, d = {DIMENSION}:")
    rounds_of_noise()


if __name__ == "__main__":
    run(sys.argv[1:])
