"""What `--set` does to a scenario: values, swept values, and keys that exclude each other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedpriv.errors import InputError
from fedpriv.scenario.data_section import PARTITION_KEYS
from fedpriv.scenario.tree import parsed_assignment

TARGETS = ("mu", "rho", "zcdp", "epsilon")
"""The keys of [privacy] of which exactly one says how private a run is."""


@dataclass(frozen=True)
class Sorted:
    """Overrides, sorted out."""

    axes: Mapping[str, Any]
    """The axes of the sweep; "seeds" as it was given."""
    fixed: Mapping[str, Any]
    """Keys that get one value."""
    touched: frozenset[str]
    """Every key that was overridden."""


def sort_out(overrides: Iterable[str], swept: Mapping[str, Any]) -> Sorted:
    """What "KEY=VALUE" overrides make of a sweep.

    A swept key is narrowed to the value or the list of values given; another key with a list becomes an axis.  A
    privacy target takes the place of another one, swept or not, and `privacy.mode=none` of all.  A value that is
    given twice counts once.  InputError for an empty list.
    """
    axes, fixed, touched = dict(swept), dict[str, Any](), set[str]()
    for assignment in overrides:
        key, value = parsed_assignment(assignment)
        key = key.removeprefix("sweep.")  # as it stands in the file
        if key != "seeds" and isinstance(value, list):
            if not value:
                raise InputError(f"--set {assignment!r}: expected at least one value to sweep")
            axes[key] = once(value)
            fixed.pop(key, None)
        elif key in axes or key == "seeds":
            axes[key] = value if key == "seeds" else [value]
        else:
            fixed[key] = value
        touched.add(key)
    for key in excluded(touched, fixed.get("privacy.mode")):
        axes.pop(key, None)
    return Sorted(axes, fixed, frozenset(touched))


def once(values: list[Any]) -> list[Any]:
    """Without the values that are there already: the same cell twice is no second seed."""
    return [each for place, each in enumerate(values) if each not in values[:place]]


def excluded(given: Iterable[str], mode: Any = None) -> list[str]:
    """The privacy targets that give way to those that were `given`, or to a mode without noise."""
    targets = [f"privacy.{name}" for name in TARGETS]
    chosen = [key for key in targets if key in given]
    return [key for key in targets if key not in chosen] if chosen or mode == "none" else []


def forget_what_gave_way(tree: dict[str, Any], given: Sorted) -> None:
    """Take out of a cell's tree what an override excludes: other privacy targets, settings of other partitions."""
    for key in excluded(given.touched, given.fixed.get("privacy.mode")):
        tree.get("privacy", {}).pop(key.removeprefix("privacy."), None)
    if "data.partition" in given.touched:
        for partition, key in PARTITION_KEYS.items():
            if tree["data"]["partition"] != partition and f"data.{key}" not in given.touched:
                tree["data"].pop(key, None)
