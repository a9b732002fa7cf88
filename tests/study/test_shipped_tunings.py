"""The tuning files of the shipped tables: `fedpriv tune` takes them, and every row gets as many settings."""

from pathlib import Path

import pytest

from fedpriv.cli.options import TuneRequest
from fedpriv.cli.tune import with_file
from fedpriv.scenario.load import load_scenario
from fedpriv.study.tuning_file import rows_of, settings_of

TUNINGS = sorted((Path(__file__).resolve().parents[2] / "scenarios" / "tuning").glob("*.toml"))


@pytest.mark.parametrize("path", TUNINGS, ids=lambda path: path.stem)
def test_every_row_of_the_table_gets_the_same_number_of_settings(path: Path) -> None:
    """Every value of the axis has a grid, no grid is for a row that is not there, and seeds are fresh."""
    asked, grids = with_file(TuneRequest(path))
    scenario = load_scenario(asked.scenario)
    assert grids.of_value is not None
    assert not set(asked.seeds or []) & set(scenario.seeds)
    rows = rows_of(scenario, grids.of_value, grids.axis)
    assert len(rows) == len(scenario.points) / len(scenario.seeds)
    assert {len(settings_of(grid)) for _, _, grid in rows} == {len(settings_of(rows[0][2]))}
    values = scenario.axes.get(grids.axis)
    assert values is None or set(values) == set(grids.of_value)
