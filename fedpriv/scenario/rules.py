"""[[where]]: what a sweep sets where some of its keys have certain values.

A sweep over algorithms needs settings of its own for each; a rule says at which points they hold:

    [[where]]
    when = { "algorithm.name" = "dp-sgd", "privacy.mu" = [0.3, 1.0] }
    set = { "algorithm.clip" = 5.0 }

Rules apply in the order of the file, after the sweep and before overrides of single keys.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedpriv.errors import InputError
from fedpriv.scenario.messages import explain
from fedpriv.scenario.tree import assign, look_up


class Rule(BaseModel):
    """[[where]]: if every key of `when` has its value, or one of its values, the keys of `set` get theirs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    when: dict[str, Any] = Field(description="dotted keys and the value, or the list of values, they must have")
    set: dict[str, Any] = Field(description="dotted keys and the values they get")

    def apply(self, tree: dict[str, Any]) -> None:
        """Set the rule's keys in a cell's tree, if it holds there."""
        if all(look_up(tree, key) in _values(wanted) for key, wanted in self.when.items()):
            for key, value in self.set.items():
                assign(tree, key, value)


def rules_of(given: Any, axes: Mapping[str, list[Any]], source: str) -> list[Rule]:
    """The rules of a file; InputError if one is malformed or names a value that its swept key never has."""
    if not isinstance(given, list):
        raise InputError(f"{source}: where = {given!r}: expected [[where]] tables with `when` and `set`")
    rules = []
    for place, entry in enumerate(given, start=1):
        try:
            rule = Rule.model_validate(entry)
        except ValidationError as error:
            raise InputError(f"{source}: {explain(error, Rule, f'where (number {place})')}") from None
        for key, wanted in rule.when.items():
            for value in _values(wanted):
                if key in axes and value not in axes[key]:
                    raise InputError(
                        f"{source}: where (number {place}): {key} is never {value!r}; "
                        f"the sweep has {', '.join(map(repr, axes[key]))}"
                    )
        if swept := [key for key in rule.set if key in axes]:
            raise InputError(f"{source}: where (number {place}): {swept[0]} is swept and cannot be set by a rule")
        rules.append(rule)
    return rules


def _values(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]
