"""What a run that is resumed must have in common with the one that its folder holds, and the seeds added to it.

A cell keeps its number, and so the name of its model: cells of added seeds are numbered after all others.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError, printable
from fedpriv.scenario import Cell, Scenario

_REMEDY = "give another --out, or the scenario and --set options it was started with; only seeds can be added"


def refusal(folder: Path, what: str) -> InputError:
    """The line for a folder whose run is not the one that is asked for; `what` differs."""
    return InputError(f"{folder} holds another run: {printable(what)}; {_REMEDY}")


def starts_of(folder: Path, before: Sequence[Sequence[int]], asked: Sequence[int]) -> list[list[int]]:
    """The seeds of every start of the run in `folder`: those of `before`, then those that are added now, if any.

    InputError where a seed of the run is not among those `asked` for.
    """
    known = [seed for start in before for seed in start]
    if gone := [seed for seed in known if seed not in asked]:
        raise refusal(folder, f"its seeds are {_listed(known)}, and this scenario has no seed {_listed(gone)}")
    added = [seed for seed in asked if seed not in known]
    return [*map(list, before), *([added] if added else [])]


def in_starts(scenario: Scenario, starts: Sequence[Sequence[int]]) -> Scenario:
    """The scenario with its seeds and points in the order of the starts; every start has all sweep points."""
    count = len(scenario.seeds)
    blocks = [scenario.points[first : first + count] for first in range(0, len(scenario.points), count)]
    by_seed = [{point.cell.seed: point for point in block} for block in blocks]
    points = [found[seed] for start in starts for found in by_seed for seed in start]
    return dataclasses.replace(scenario, seeds=[seed for start in starts for seed in start], points=points)


def places_of(scenario: Scenario, starts: Sequence[Sequence[int]]) -> list[range]:
    """Which places of a scenario, ordered by its starts, each start has."""
    blocks, first, found = len(scenario.points) // len(scenario.seeds), 0, list[range]()
    for start in starts:
        found.append(range(first, first + blocks * len(start)))
        first = found[-1].stop
    return found


def check_axes(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """InputError where the swept keys, their order or their values are not those of the run in `folder`."""
    if list(then.items()) == list(now.items()):
        return
    raise refusal(folder, f"its sweep differs from this scenario's: {difference(then, now) or 'in its order'}")


def check_cell(folder: Path, place: int, then: Cell, scenario: Scenario) -> None:
    """InputError where the finished cell at `place` is not the scenario's."""
    if place >= len(scenario.points):
        what = f"this scenario has {len(scenario.points)} cells"
    else:
        what = difference(then.canonical(), scenario.points[place].cell.canonical())
    if what:
        raise refusal(folder, f"its cell {place} differs from this scenario's: {what}")


def difference(then: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> str:
    """The first key of two trees whose values differ, with both; nothing where there is none."""
    for key in dict.fromkeys([*then, *now]):
        one, other = then.get(key), now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if deeper := difference(one, other, f"{section}{key}."):
                return deeper
        elif one != other:
            return f"{section}{key} is {_shown(one)} there, {_shown(other)} here"
    return ""


def _shown(value: Any) -> str:
    return "not given" if value is None else repr(value)


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
