"""A condition of a theorem, with the numbers it was checked with."""

from typing import NamedTuple


class Condition(NamedTuple):
    """`text` as the paper writes it, `left` and `right` the two numbers of `left ≤ right`."""

    text: str
    left: float
    right: float

    @property
    def holds(self) -> bool:
        """Up to rounding, as equality is what many parameter choices aim at."""
        return self.left <= self.right * (1.0 + 1e-12)


def failing(conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """Those that do not hold, in their order."""
    return tuple(condition for condition in conditions if not condition.holds)
