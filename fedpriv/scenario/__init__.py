"""Scenario files: typed, validated, swept."""

from fedpriv.scenario.load import Point, Scenario, load_scenario, resolve_cell
from fedpriv.scenario.published import Published
from fedpriv.scenario.schema import Cell

__all__ = ["Cell", "Point", "Published", "Scenario", "load_scenario", "resolve_cell"]
