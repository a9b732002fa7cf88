"""[tuned]: how the settings of a scenario were chosen, which `fedpriv tune` writes and reports read."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedpriv.accounting.selection import Law, NegativeBinomial, Poisson
from fedpriv.errors import InputError
from fedpriv.scenario.messages import explain
from fedpriv.scenario.tree import look_up


class TunedRow(BaseModel):
    """The choice of one point of the sweep."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    when: dict[str, Any]
    """The swept keys and their values there."""
    mu: float | None = Field(None, gt=0, allow_inf_nan=False)
    """What every run of a private choice promised; None for a choice that is not."""

    def fits(self, tree: Mapping[str, Any]) -> bool:
        """Whether a cell's tree is of this point."""
        return all(look_up(tree, key) == value for key, value in self.when.items())


class Tuned(BaseModel):
    """How settings were chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: int = Field(ge=1)
    """In the grid of every row, or tried of it."""
    held_out: int = Field(ge=1)
    metric: str
    law: Literal["none", "negative-binomial", "poisson"] = "none"
    """Of the number of runs of a private choice; "none" for a choice that nothing accounts for."""
    mean: float | None = None
    eta: float = 0.0
    rows: tuple[TunedRow, ...] = ()

    @property
    def number_of_runs(self) -> Law | None:
        """The law of a private choice; InputError for a mean that it cannot have."""
        if self.law == "none":
            return None
        mean = 0.0 if self.mean is None else self.mean
        return Poisson(mean) if self.law == "poisson" else NegativeBinomial(mean, self.eta)

    def row_of(self, tree: Mapping[str, Any]) -> TunedRow | None:
        """The choice that a cell's tree has its settings from; None for a point that was not tuned."""
        return next((row for row in self.rows if row.fits(tree)), None)


def tuned_of(given: Any, source: str) -> Tuned | None:
    """[tuned] of a file; InputError if it is malformed."""
    if given is None:
        return None
    try:
        tuned = Tuned.model_validate(given)
    except ValidationError as error:
        raise InputError(f"{source}: {explain(error, Tuned, 'tuned')}") from None
    try:
        _ = tuned.number_of_runs
    except InputError as error:
        raise InputError(f"{source}: tuned: {error}") from None
    return tuned
