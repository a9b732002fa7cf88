"""Sections [data] and [data.scale] of a scenario: records, their silos, and their scaling.

[data] holds what is public about the records.  With [data.scale] a first step releases noisy moments of a table's
columns of numbers, and the rounds use columns that these moments scale.  A table's schema is the public
description of its columns: kinds, ranges, vocabularies, and the columns of label and site.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedpriv.core.errors import InputError, refuse
from fedpriv.data.cells import CellFormat
from fedpriv.data.encode import MIN_DEVIATION, Scaling
from fedpriv.data.named import find_schema
from fedpriv.data.schema import TableSchema
from fedpriv.data.tables import IN_MEMORY_PREFIX
from fedpriv.noise.trust import RECORD, Unit
from fedpriv.papers.base import Count, Positive
from fedpriv.participation.registry import find_sampling_class
from fedpriv.scenario.sections import FederationSection, Section

Numbers = Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], ...], Field(strict=False)]


class ScaleSection(Section):
    """Section [data.scale], whose first step releases noisy moments of a table's numbers for the rounds.

    `means` and `deviations` are computed from this release.
    """

    share: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        description="of the privacy budget, mu squared, that the first step takes; the rounds get the rest"
    )
    means: Numbers | None = Field(
        None, description="means from the first step; left out, `fedpriv run` takes the step"
    )
    deviations: Numbers | None = Field(None, description="deviations from the first step, together with `means`")

    @model_validator(mode="after")
    def _check_both_given(self) -> Self:
        """Require both `means` and `deviations`, or neither.

        The two lists are equally long and not empty, with numbers in their ranges.

        Raises:
            ValueError: The lists are not of this form.
        """
        if (self.means is None) != (self.deviations is None):
            raise ValueError("means and deviations are given together")
        if self.means is None or self.deviations is None:
            return self
        refuse(
            {
                "means and deviations have a number for each column of numbers": (
                    len(self.means) != len(self.deviations) or not self.means
                ),
                "means lie in -1 … 1, as columns do that public ranges scale": (
                    any(abs(mean) > 1.0 for mean in self.means)
                ),
                f"deviations lie in {MIN_DEVIATION:g} … 1, as those of columns in -1 … 1 do": (
                    any(not MIN_DEVIATION <= deviation <= 1.0 for deviation in self.deviations)
                ),
            },
            ValueError,
        )
        return self

    def make_scaling(self, schema: TableSchema) -> Scaling | None:
        """Return the map that scales the table's features, or None before the first step.

        Raises:
            ValueError: The table has another number of columns of numbers than there are means.
        """
        if self.means is None or self.deviations is None:
            return None
        if len(self.means) != len(schema.number_features):
            raise ValueError(
                f"data.scale has {len(self.means)} means, and the table has {len(schema.number_features)} "
                "columns of numbers"
            )
        return Scaling(schema.number_features, self.means, self.deviations)


def check_first_step(
    federation: FederationSection, unit: Unit, without_silos: str | None, statistics: str | None
) -> None:
    """Refuse runs whose first step cannot be taken, or cannot be composed with their rounds.

    A first step needs public rounds, records as units, silos in place of clients, and all silos in every round.
    The rounds have to train a model, since the noise of rounds that release statistics has the first step's seed
    in a simulation (`Cell.noise_seed`).

    Args:
        federation: Section [federation].
        unit: Unit of protection.
        without_silos: Key by which a run continues without silos that do not reply, or None.
        statistics: Name of the model if its rounds release statistics of the records, or None.

    Raises:
        ValueError: One of these is missing.
    """
    refuse(
        {
            f'data.scale: model.name = "{statistics}" releases statistics, and trains nothing on scaled columns; '
            "leave [data.scale] out": (statistics is not None),
            f"data.scale: a first step composes with rounds that have a mu, and federation.sampling = "
            f'"{federation.sampling}" has none; leave one of them out': (
                find_sampling_class(federation.sampling).secret
            ),
            f'data.scale: bounds what one record adds, and privacy.unit = "{unit.name}"; leave [data.scale] out': (
                unit.name != RECORD.name
            ),
            "data.scale: federation.clients takes part in cohorts; leave [data.scale] out": (
                federation.clients is not None
            ),
            f"{without_silos}: the first step of data.scale needs all silos; leave [data.scale] out": (
                without_silos is not None
            ),
        },
        ValueError,
    )


PARTITION_KEYS = {"dirichlet": "concentration", "shards": "shards"}
"""Key of [data] that a partition needs and no other partition takes."""


class DataSection(Section):
    """Section [data]: the records, and their distribution over the silos."""

    name: str = Field(
        pattern=r"^[^\x00]*$",
        description="a data set's name, as `fedpriv list data` shows it, or the path of a .csv, .parquet or .npz "
        "file",
    )
    table: TableSchema | None = Field(
        None, description="what is public about the columns of a .csv or .parquet file"
    )
    partition: Literal["iid", "dirichlet", "shards", "site"] = Field(
        "iid", description='how records are spread over silos; "site": by a table\'s column `site`'
    )
    concentration: Positive | None = Field(
        None,
        description='concentration of the silos\' label mixtures, for "dirichlet": a small one is more skewed',
    )
    shards: Count | None = Field(
        None, description='number of pieces of the records, sorted by label, that a silo gets, for "shards"'
    )
    validation: Count | None = Field(
        None,
        description="number of training records, the last ones, that are held out and evaluated in place of the "
        "test set",
    )
    splits: Count | None = Field(
        None,
        description="number of splits into training and test records that `fedpriv worth` draws; 5 by default",
    )
    split: Count | None = Field(
        None,
        description="in simulations: number of a public split, drawn by site and stratified by class; left out, "
        "the published one",
    )
    spared: Annotated[float, Field(gt=0.0, le=0.5)] | None = Field(
        None,
        description="in simulations: this share of the training records, or of the persons, is drawn and keeps "
        "its places as zeros",
    )
    scale: ScaleSection | None = Field(
        None,
        description="columns of numbers are scaled by noisy means and deviations; else by public ranges alone",
    )

    @model_validator(mode="after")
    def _check_partition_keys(self) -> Self:
        for partition, key in PARTITION_KEYS.items():
            if (self.partition == partition) != (getattr(self, key) is not None):
                raise ValueError(f'{key} is needed for partition = "{partition}", and only there')
        return self

    @model_validator(mode="after")
    def _check_spared_records(self) -> Self:
        if self.spared is not None and self.partition not in ("iid", "site"):
            raise ValueError(
                f'spared = {self.spared:g} with partition = "{self.partition}": records are dealt out by their '
                "labels, and those of spared ones are not read; leave it out"
            )
        if self.validation is not None and (self.split is not None or self.spared is not None):
            raise ValueError(
                "validation: holds out the last training records of the published split; leave it out"
            )
        return self

    @property
    def split_and_spared(self) -> tuple[int | None, float | None]:
        """Number of the split, or None for the published one, and share of spared training records, or None."""
        return self.split, self.spared

    @property
    def table_schema(self) -> TableSchema | None:
        """Public schema of the table, given here or known for its name, or None for data without a table.

        Raises:
            InputError: The schema is missing, or is given for data without a table or with a known schema.
        """
        return find_schema(self.name, self.table)

    @property
    def cell_format(self) -> CellFormat:
        """Format of the cells of the table's file."""
        return CellFormat() if self.table is None else self.table.cell_format

    @property
    def scaling(self) -> Scaling | None:
        """Map that scales a table's features, or None without a first step or before it."""
        schema = self.table_schema
        return None if self.scale is None or schema is None else self.scale.make_scaling(schema)

    @property
    def needs_first_step(self) -> bool:
        """Whether the run has a first step that is not taken yet."""
        return self.scale is not None and self.scale.means is None

    def check_table(self, silos: int, *, private: bool, per_silo: bool) -> None:
        """Check that the table has the public schema that a run needs.

        A table's file needs a schema, and a schema has to be public if the run has noise.  [data.scale] needs a
        column of numbers, and as many means and deviations as such columns if it has them.  The partition "site"
        needs a site for each silo, and metrics for each site need sites.

        Guarantee: ranges and vocabularies that are declared to come from the records enter no run with noise.

        Args:
            silos: Number of silos.
            private: Whether the run has noise, so that the schema must be public.
            per_silo: Whether metrics are computed for each site.

        Raises:
            ValueError: A requirement is not met.
        """
        try:
            schema = self.table_schema
        except InputError as error:
            raise ValueError(str(error)) from None
        if schema is not None and not schema.public and private:
            raise ValueError(
                "data.table.public = false: ranges and vocabularies that were read from the records give them "
                "away, whatever the noise; replace them by what is known without them, and write public = true"
            )
        if self.scale is not None:
            if schema is None or not schema.number_features:
                raise ValueError("data.scale: needs a table with a column of numbers, which has `range`")
            self.scale.make_scaling(schema)  # refuses means and deviations of another number of columns
        if self.partition != "site" and not per_silo:
            return
        key = 'data.partition = "site"' if self.partition == "site" else "run.per_silo"
        if self.name.startswith(IN_MEMORY_PREFIX) and self.table is None:
            return  # the sites are not in a schema, and come with the records
        if schema is None or schema.site is None:
            raise ValueError(f"{key}: needs a table whose description says site and sites")
        if self.partition == "site" and len(schema.sites) != silos:
            raise ValueError(f"{key}: the table has {len(schema.sites)} sites; federation.silos = that number")
