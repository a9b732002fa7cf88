"""The linear map of every row against closed forms, and against its own optimizer run forwards on unit vectors."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedpriv.noise.buffered import BufferedToeplitz
from fedpriv.noise.differences import AlignedDifferences
from fedpriv.noise.fitting import cost
from fedpriv.noise.fitting.cost import NoiseStream, apply_adjoint, rows_response
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Floats
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from tests.noise.matrices import streamed_matrix
from tests.noise.rows import ROWS, response


def weights(rounds: int, power: int) -> tuple[Floats, Floats]:
    alpha = np.arange(1, rounds + 1, dtype=np.float64) ** power
    return alpha, np.cumsum(alpha)


def anytime(rounds: int, power: int = 1) -> Floats:
    _, total = weights(rounds, power)
    return 1 - total / total[-1]


def nesterov(rounds: int) -> Floats:
    alpha, total = weights(rounds, 1)
    at_query = 1 + total / total[-1] * (1 / alpha - 1)
    return np.append(at_query[:-1], 1 / alpha[-1])


def momentum_average(rounds: int, momentum: float) -> Floats:
    s = np.arange(1, rounds + 1)
    reached = [np.where(s <= t, (1 - momentum ** (t - s + 1.0)) / (1 - momentum), 0.0) for t in s]
    return np.mean(reached, axis=0)


CLOSED: dict[str, Callable[[int], Floats]] = {
    "dp-mu2-fl": anytime,
    "online-to-batch": lambda rounds: anytime(rounds, 2),
    "accelerated": nesterov,
    "unaccelerated": lambda rounds: 1 / weights(rounds, 1)[0],
    "unaccelerated, average": lambda rounds: np.arange(rounds, 0, -1) / rounds / weights(rounds, 1)[0],
    "dp-ftrl": lambda rounds: np.eye(rounds)[-1],
    "dp-ftrl, momentum": lambda rounds: 0.9 ** np.arange(rounds - 1.0, -1, -1),
    "dp-sgd": np.ones,
    "dp-sgd, momentum": lambda rounds: (1 - 0.8 ** np.arange(rounds, 0.0, -1)) / 0.2,
    "dp-sgd, average": lambda rounds: momentum_average(rounds, 0.8),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("rounds", [1, 2, 3, 17])
def test_output_response_of_every_optimizer_matches_its_closed_form(row: str, rounds: int) -> None:
    np.testing.assert_allclose(-response(row, rounds).output, CLOSED[row](rounds), atol=1e-14)


@pytest.mark.parametrize("row", ROWS)
def test_noise_response_matches_the_optimizer_run_on_unit_vectors(row: str) -> None:
    """Forwards, with the projection active nowhere: columns of the map, from inputs that are unit vectors."""
    rounds = 9
    optimizer, estimator = ROWS[row]
    state = optimizer.start(torch.full((rounds + 1, 1), 0.1, dtype=torch.float64))
    points = []
    for t in range(1, rounds + 1):
        given = torch.zeros((rounds + 1, 1), dtype=torch.float64)
        given[t - 1] = 1e-6  # the last of all is left at 0, to be subtracted
        state = optimizer.update(state, given, estimator.round(t))
        points.append(optimizer.query(state))
    published = torch.stack([*points[:-1], optimizer.output(state)])[..., 0].numpy()
    columns = (published[:, :-1] - published[:, -1:]) / 1e-6
    found = response(row, rounds, queries=rounds)
    np.testing.assert_allclose(found.output, columns[-1], atol=1e-8)
    np.testing.assert_allclose(found.queries, columns[: len(found.queries)], atol=1e-8)


def test_output_that_is_also_a_query_counts_once() -> None:
    """DP-μ²-FL's output is x_T, which was asked at; the others publish a point of their own."""
    assert len(response("dp-mu2-fl", 12).queries) == 11
    assert len(response("accelerated", 12).queries) == 12


@pytest.mark.parametrize("row", ["accelerated", "dp-ftrl, momentum"])
def test_computing_the_noise_response_in_segments_does_not_change_its_values(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = response(row, 23)
    monkeypatch.setattr(cost, "_SEGMENT_ROUNDS", 4)
    in_parts = response(row, 23)
    np.testing.assert_allclose(in_parts.output, whole.output, atol=1e-14)
    np.testing.assert_allclose(in_parts.queries, whole.queries, atol=1e-14)


def test_queries_are_spaced_evenly_and_few_beyond_6000_rounds() -> None:
    few, every = response("dp-ftrl", 600, queries=4), response("dp-ftrl", 600, queries=600)
    np.testing.assert_allclose(few.queries, every.queries[[0, 200, 399, 599]], atol=1e-15)
    assert len(response("dp-ftrl", 600).queries) == 64
    assert len(rows_response(6001).queries) == 16


def test_response_of_the_rows_is_the_identity_without_an_output() -> None:
    found = rows_response(5)
    assert found.output is None
    np.testing.assert_array_equal(found.queries, np.eye(5))


@pytest.mark.parametrize(
    "mechanism",
    [
        BinaryTree(0.9),
        BandedSquareRoot(0.9, 3),
        BufferedToeplitz(0.9, (0.8,), (0.0,)),
        BufferedToeplitz(0.9, (0.8, 0.5), (0.7, 0.1), tuple(1.0 + 0.1 * t for t in range(13))),
    ],
    ids=lambda mechanism: type(mechanism).__name__,
)
def test_adjoint_rows_of_a_mechanism_match_its_streamed_noise(
    mechanism: Mechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "_SEGMENT_ROUNDS", 5)
    weights = np.random.default_rng(0).normal(size=(3, 13))
    expected = weights @ streamed_matrix(mechanism, 13)
    np.testing.assert_allclose(apply_adjoint(NoiseStream(mechanism), weights), expected, atol=1e-13)


def test_adjoint_rows_are_refused_for_several_fresh_vectors_per_round() -> None:
    with pytest.raises(ValueError, match="several fresh vectors"):
        NoiseStream(AlignedDifferences(4, 0.1, 1.0, 1.0, None, decay=0.9))
