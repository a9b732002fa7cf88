"""A local step of one's own: FedProx by the hook, beside a loop, and clipped as any other."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import SHARED
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.loss.views import LocalSteps, PerUnit
from fedpriv.papers.table import find_algorithm
from tests.loss.test_per_unit import softmax

STEP, STEPS, PULL, CLIENTS, RECORDS = 0.4, 6, 0.7, 5, 4


@dataclass(frozen=True)
class ProximalSteps(LocalSteps):
    pull: float = field(default=0.0, metadata=SHARED)

    def local_gradient(self, model: Tensor, start: Tensor, records: Records, weights: Tensor) -> Tensor:
        return super().local_gradient(model, start, records, weights) + self.pull * (model - start)


def clients() -> Records:
    draw, loss = torch.Generator().manual_seed(0), softmax()
    features = torch.randn(CLIENTS, RECORDS, loss.features, generator=draw, dtype=loss.initial().dtype)
    return Records(features, torch.randint(0, loss.classes, (CLIENTS, RECORDS), generator=draw))


def test_it_is_the_loop_of_the_paper() -> None:
    loss, records = softmax(), clients()
    start = 0.1 * torch.randn(
        loss.dimension, generator=torch.Generator().manual_seed(1), dtype=loss.initial().dtype
    )
    view = PerUnit(ProximalSteps(loss, STEP, STEPS, 2, PULL), RECORDS)
    total = view.increment(Query((start,)), Batch(records, torch.ones(CLIENTS, dtype=start.dtype)), 1e6).total
    expected = torch.zeros_like(start)
    for client in range(CLIENTS):
        model = start
        for k in range(STEPS):
            rows = [(2 * k + i) % RECORDS for i in range(2)]
            batch = Batch(
                Records(records.features[client, rows], records.labels[client, rows]),
                torch.full((2,), 0.5, dtype=start.dtype),
            )
            model = model - STEP * (loss.gradient(model, batch) + PULL * (model - start))
        expected = expected + (start - model)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)


def test_without_a_pull_it_is_federated_averaging() -> None:
    loss, records = softmax(), clients()
    start, weights = loss.initial() + 0.05, torch.ones(CLIENTS, dtype=loss.initial().dtype)
    totals = [
        PerUnit(view, RECORDS).increment(Query((start,)), Batch(records, weights), 0.3).total
        for view in (LocalSteps(loss, STEP, STEPS), ProximalSteps(loss, STEP, STEPS, None, 0.0))
    ]
    torch.testing.assert_close(*totals, rtol=1e-4, atol=1e-6)


def test_a_loop_of_ones_own_is_run_for_linear_scores_too() -> None:
    """Momentum within a round: a client's model leaves the span of its records' plain steps."""

    @dataclass(frozen=True)
    class Heavy(LocalSteps):
        def _train_clients(self, start: Tensor, records: Records, present: Tensor) -> Tensor:
            model, velocity = start, torch.zeros_like(start)
            for _ in range(self.steps):
                velocity = 0.9 * velocity + self.local_gradient(model, start, records, present / RECORDS)
                model = model - self.step * velocity
            return model

    loss, records = softmax(), clients()
    start = (loss.initial() + 0.05).expand(CLIENTS, -1)
    present = torch.ones(CLIENTS, RECORDS, dtype=start.dtype)
    heavy = Heavy(loss, STEP, STEPS)
    displacement = heavy.increment(Query((start,)), Batch(records, present), 1.0).total
    torch.testing.assert_close(displacement, start - heavy._train_clients(start, records, present))


def test_a_step_that_leads_anywhere_is_clipped_as_a_whole() -> None:
    @dataclass(frozen=True)
    class Wild(LocalSteps):
        def local_gradient(self, model: Tensor, start: Tensor, records: Records, weights: Tensor) -> Tensor:
            return 1e9 * torch.ones_like(model) + 1e9 * records.features.sum((-2, -1)).unsqueeze(-1)

    loss = softmax()
    view = PerUnit(Wild(loss, STEP, STEPS), RECORDS)
    weights = torch.ones(CLIENTS, dtype=loss.initial().dtype)
    vectors = view.per_record(Query((loss.initial(),)), Batch(clients(), weights), torch.arange(CLIENTS), 0.25)
    assert float(vectors.norm(dim=-1).max()) <= 0.25


def test_a_client_whose_records_are_all_absent_adds_zeros_whatever_its_steps_are() -> None:
    """A decay of weights moves a model without records, too: present and absent were up to two clips apart."""

    @dataclass(frozen=True)
    class DecayingSteps(LocalSteps):
        def local_gradient(self, model: Tensor, start: Tensor, records: Records, weights: Tensor) -> Tensor:
            return super().local_gradient(model, start, records, weights) + 0.1 * model

    loss, records = softmax(), clients()
    absent = Records(records.features, torch.full_like(records.labels, -1))
    start, weights = loss.initial() + 1.0, torch.ones(CLIENTS, dtype=loss.initial().dtype)
    view = PerUnit(DecayingSteps(loss, STEP, STEPS), RECORDS)
    query = Query((start,))
    assert float(view.increment(query, Batch(records, weights), 0.25).total.norm()) > 0.0
    assert not view.increment(query, Batch(absent, weights), 0.25).total.any()
    assert not view.per_record(query, Batch(absent, weights), torch.arange(CLIENTS), 0.25).any()


@pytest.mark.parametrize(
    ("name", "words"),
    [("scaffold", "state from round to round"), ("fedprox", "adding-an-algorithm")],
)
def test_algorithms_that_are_not_here_are_answered_with_a_reason(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        find_algorithm(name)
