"""Phase retrieval: increments that are not finite, and the hidden vector of its data."""

import numpy as np
import pytest
import torch

from fedpriv.data.synthetic import phase_retrieval
from fedpriv.loss.linear import PhaseRetrieval
from fedpriv.loss.objective import Batch, Query, Records


def test_an_increment_that_is_not_finite_adds_nothing_and_counts_as_clipped() -> None:
    objective = PhaseRetrieval(2, 2, feature_norm=1.0, dtype=torch.float64)
    records = Records(torch.eye(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    far = torch.tensor([1e200, 1.5], dtype=torch.float64)
    found = objective.increment(
        Query([far, far], [1e200, -1e200]), Batch(records, torch.ones(2, dtype=torch.float64)), 1.0
    )
    assert torch.isfinite(found.total).all()
    assert float(found.total.norm()) <= 2.0
    assert int(found.clipped) >= 1


@pytest.mark.parametrize("power", [1, 2])
def test_the_loss_is_zero_at_the_hidden_vector_but_for_outliers(power: int) -> None:
    measurements, sizes, _, _ = phase_retrieval(4000, 10, dimension=8, outliers=0.0, seed=3)
    generous, wrong, _, _ = phase_retrieval(4000, 10, dimension=8, outliers=0.1, seed=3)
    assert np.allclose(np.linalg.norm(measurements, axis=1), 1.0)
    assert np.array_equal(measurements, generous)
    assert 0.07 < np.mean(wrong != sizes) < 0.13
    outer = np.einsum("ni,nj,n->ij", measurements, measurements, sizes**2)
    hidden = np.linalg.eigh(outer)[1][:, -1] * np.sqrt(8)  # the spectral estimate points along the hidden vector
    objective = PhaseRetrieval(8, power, feature_norm=1.0, dtype=torch.float64)  # type: ignore[arg-type]
    records = Records(torch.from_numpy(measurements), torch.from_numpy(sizes))
    near = objective.evaluate(torch.from_numpy(hidden), records)
    assert float(near.loss) < 0.2 * float(objective.evaluate(objective.initial(), records).loss)
    again, _, _, _ = phase_retrieval(4000, 10, dimension=8, outliers=0.0, seed=3)
    other, _, _, _ = phase_retrieval(4000, 10, dimension=8, outliers=0.0, seed=4)
    assert np.array_equal(again, measurements)
    assert not np.array_equal(other, measurements)
