"""Declared dependence: what a part says its increments depend on, and who refuses more."""

import dataclasses
from typing import Any

import pytest
import torch

from fedpriv.core.errors import InputError
from fedpriv.loss.goldstein import RandomSmoothing, SeededDirections
from fedpriv.loss.linear import LogisticRegression
from fedpriv.loss.objective import EvaluationView, Objective, RecordView, View
from fedpriv.loss.views import LocalSteps, LocalTraining, PerUnit, QuantileClip
from fedpriv.noise.trust import CLIENT, RECORD, USER
from fedpriv.participation.orders import (
    OWN_FACTS,
    PUBLIC_ORDER_FACTS,
    UNDECLARED,
    Dependence,
    check_dependence,
    declared_dependence,
)
from fedpriv.participation.registry import PARTICIPATIONS

BASE = LogisticRegression(3, 1.0, dtype=torch.float64)


def smoothed(base: Objective) -> RandomSmoothing:
    return RandomSmoothing(base, 0.1, "first", 1, 1, True, SeededDirections((1,)))


class Silent(View):
    """A view that declares nothing."""


def test_guarantee_an_undeclared_dependence_counts_as_every_dependence() -> None:
    assert declared_dependence(object()) == UNDECLARED
    assert declared_dependence(Silent(BASE)) == Silent(BASE).dependence == UNDECLARED
    assert declared_dependence(dataclasses.make_dataclass("Odd", [("dependence", str)])("record")) == UNDECLARED
    with pytest.raises(InputError, match=r"^a sampling does not go with Silent, .* does not declare"):
        check_dependence(Silent(BASE), PUBLIC_ORDER_FACTS, "a sampling")


def test_guarantee_an_objective_wrapper_declares_its_dependence_together_with_the_inner_objective() -> None:
    assert declared_dependence(BASE) == Dependence.RECORD
    for kind in (RecordView, EvaluationView):
        assert declared_dependence(kind(BASE)) == Dependence.RECORD
        assert declared_dependence(kind(Silent(BASE))) == UNDECLARED
    assert declared_dependence(smoothed(BASE)) == OWN_FACTS
    assert declared_dependence(PerUnit(smoothed(BASE), 3)) == OWN_FACTS
    steps = QuantileClip(LocalSteps(BASE, 0.1, 2), 0.1, 1.0)
    assert Dependence.BATCH in declared_dependence(steps)
    assert declared_dependence(PerUnit(steps, 3)) == Dependence.RECORD
    assert Dependence.UNKNOWN in declared_dependence(PerUnit(Silent(BASE), 3))
    assert Dependence.POSITION in declared_dependence(LocalTraining(BASE, 0.1, 2, 1))


@dataclasses.dataclass(frozen=True)
class Sure(View):
    """A view that declares its own part alone, over whatever its base is."""

    dependence = OWN_FACTS


class Positioned(View):
    dependence = OWN_FACTS | Dependence.POSITION


@pytest.mark.parametrize("inner", [Silent, Positioned])
def test_guarantee_no_wrapper_hides_undeclared_or_position_dependence_of_its_inner_objective(
    inner: type[View],
) -> None:
    """Gains: a part that is keyed by who else is drawn, inside of one that says it is keyed by rows."""
    assert declared_dependence(Sure(BASE)) == OWN_FACTS
    hidden = smoothed(inner(BASE))
    for part in (Sure(inner(BASE)), Sure(EvaluationView(inner(BASE))), PerUnit(hidden, 2)):
        with pytest.raises(InputError, match=f"^a sampling does not go with {inner.__name__}, "):
            check_dependence(part, OWN_FACTS, "a sampling")
    assert not any(fact & OWN_FACTS for fact in (Dependence.POSITION, Dependence.BATCH, Dependence.UNKNOWN))


def test_a_base_that_is_no_objective_is_not_named_as_the_cause() -> None:
    part = dataclasses.make_dataclass("Logarithm", [("base", float)])(2.0)
    with pytest.raises(InputError, match=r"^a sampling does not go with Logarithm, "):
        check_dependence(part, OWN_FACTS, "a sampling")


def test_every_participation_declares_the_dependence_that_it_allows() -> None:
    for kind in PARTICIPATIONS.values():
        assert kind.allowed_dependence == (OWN_FACTS if kind.secret else PUBLIC_ORDER_FACTS)
    assert all(Dependence.BATCH not in kind.allowed_dependence for kind in PARTICIPATIONS.values())


@pytest.mark.parametrize("unit", [USER, CLIENT])
def test_person_and_client_units_refuse_objectives_that_depend_on_the_row_index(unit: Any) -> None:
    assert RECORD.allowed_dependence == UNDECLARED
    with pytest.raises(InputError, match=r"depends on its row in the silo, the round, the silo"):
        check_dependence(smoothed(BASE), unit.allowed_dependence, "privacy.unit")
    check_dependence(LocalSteps(BASE, 0.1, 2), unit.allowed_dependence, "privacy.unit")
