"""Silos of one process that compute together answer as each of them alone does, bit for bit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedpriv.clients.federation import SimulatedFederation
from fedpriv.clients.silo import Silo
from fedpriv.clients.together import SimulatedSilo
from fedpriv.objectives import SoftmaxRegression
from fedpriv.scenario import Cell

MakeCell = Callable[..., Cell]
Told = list[tuple[bytes, int, int | None]]

DP_SGD = {
    "algorithm__name": "dp-sgd",
    "algorithm__diameter": None,
    "algorithm__clip": 1.0,
    "algorithm__step": 0.1,
    "privacy__rho": None,
    "privacy__mu": 4.0,
}
SEVERAL_RECORDS = {"federation__rounds": None, "federation__samples": 60, "federation__batch": 4}
FORMS: Sequence[Mapping[str, Any]] = (
    {},
    SEVERAL_RECORDS,
    {"federation__batches": (4, 2, 4)},
    {"algorithm__trust": "trusted"},
    {"algorithm__trust": "secure-aggregation"},
    {"run__dtype": "float32"},
    {
        "algorithm": {
            "name": "momentum-tree-aligned",
            "trust": "untrusted",
            "alpha": 0.2,
            "step": 0.05,
            "difference_clip": 0.5,
            "residual_clip": 0.2,
        },
        "privacy": {"relation": "replace-one", "mu": 2.0},
        "federation": {"silos": 3, "rounds": 20, "epochs": 4, "samples": 75},
    },
    {"privacy__mode": "none", "privacy__rho": None},
)


def federation(cell: Cell) -> list[Silo]:
    shared = SimulatedFederation.of(cell)
    return [shared.silo(number) for number in range(cell.federation.silos)]


def alone(silo: Silo) -> Silo:
    return Silo(silo.number, silo.plan, silo.objective, silo.records, silo.noise, silo.gaps)


def queries_of(silo: Silo, rounds: int) -> list[Tensor]:
    generator, like = torch.Generator().manual_seed(3), silo.objective.initial()
    return [torch.randn(len(like), generator=generator, dtype=like.dtype) for _ in range(rounds)]


def told(silos: Sequence[Silo], queries: Callable[[int], Sequence[Tensor]], rounds: int) -> list[Told]:
    """What each silo answers, round after round, to its own queries."""
    states, answers = [silo.start() for silo in silos], [Told() for _ in silos]
    for t in range(1, rounds + 1):
        for place, silo in enumerate(silos):
            release, states[place] = silo.answer(states[place], t, queries(silo.number)[t - 1])
            answers[place].append((release.vector.numpy().tobytes(), *release.counts))
    return answers


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which ways softmax regression was asked for increments."""
    ways: list[str] = []
    for name in ("increment", "of_each"):
        real = getattr(SoftmaxRegression, name)

        def spied(*given: Any, real: Callable[..., Any] = real, name: str = name) -> Any:
            ways.append(name)
            return real(*given)

        monkeypatch.setattr(SoftmaxRegression, name, spied)
    return ways


@pytest.mark.parametrize("form", FORMS)
def test_the_same_answers_as_alone(small_cell: MakeCell, form: Mapping[str, Any]) -> None:
    silos = federation(small_cell(**form))
    assert any(isinstance(silo, SimulatedSilo) for silo in silos)
    rounds = silos[0].plan.schedule.rounds
    queries = queries_of(silos[0], rounds)
    assert told(silos, lambda _: queries, rounds) == told([*map(alone, silos)], lambda _: queries, rounds)


def test_one_computation_a_round_serves_all(small_cell: MakeCell, computed: list[str]) -> None:
    silos = federation(small_cell(federation__silos=5))
    queries = queries_of(silos[0], 8)
    told(silos, lambda _: queries, 8)
    assert computed == ["of_each"] * 8


def test_a_server_that_asks_silos_different_things_gets_what_it_would(small_cell: MakeCell) -> None:
    silos = federation(small_cell(federation__silos=7))
    queries = [queries_of(silos[0], 8 + number)[number:] for number in range(7)]
    assert told(silos, queries.__getitem__, 8) == told([*map(alone, silos)], queries.__getitem__, 8)


def test_silos_in_different_rounds(small_cell: MakeCell) -> None:
    """Each goes through its rounds on its own, as they may in several processes."""
    silos = federation(small_cell())
    queries = queries_of(silos[0], 8)
    one_by_one = [told([silo], lambda _: queries, 8)[0] for silo in silos]
    assert one_by_one == told([*map(alone, silos)], lambda _: queries, 8)


def test_queries_that_came_in_messages_of_their_own(small_cell: MakeCell, computed: list[str]) -> None:
    """As on Ray: the same numbers elsewhere in memory are the same question, and -0 is not 0."""
    silos = federation(small_cell())
    queries = queries_of(silos[0], 2)
    computed.clear()
    told(silos, lambda _: [query.clone() for query in queries], 2)
    assert computed == ["of_each"] * 2
    zeros = torch.zeros(7850, dtype=torch.float64)
    computed.clear()
    for silo, query in zip(silos, (zeros, -zeros, zeros.clone()), strict=True):
        silo.answer(silo.start(), 1, query)
    assert computed == ["of_each"] * 2


@pytest.mark.parametrize(
    "form",
    [
        {"federation__sampling": "poisson", "federation__epochs": 2, "federation__batch": 2, **DP_SGD},
        {"run__arithmetic": "integers"},
        {"federation__silos": 1},
    ],
)
def test_who_computes_alone(small_cell: MakeCell, form: Mapping[str, Any]) -> None:
    assert not any(isinstance(silo, SimulatedSilo) for silo in federation(small_cell(**form)))


def test_an_objective_that_takes_one_batch_at_a_time_is_asked_once(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(SoftmaxRegression, "of_each", lambda *_: asked.append(1))
    silos = federation(small_cell())
    queries = queries_of(silos[0], 8)
    answers = told(silos, lambda _: queries, 8)
    assert asked == [1]
    assert answers == told([*map(alone, silos)], lambda _: queries, 8)
