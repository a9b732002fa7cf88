"""A server's sum of the silos' messages: weighted by the silos, in pieces, on a grid, and of one shape."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedpriv.core.errors import RunError
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.rounds import floats
from fedpriv.rounds.floats import FloatSteps
from fedpriv.rounds.integers import add_exact_sums
from fedpriv.scenario.schema import Cell

MakeCell = Callable[..., Cell]


@pytest.mark.parametrize("chunk", [2**16, 1000, 4])
@pytest.mark.parametrize("trust", ["untrusted", "secure-aggregation"])
def test_the_server_mean_has_the_weights_of_the_silos_for_every_chunk_size(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str, chunk: int
) -> None:
    monkeypatch.setattr(floats, "_CHUNK", chunk)
    cell = small_cell(algorithm__trust=trust, federation={"silos": 3, "rounds": 8, "batches": [2, 3, 5]})
    plan = make_plan(cell, load_task(cell).objective)
    steps, length = FloatSteps(plan), 4003
    releases = list(torch.from_numpy(np.random.default_rng(2).standard_normal((3, length))))
    mask = np.zeros(length, np.uint64)
    messages = [
        steps.encode_masked(release, 1, party, mask) if plan.masked else release
        for party, release in enumerate(releases)
    ]
    expected = 0.2 * releases[0] + 0.3 * releases[1] + 0.5 * releases[2]
    atol = 1e-12 if plan.grid is None else 3.0 * plan.grid.unit
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as torch's, of a piece that is written where it does not fit
        mean = steps.aggregate(messages, 1)
    torch.testing.assert_close(mean, expected, rtol=0.0, atol=atol)


def test_the_silo_whose_sums_have_another_shape_than_silo_0_is_named() -> None:
    sums = [np.zeros(3, np.int64), np.zeros(2, np.int64)]
    with pytest.raises(RunError, match=r"silo 1: its sums have shape \(2,\) and type int64, expected \(3,\)"):
        add_exact_sums(sums, [5, 5])
