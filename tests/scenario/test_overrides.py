"""Overrides: narrowing, new axes, privacy targets that replace each other, values given twice."""

from typing import Any

import pytest

from fedpriv.core.errors import InputError
from fedpriv.scenario.load import scenario_of
from tests.conftest import small_tree


def swept() -> dict[str, Any]:
    return {
        **small_tree(privacy__rho=None),
        "sweep": {"privacy.rho": [4.0, 8.0], "federation.silos": [3, 5]},
        "paper": {"rows": "privacy.rho", "columns": "federation.silos", "test_loss": [[2.1, 2.2], [2.3, 2.4]]},
    }


def test_a_list_for_a_key_that_was_not_swept_becomes_an_axis() -> None:
    scenario = scenario_of(small_tree(), "test", ["federation.rounds=[4, 8]"])
    assert [point.cell.federation.rounds for point in scenario.points] == [4, 8]
    assert scenario.axes == {"federation.rounds": [4, 8]}


def test_published_values_are_not_shown_for_a_new_axis_with_other_values() -> None:
    same = scenario_of(swept(), "test", ["federation.rounds=[8]"])
    other = scenario_of(swept(), "test", ["federation.rounds=[8, 4]"])
    assert same.published is not None
    assert same.published.value("test_loss", {"privacy.rho": 4.0, "federation.silos": 5}) == 2.2
    assert other.published is not None
    assert other.published.value("test_loss", {"privacy.rho": 4.0, "federation.silos": 5}) is None
    assert other.published.withheld == ["federation.rounds"]


@pytest.mark.parametrize("override", ["privacy.mu=1.0", "privacy.zcdp=0.5"])
def test_a_privacy_target_replaces_the_one_of_the_file(override: str) -> None:
    (point,) = scenario_of(small_tree(), "test", [override]).points
    assert point.cell.privacy.target == pytest.approx(1.0)
    assert point.cell.privacy.rho is None


def test_a_privacy_target_replaces_a_swept_one() -> None:
    scenario = scenario_of(swept(), "test", ["privacy.epsilon=[1.0, 2.0]"])
    assert list(scenario.axes) == ["federation.silos", "privacy.epsilon"]
    assert {point.cell.privacy.rho for point in scenario.points} == {None}
    assert [point.cell.privacy.epsilon for point in scenario.points] == [1.0, 2.0, 1.0, 2.0]
    assert scenario.published is None


@pytest.mark.parametrize("tree", [small_tree(), swept()])
def test_noise_can_be_switched_off(tree: dict[str, Any]) -> None:
    points = scenario_of(tree, "test", ["privacy.mode=none"]).points
    assert {point.cell.privacy.target for point in points} == {None}


def test_two_targets_at_a_time_are_refused() -> None:
    with pytest.raises(InputError, match="exactly one of mu, rho, zcdp and epsilon; given: mu, zcdp"):
        scenario_of(small_tree(), "test", ["privacy.mu=1.0", "privacy.zcdp=1.0"])


def test_a_value_given_twice_is_one_cell() -> None:
    tree = {**small_tree(), "sweep": {"federation.silos": [3, 3, 5]}}
    assert len(scenario_of(tree, "test").points) == 2
    assert len(scenario_of(tree, "test", ["federation.silos=[5, 5]"]).points) == 1


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(InputError, match="expected at least one value to sweep"):
        scenario_of(small_tree(), "test", ["federation.silos=[]"])
