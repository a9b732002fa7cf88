"""The least noise in an algorithm's output: in a fixed order, and by random allocation of records to rounds.

Of every algorithm, number of rounds and passes and budget below, clip 1, zero-out: the standard deviation in what
is published, for steps of 1, as `fedpriv privacy compare --algorithm` has it.  lambda-CGD has the lambda of a grid
that steps to neighbours lead to; by allocation numbers of groups that divide the rounds of a pass are tried,
banded noise with as many bands.

    python -m benchmarks.secret_noise        fourteen minutes of one core
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from fedpriv.accounting.gaussian import mu_of
from fedpriv.noise.fitting.cost import NoiseResponse, output_variances
from fedpriv.noise.registry import MechanismOptions
from fedpriv.noise.series import Workload
from fedpriv.papers.base import NoiseSettings
from fedpriv.papers.table import find_algorithm
from fedpriv.participation.orders import FixedOrder
from fedpriv.plan.calibration import response_and_workload
from fedpriv.study.setting import AccountingSetting

_ONE_PASS = ((60, 1, 1.1318), (60, 1, 4.3772), (240, 1, 1.1318), (240, 1, 4.3772))
"""Rounds, passes and ε."""
_FOUR_PASSES = ((240, 4, 1.1318), (240, 4, 4.3772))
ROWS = {
    "Accelerated-DP-SRGD": ("accelerated-dp-srgd", {"radius": 1.0, "clip": 1.0, "beta": 1.0}, _ONE_PASS),
    "heavy ball 0.9": (
        "dp-ftrl",
        {"radius": 1.0, "clip": 1.0, "step": 1.0, "momentum": 0.9},
        _ONE_PASS + _FOUR_PASSES,
    ),
}
_COLUMNS = (("lambda-cgd", "fixed"), ("banded", "allocation"), ("lambda-cgd", "allocation"))
_LAMBDAS = (0.8, 0.85, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99)
_DELTA = 1e-5
_MOST = 20
"""Rounds of a group for lambda-CGD: more take minutes to account for, and save a hundredth or two."""


class Found(NamedTuple):
    """A standard deviation in the output, and what it was found with."""

    std: float
    groups: int | None
    theta: float | None

    def __str__(self) -> str:
        numbers = [f"{number:g}" for number in (self.groups, self.theta) if number is not None]
        return f"{self.std:.3g} ({'; '.join(numbers)})"


def found(
    name: str, sampling: str, response: NoiseResponse, workload: Workload, passes: int, epsilon: float
) -> Iterator[Found]:
    """The least standard deviation for each number of groups, the most groups first."""
    rounds, output, secret, theta = workload.rounds, response.output, sampling == "allocation", _LAMBDAS[0]
    assert output is not None
    epoch = rounds // passes
    for groups in range(epoch, 0, -1) if secret else (1,):
        if epoch % groups or (secret and name == "lambda-cgd" and epoch // groups > _MOST):
            continue
        setting = AccountingSetting(
            rounds, workload.decay, relation="zero-out", epochs=passes, sampling=sampling, groups=groups
        )

        def at(options: MechanismOptions, setting: AccountingSetting = setting) -> float:
            mechanism = setting.make_mechanism(name, options)
            fresh = setting.cost_at_mu(mechanism, mu_of(epsilon, _DELTA), _DELTA).std
            return fresh * math.sqrt(float(output_variances(mechanism, output[None], workload)[0]))

        told = groups if secret else None
        if name != "lambda-cgd":
            yield Found(at(MechanismOptions(bands=groups)), told, None)
            continue
        std, theta = _downhill(lambda theta, at=at: at(MechanismOptions(theta=(theta,))), theta)
        yield Found(std, told, theta)


def _downhill(std: Callable[[float], float], theta: float) -> tuple[float, float]:
    """The least `std` that steps to neighbouring lambdas lead to, and its lambda."""
    known = cache(std)
    while True:
        place = _LAMBDAS.index(theta)
        near = _LAMBDAS[max(0, place - 1) : place + 2]
        best = min(near, key=known)
        if best == theta:
            return known(theta), theta
        theta = best


def run() -> None:
    print("| | fixed order, λ-CGD (λ) | allocation, banded (groups) | allocation, λ-CGD (groups; λ) |")
    print("|---|---|---|---|")
    for title, (name, settings, runs) in ROWS.items():
        row = find_algorithm(name)
        own = row.settings.model_validate(settings)
        assert isinstance(own, NoiseSettings)
        for rounds, passes, epsilon in runs:
            asked = response_and_workload(row, own, FixedOrder(rounds, rounds // passes))
            least = [min(found(*column, *asked, passes, epsilon)) for column in _COLUMNS]
            of = f"T = {rounds}{f' in {passes} passes' * (passes > 1)}, ε {epsilon:.2f}"
            print(f"| {title}, {of} | {' | '.join(map(str, least))} |", flush=True)


if __name__ == "__main__":
    run()
