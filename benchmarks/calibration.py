"""How long the accountants of secret participation take: python -m benchmarks.calibration

Processor time on one core, for one (ε, δ = 1e-5) from nothing to a certified noise multiplier, and for one charge
(μ, 1e-8) of a lifetime budget.
"""

import time
from collections.abc import Callable

from fedpriv.accounting import allocation, poisson
from fedpriv.accounting import gaussian as gdp

DELTA, SLACK = 1e-5, 1e-8
EPSILONS = (gdp.epsilon_of(0.3, DELTA), gdp.epsilon_of(1.0, DELTA))

Guarantee = allocation.AllocatedGaussian | poisson.PoissonGaussian


def cases() -> list[tuple[str, Callable[[float], Guarantee]]]:
    return [
        ("allocation, 60 rounds", lambda e: allocation.calibrate(e, DELTA, 60)),
        ("allocation, 600 rounds", lambda e: allocation.calibrate(e, DELTA, 600)),
        ("allocation, 60 rounds, 10 epochs", lambda e: allocation.calibrate(e, DELTA, 60, 10)),
        ("allocation, 120 rounds, 8 epochs", lambda e: allocation.calibrate(e, DELTA, 120, 8)),
        ("allocation, 60 rounds, replace-one", lambda e: allocation.calibrate(e, DELTA, 60, 1, "replace-one")),
        ("Poisson 1/60, 60 rounds", lambda e: poisson.calibrate(e, DELTA, 1 / 60, 60)),
        ("Poisson 0.01, 1000 rounds", lambda e: poisson.calibrate(e, DELTA, 0.01, 1000)),
        (
            "Poisson 1/60, 60 rounds, replace-one",
            lambda e: poisson.calibrate(e, DELTA, 1 / 60, 60, "replace-one"),
        ),
    ]


def run() -> None:
    print("| run | ε | z | calibration, s | μ at δ₀ = 1e-8 | charge, s |\n|---|---|---|---|---|---|")
    poisson.calibrate(1.0, DELTA, 0.5, 2)  # warms up
    for name, calibrate in cases():
        for epsilon in EPSILONS:
            start = time.process_time()
            mechanism = calibrate(epsilon)
            calibrated = time.process_time()
            charge = mechanism.charge(SLACK)
            charged = time.process_time()
            print(
                f"| {name} | {epsilon:.4f} | {mechanism.noise_multiplier:.4f} | {calibrated - start:.2f} "
                f"| {charge.mu:.4f} | {charged - calibrated:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    run()
