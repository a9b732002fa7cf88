"""[data] of a scenario: which records, what is public about them, and how they are spread over the silos."""

from typing import Literal, Self

from pydantic import Field, model_validator

from fedpriv.algorithms import Positive
from fedpriv.data.datasets import schema_of
from fedpriv.data.scaling import Scaling
from fedpriv.data.table_schema import TableSchema
from fedpriv.errors import InputError
from fedpriv.scenario.scale import ScaleSection
from fedpriv.scenario.section import Count, Section

PARTITION_KEYS = {"dirichlet": "concentration", "shards": "shards"}
"""The key of [data] that a partition needs, and no other takes."""


class DataSection(Section):
    """[data]: which records, and how they are spread over the silos."""

    name: str = Field(
        description="a data set's name, as `fedpriv data fetch` takes it, or the path of a .csv, .parquet or .npz "
        "file"
    )
    table: TableSchema | None = Field(
        None, description="what is public about the columns of a .csv or .parquet file"
    )
    partition: Literal["iid", "dirichlet", "shards", "site"] = Field(
        "iid", description='how records are spread over silos; "site": by a table\'s column `site`'
    )
    concentration: Positive | None = Field(
        None, description='of the silos\' label mixtures, for partition = "dirichlet": small is more skewed'
    )
    shards: Count | None = Field(
        None, description='pieces of the records sorted by label a silo gets, for "shards"'
    )
    validation: Count | None = Field(
        None,
        description="so many training records, the last ones, are held out and evaluated in place of the test set",
    )
    scale: ScaleSection | None = Field(
        None, description="columns of numbers by noisy means and deviations; without it by public ranges alone"
    )

    @model_validator(mode="after")
    def _settings_of_the_partition(self) -> Self:
        for partition, key in PARTITION_KEYS.items():
            if (self.partition == partition) != (getattr(self, key) is not None):
                raise ValueError(f'{key} is needed for partition = "{partition}", and only there')
        return self

    @property
    def table_schema(self) -> TableSchema | None:
        """What is public about the table, given here or known for its name; None if the data are no table."""
        return schema_of(self.name, self.table)

    @property
    def scaling(self) -> Scaling | None:
        """The map of a table's features that the first step gave; None where there is none, or none yet."""
        schema = self.table_schema
        return None if self.scale is None or schema is None else self.scale.scaling(schema)

    @property
    def unscaled(self) -> bool:
        """Whether a first step is still to be taken."""
        return self.scale is not None and self.scale.means is None

    def check_table(self, silos: int, *, private: bool, per_silo: bool) -> None:
        """ValueError unless the table is described as a run needs it: with noise in public, by site for `silos`.

        Guarantee: ranges and vocabularies that are said to come from the records enter no run with noise.
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
            if schema is None or not schema.numbers:
                raise ValueError("data.scale: needs a table with a column of numbers, which has `range`")
            self.scale.scaling(schema)
        if self.partition != "site" and not per_silo:
            return
        key = 'data.partition = "site"' if self.partition == "site" else "run.per_silo"
        if schema is None or schema.site is None:
            raise ValueError(f"{key}: needs a table whose description says site and sites")
        if self.partition == "site" and len(schema.sites) != silos:
            raise ValueError(f"{key}: the table has {len(schema.sites)} sites; federation.silos = that number")
