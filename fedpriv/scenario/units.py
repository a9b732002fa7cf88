"""Which units a scenario's data and federation have."""

from fedpriv.privacy.trust import Trust
from fedpriv.privacy.unit import CLIENT, USER, Unit
from fedpriv.scenario.data_section import DataSection
from fedpriv.scenario.federation import FederationSection

_OF_A_POOL = ("iid", "dirichlet", "shards")
"""How records are spread over clients."""


def check_units(unit: Unit, data: DataSection, federation: FederationSection, secret: bool, trust: Trust) -> None:
    """ValueError for a unit that the data or the federation do not have, or that cannot be accounted for."""
    if federation.clients is not None:
        _check_pool(unit, data, trust)
    elif unit.name == CLIENT.name and secret and not trust.noise_at_server:
        raise ValueError(
            f'federation.sampling with privacy.unit = "client" and algorithm.trust = {trust.name!r}: '
            f'{_why_not(trust)}; use "trusted", or sampling = "fixed"'
        )
    elif unit.name == CLIENT.name and data.partition != "iid":
        raise ValueError(
            f'data.partition = "{data.partition}" with privacy.unit = "client": use "iid", or federation.clients'
        )
    schema = data.table_schema
    if unit.name == USER.name and (schema is None or schema.person is None):
        raise ValueError(
            'privacy.unit = "user": the data do not say whose a record is; needs a table with table.person'
        )
    if unit.shared > federation.silos:
        raise ValueError(f"privacy.shared = {unit.shared}: there are {federation.silos} silos")
    if unit.shared > 1 and secret:
        raise ValueError(
            f"privacy.shared = {unit.shared}: persons in several silos are accounted for in public orders only; "
            'use federation.sampling = "fixed"'
        )


def _check_pool(unit: Unit, data: DataSection, trust: Trust) -> None:
    """ValueError unless a server that is trusted with them protects clients of a pool."""
    if unit.name != CLIENT.name:
        raise ValueError(
            f'federation.clients with privacy.unit = "{unit.name}": what is clipped and counted in a cohort is '
            'a client; set unit = "client" and records'
        )
    if not trust.noise_at_server:
        raise ValueError(
            f'federation.clients with algorithm.trust = {trust.name!r}: {_why_not(trust)}; use "trusted", or make '
            "every client a silo, which answers in every round"
        )
    if data.partition not in _OF_A_POOL:
        raise ValueError(
            f'data.partition = "{data.partition}": clients of a pool have no sites; use "iid", "dirichlet" or '
            '"shards"'
        )


def _why_not(trust: Trust) -> str:
    """Why cohorts protect nobody under a server that is not trusted."""
    return "masks need the answers of all clients" if trust.masked else "a server sees which clients answer"
