"""Statistics at a silo: which columns its policy lets be counted."""

from fedpriv.loss.indicators import StatisticsSettings
from fedpriv.scenario.schema import Cell
from fedpriv.silo.policy import Policy


def uncounted(policy: Policy, cell: Cell) -> str | None:
    """Why a policy allows no statistics that a scenario asks for; None if it does, or none are asked for.

    This is data minimisation: the budget protects, within which a model may ask about every column.
    """
    if not isinstance(settings := cell.model.settings, StatisticsSettings):
        return None
    columns = () if policy.table is None else policy.table.raw
    if max(settings.columns) >= len(columns):
        return "statistics are of the columns of a table, and these records have no such columns"
    asked = {columns[place] for place in settings.columns}
    if unknown := sorted(asked - set(policy.allow.statistics)):
        return f"statistics of {unknown[0]!r} are asked for, and allow.statistics does not name it"
    return None
