"""Which units a scenario's data have."""

from fedpriv.privacy.trust import Trust
from fedpriv.privacy.unit import CLIENT, USER, Unit
from fedpriv.scenario.data_section import DataSection


def check_units(unit: Unit, data: DataSection, silos: int, secret: bool, trust: Trust) -> None:
    """ValueError for a unit that the data do not tell, or that cannot be accounted for."""
    if unit.name == CLIENT.name and secret and not trust.noise_at_server:
        why = "masks need the answers of all clients" if trust.masked else "a server sees which clients answer"
        raise ValueError(
            f'federation.sampling with privacy.unit = "client" and algorithm.trust = {trust.name!r}: {why}; use '
            '"trusted", or sampling = "fixed"'
        )
    schema = data.table_schema
    if unit.name == USER.name and (schema is None or schema.person is None):
        raise ValueError(
            'privacy.unit = "user": the data do not say whose a record is; needs a table with table.person'
        )
    if unit.name == CLIENT.name and data.partition != "iid":
        raise ValueError(f'data.partition = "{data.partition}" with privacy.unit = "client": use "iid"')
    if unit.shared > silos:
        raise ValueError(f"privacy.shared = {unit.shared}: there are {silos} silos")
    if unit.shared > 1 and secret:
        raise ValueError(
            f"privacy.shared = {unit.shared}: persons in several silos are accounted for in public orders only; "
            'use federation.sampling = "fixed"'
        )
