"""Statistics at a silo: the columns that its policy lets be counted."""

from typing import Any

from fedpriv.addons.statistics.indicators import StatisticsSettings
from fedpriv.core.errors import InputError
from fedpriv.scenario.schema import Cell
from fedpriv.silo.policy import Policy


class StatisticsGuard:
    """Questions of a guard about a run of statistics."""

    @staticmethod
    def refused(policy: Policy, cell: Cell) -> str | None:
        """Return why a policy allows no run of these statistics, or None if it does.

        This is data minimisation: the budget protects, within which a model may ask about every column.
        """
        if not isinstance(settings := cell.model.settings, StatisticsSettings):
            return f"model.name = {cell.model.name!r} reads raw cells, and is none of fedpriv's statistics"
        columns = () if policy.table is None else policy.table.raw
        if max(settings.columns) >= len(columns):
            return "statistics are of the columns of a table, and these records have no such columns"
        asked = {columns[place] for place in settings.columns}
        if unknown := sorted(asked - set(policy.allow.statistics)):
            return f"statistics of {unknown[0]!r} are asked for, and allow.statistics does not name it"
        return None

    @staticmethod
    def allowance(cell: Cell) -> dict[str, Any]:
        """Return the columns asked about.  InputError for a table whose rows lie elsewhere in a silo's file."""
        settings, schema = cell.model.settings, cell.data.table_schema
        if not isinstance(settings, StatisticsSettings) or schema is None:
            return {}
        if schema.split is None and schema.share:
            raise InputError(
                "table.test_share: by their place in the file other rows would be for testing in a silo's own; "
                "for statistics of a deployment give a column `split`, or test_share = 0"
            )
        return {"statistics": [schema.raw[place] for place in sorted(settings.columns)]}


GUARD = StatisticsGuard()
