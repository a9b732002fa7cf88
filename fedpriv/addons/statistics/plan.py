"""Plans of statistics: tables, data and budget, and the columns that a silo's policy allows.

A plan asks for tables of counts, means, quantiles or survival curves.  Raw cells are the values of a record's
columns before they are scaled: numbers, or codes of words.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fedpriv.addons.statistics.indicators import StatisticsSettings
from fedpriv.core.errors import InputError, refuse
from fedpriv.papers.base import Count
from fedpriv.scenario.data import DataSection
from fedpriv.scenario.messages import validate_section
from fedpriv.scenario.published import assign_key, parse_assignment
from fedpriv.scenario.schema import Cell
from fedpriv.scenario.sections import PrivacySection, Section
from fedpriv.silo.policy import Policy


class StatisticsGuard:
    """Guard's check of a run of statistics, and the policy's entry that allows such a run."""

    @staticmethod
    def why_refused(policy: Policy, cell: Cell) -> str | None:
        """Return why a policy does not let a run read the raw cells that it asks for, or None if it does.

        The policy lists the columns that may be counted.  The check is data minimisation: privacy rests on the
        budget, and not on this list.
        """
        if not isinstance(settings := cell.model.settings, StatisticsSettings):
            return f"model.name = {cell.model.name!r} reads raw cells, and is none of fedpriv's statistics"
        columns = () if policy.table is None else policy.table.raw_columns
        if max(settings.used_columns) >= len(columns):
            return "statistics are of the columns of a table, and these records have no such columns"
        if unknown := sorted({columns[place] for place in settings.used_columns} - set(policy.allow.statistics)):
            return f"statistics of {unknown[0]!r} are asked for, and allow.statistics does not name it"
        return None

    @staticmethod
    def allowance(cell: Cell) -> dict[str, Any]:
        """Return the entry of a policy's section [allow] by which a run of statistics is allowed.

        Its key "statistics" lists the columns that the run counts.  Other runs have no entry.

        Raises:
            InputError: The table has test rows, and neither a column `split` nor persons decide which they are.
        """
        settings, schema = cell.model.settings, cell.data.table_schema
        if not isinstance(settings, StatisticsSettings) or schema is None:
            return {}
        refuse(
            {
                "table.test_share: rows for testing are chosen by their place in the file, and a silo's own file "
                "has other rows there; for statistics of a deployment give a column `split` or `person`, or "
                "test_share = 0": not schema.splits_by_content and schema.expected_test_share
            }
        )
        return {"statistics": [schema.raw_columns[place] for place in sorted(settings.used_columns)]}


GUARD = StatisticsGuard()


ColumnNames = Annotated[tuple[str, ...], Field(strict=False)]


class TableRequest(Section):
    """[[table]] of a plan: one table of counts, one mean, quantiles or survival curves."""

    name: str | None = Field(None, description="of the table; its columns, unless given")
    of: Annotated[ColumnNames, Field(min_length=1, max_length=4)] = Field(
        description="columns of the data, which are crossed; the last one is ordered for quantiles, the last two "
        "are a time and an event for survival"
    )
    kind: Literal["counts", "means", "quantiles", "survival"] = Field(
        "counts",
        description='"means": of one number, with the deviation, values beyond its range taken for its ends',
    )
    edges: dict[str, Annotated[tuple[float, ...], Field(strict=False, min_length=2)]] = Field(
        {},
        description="edges of a column's bins; unless given, 10 equal bins of its public range, and for means the "
        "range itself",
    )
    quantiles: Annotated[tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...], Field(strict=False)] = (
        0.25,
        0.5,
        0.75,
    )
    weight: Annotated[float, Field(gt=0.0)] = Field(
        1.0, description="of the table's part of mu squared under zero-out"
    )

    @property
    def title(self) -> str:
        return self.name or " by ".join(reversed(self.of))


class StatisticsPlan(Section):
    """A plan file: data, budget, trust and tables."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="lower-case letters, digits and dashes")
    title: str = ""
    seed: Annotated[int, Field(ge=0)] = Field(0, description="of a simulation's noise")
    trust: Literal["untrusted", "secure-aggregation", "trusted"] = Field("untrusted", description="who adds noise")
    silos: Count | None = Field(
        None, description="how many silos there are, where neither `records` nor the data say it"
    )
    records: Annotated[tuple[Count, ...], Field(strict=False)] | None = Field(
        None,
        description="rows of the training part, or persons or clients, of each silo: public; unless given, rows "
        "and persons are counted in the data",
    )
    data: DataSection
    privacy: PrivacySection
    table: Annotated[tuple[TableRequest, ...], Field(strict=False, min_length=1)]

    @model_validator(mode="after")
    def _each_name_once(self) -> Self:
        """Check that titles of tables are unique, and that the plan adds noise."""
        names = [table.title for table in self.table]
        refuse(
            {
                **{
                    f"two tables are called {name!r}; give one of them a name": names.count(name) > 1
                    for name in names
                },
                'privacy.mode = "none": statistics without noise promise nothing; give epsilon or mu in its '
                "place": (self.privacy.mode == "none"),
            },
            ValueError,
        )
        return self


def read_plan(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> StatisticsPlan:
    """Read a plan of statistics.

    Args:
        source: A plan file (TOML), or the same as nested dictionaries.
        overrides: "KEY=VALUE" for dotted keys of a file, without effect on nested dictionaries.

    Raises:
        InputError: The file cannot be read, or the plan or an override is not valid.
    """
    if isinstance(source, Mapping):
        return validate_section(StatisticsPlan, source, "plan")
    try:
        tree = tomllib.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{source}: no such file; a plan of statistics is a TOML file (docs/statistics.md)"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{source}: cannot be read as a plan: {error}") from None
    for override in overrides:
        assign_key(tree, *parse_assignment(override))
    return validate_section(StatisticsPlan, tree, str(source))


def is_plan(path: Path) -> bool:
    """Whether a file can be read as TOML with a list `table`, such as of [[table]] entries."""
    try:
        return isinstance(tomllib.loads(path.read_text(encoding="utf-8")).get("table"), list)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False
