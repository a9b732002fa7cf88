"""Runs by persons may be measured: what only measures trains nothing inside silos."""

from pathlib import Path
from typing import Any

import pytest

from fedpriv.loss.views import PerUnit
from fedpriv.rounds.plan import plan_of
from fedpriv.rounds.task import task_of_cell
from fedpriv.scenario.load import resolve_cell
from tests.engines.test_units import persons_tree


@pytest.mark.parametrize("run", [{"metrics": ["auc"]}, {"goldstein_radius": 0.1}, {}])
def test_scores_and_measures_are_no_coins_of_records(tmp_path: Path, run: dict[str, Any]) -> None:
    cell = resolve_cell({**persons_tree(tmp_path), "run": run}, "test")
    looked_at = plan_of(cell, task_of_cell(cell).objective).objective
    assert isinstance(looked_at, PerUnit)
    assert looked_at.records == 4
