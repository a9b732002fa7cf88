"""[data.scale] of a scenario: columns of numbers by noisy means and deviations, which a first step releases."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from fedpriv.data.scaling import SMALLEST, Scaling
from fedpriv.data.table_schema import TableSchema
from fedpriv.participation.registry import CHOSEN
from fedpriv.privacy.unit import RECORD, Unit
from fedpriv.scenario.federation import FederationSection
from fedpriv.scenario.section import Section

Numbers = Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], ...], Field(strict=False)]


class ScaleSection(Section):
    """[data.scale]: a first step releases noisy means and squares of a table's numbers; the rounds use them.

    `means` and `deviations` are what it released: `fedpriv run` writes them, and guards take numbers only.  A run
    whose scenario gives them is charged for a first step elsewhere.
    """

    share: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        description="of the privacy budget, mu squared, that the first step takes; the rounds get the rest"
    )
    means: Numbers | None = Field(None, description="what the first step gave; left out, `fedpriv run` takes it")
    deviations: Numbers | None = Field(None, description="what the first step gave, beside `means`")

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.means is None) != (self.deviations is None):
            raise ValueError("means and deviations are given together")
        if self.means is None or self.deviations is None:
            return self
        if len(self.means) != len(self.deviations) or not self.means:
            raise ValueError("means and deviations have a number for each column of numbers")
        if any(abs(mean) > 1.0 for mean in self.means):
            raise ValueError("means lie in -1 … 1, as columns do that public ranges scale")
        if any(not SMALLEST <= deviation <= 1.0 for deviation in self.deviations):
            raise ValueError(f"deviations lie in {SMALLEST:g} … 1, as those of columns in -1 … 1 do")
        return self

    def scaling(self, schema: TableSchema) -> Scaling | None:
        """The map of the table's features; None before the first step, ValueError for numbers of other columns."""
        if self.means is None or self.deviations is None:
            return None
        if len(self.means) != len(schema.numbers):
            raise ValueError(
                f"data.scale has {len(self.means)} means, and the table has {len(schema.numbers)} columns of "
                "numbers"
            )
        return Scaling(schema.numbers, self.means, self.deviations)


def check_first_step(federation: FederationSection, unit: Unit, without_silos: str | None) -> None:
    """ValueError for runs whose first step cannot be taken, or not be composed with their rounds."""
    if CHOSEN[federation.sampling].secret:
        raise ValueError(
            f"data.scale: a first step composes with rounds that have a mu, and federation.sampling = "
            f'"{federation.sampling}" has none; leave one of them out'
        )
    if unit.name != RECORD.name:
        raise ValueError(
            f'data.scale: bounds what one record adds, and privacy.unit = "{unit.name}"; leave [data.scale] out'
        )
    if federation.clients is not None:
        raise ValueError("data.scale: federation.clients takes part in cohorts; leave [data.scale] out")
    if without_silos is not None:
        raise ValueError(f"{without_silos}: the first step of data.scale needs all silos; leave [data.scale] out")
