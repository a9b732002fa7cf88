"""Scenario files: typed, validated and swept.

`load_scenario` reads a scenario file, `resolve_cell` makes one cell of plain data, and `Cell` is a run
with every key resolved.

Imports: rooms from `papers` down.
"""

from fedpriv.scenario.load import Scenario, SweepPoint, load_scenario, resolve_cell
from fedpriv.scenario.published import PublishedValues
from fedpriv.scenario.schema import Cell

__all__ = ["Cell", "PublishedValues", "Scenario", "SweepPoint", "load_scenario", "resolve_cell"]
