"""How slopes come to the calls of known functions: each as autograd reaches it, or not at all."""

import pytest
import torch
from torch import nn

from fedpriv.loss.functions import long_upper_norm
from fedpriv.loss.ghost import GhostObjective
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.objective import Batch, Query, Records
from tests.loss.test_ghost import F32, F64, RECORDS, Of, by_autograd, closed, objective, sample


def test_a_call_that_autograd_does_not_come_to_is_told_as_such() -> None:
    """Behind a leaf of the module's own nothing is asked for, so that no slope arrives there."""
    leaf = torch.zeros(12, dtype=F64, requires_grad=True)
    net = Of(
        lambda own, x: own.one(x) + own.two(x + leaf),
        one=nn.Linear(12, 3),
        two=nn.Linear(12, 3),
    ).double()
    measured = GhostObjective(net, CrossEntropy(), 0, F64)
    at, records = sample(measured.dimension, 2)
    query, weights = Query(at, (2.0, -1.0)), torch.ones(RECORDS, dtype=F64)
    for asked in (query, Query(at[:1])):
        found = measured.increment(asked, Batch(records, weights), 1e9).total
        torch.testing.assert_close(found, by_autograd(net, asked, records).sum(0))


def test_what_is_seen_is_kept_only_where_another_use_or_point_may_need_it() -> None:
    measured = objective("conv2d")
    (at, other), records = sample(measured.dimension, 2)
    one = measured._run_pass(at, records, 1.0, frozenset(), is_only_point=True)
    assert not one.call_gradients
    assert one.terms.keys() == measured.shapes.keys()
    assert len(measured._run_pass(other, records, 1.0, frozenset(), is_only_point=False).call_gradients) == 4
    twice = objective("used twice")
    (at,), records = sample(twice.dimension, 1)
    both = twice._run_pass(at, records, 1.0, frozenset(), is_only_point=True)
    assert [told.call.parameter_names[0] for told in both.call_gradients] == ["one.weight", "one.weight"]
    assert both.terms.keys() == {"out.weight", "out.bias"}


@pytest.mark.parametrize("count", [1, 127, 128, 129, 256, 1000, 1025])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_the_norm_of_a_long_gradient_has_all_of_it(count: int, dtype: torch.dtype) -> None:
    """Wherever its values lie, and never too small."""
    for place in {0, count // 2, count - 1}:
        vector = torch.zeros(2, count, dtype=dtype)
        vector[1, place] = -3.0
        assert 3.0 <= float(long_upper_norm(vector)[1]) <= 3.0 * (1.0 + 1e-5)
    vector = torch.rand(3, count, generator=torch.Generator().manual_seed(count), dtype=F64).to(dtype)
    exact = vector.double().norm(dim=1)
    assert bool((long_upper_norm(vector) >= exact).all())
    torch.testing.assert_close(long_upper_norm(vector), exact, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_attention_of_a_batch_takes_records_apart(wrong: float, dtype: torch.dtype) -> None:
    """What one record leaves in the kernel's memory reaches no other, wherever it stands."""
    measured = objective("attention", dtype)
    (at,), records = sample(measured.dimension, 1, dtype)
    for place in range(RECORDS):
        weights = torch.ones(RECORDS, dtype=F64)
        weights[place] = 0.0
        without = closed(measured, Query([at]), Batch(records, weights), 1.0).total
        hostile = Records(records.features.clone(), records.labels)
        hostile.features[place] = wrong
        torch.testing.assert_close(
            closed(measured, Query([at]), Batch(hostile, weights), 1.0).total, without, rtol=1e-6, atol=1e-7
        )
