"""Golden runs of the two momentum algorithms: the oracle against the numbers, fedpriv against the oracle."""

import numpy as np
import pytest

from tests.oracle_momentum import (
    GOLDEN_ALPHA,
    GOLDEN_MIXING,
    GOLDEN_PLACES,
    GOLDEN_ROUNDS,
    GOLDEN_START,
    GOLDEN_STDS,
    GOLDEN_STEP,
    Step,
    golden_gradient,
    golden_noise,
    reduced_run,
    tree_run,
)

TREE = {
    1: (0.068613147121, 0.057735972479, 0.110686696361, 0.030907326579, 0.903684429796, -0.526894440622),
    7: (0.114467022682, -0.028398638570, 0.086020189033, -0.071676210017, 0.361139866827, -0.361508731018),
    13: (0.017290618169, -0.067429108050, 0.000107606213, -0.044093803241, -0.053048885985, -0.117021018899),
}
REDUCED = {
    1: (0.068613147121, 0.057735972479, 0.055072957598, 0.072139487770, 0.939319343247, -0.579484953897),
    7: (0.117172754636, -0.038511428541, 0.126771405325, -0.016179723973, 0.389523132869, -0.530251913420),
    10: (0.119097589776, -0.091119229627, 0.127673966663, -0.111110304189, 0.156723361295, -0.342845516142),
    13: (0.032670438303, -0.067763643660, 0.043314216257, -0.069804732554, -0.028601839959, -0.116641004326),
}


def golden_tree_run() -> list[Step]:
    return tree_run(
        GOLDEN_START, golden_gradient, golden_noise, GOLDEN_ROUNDS, GOLDEN_ALPHA, GOLDEN_STEP, std=0.05
    )


def golden_reduced_run() -> list[Step]:
    return reduced_run(
        GOLDEN_START,
        golden_gradient,
        golden_noise,
        GOLDEN_ROUNDS,
        GOLDEN_PLACES,
        GOLDEN_ALPHA,
        GOLDEN_MIXING,
        GOLDEN_STEP,
        GOLDEN_STDS,
    )


@pytest.mark.parametrize("t", TREE)
def test_the_oracle_of_algorithm_1_gives_the_golden_run(t: int) -> None:
    np.testing.assert_allclose(np.concatenate(golden_tree_run()[t - 1]), TREE[t], atol=1e-11)


@pytest.mark.parametrize("t", REDUCED)
def test_the_oracle_of_algorithm_2_gives_the_golden_run(t: int) -> None:
    np.testing.assert_allclose(np.concatenate(golden_reduced_run()[t - 1]), REDUCED[t], atol=1e-11)
