"""`fedpriv.statistics`: counts, quantiles and survival of a federation's table, with intervals and one claim."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fedpriv.addons.statistics.command import Released, release
from fedpriv.addons.statistics.page import rows_of
from fedpriv.addons.statistics.plan import read_plan
from fedpriv.addons.statistics.tables import Statistics, TableResult
from fedpriv.api.results import RunResults, results_of
from fedpriv.core.errors import InputError


@dataclass(frozen=True)
class StatisticsResults:
    """Tables that were released together, and the run whose claim covers all of them."""

    tables: tuple[TableResult, ...]
    data: Mapping[str, Any]
    """All of it as plain data: what statistics.json holds."""
    run: RunResults

    def table(self, name: str) -> Any:
        """A table by name: a DataFrame where pandas is installed, else a list of dictionaries.

        InputError for a name that the plan does not have.
        """
        known = {table.name: table for table in self.tables}
        if name not in known:
            raise InputError(f"table {name!r}: the plan has {', '.join(map(repr, known))}")
        rows = rows_of(known[name])
        try:
            return import_module("pandas").DataFrame(rows)
        except ImportError:
            return rows


def statistics(
    plan: str | Path | Mapping[str, Any], *, engine: str = "vectorized", out: str | Path | None = None
) -> StatisticsResults:
    """Release the tables of a plan, as `fedpriv statistics` does, and return them.

    Args:
        plan: a plan file, or the same as nested dictionaries.
        engine: "vectorized", "inprocess", "ray" or "deployment".
        out: where results are written; runs/NAME by default.

    Raises:
        InputError: names the key that cannot be used.
        RunError: says why it could not be finished, such as a silo that refused.
    """
    asked = Statistics.of(read_plan(plan if isinstance(plan, Mapping) else Path(plan)))
    found: Released = release(asked, engine, None if out is None else Path(out))
    return StatisticsResults(found.tables, found.data, results_of(found.folder))
