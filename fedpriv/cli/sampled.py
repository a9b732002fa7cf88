"""What the accounting commands say of records that take part in secret.  Imports no torch."""

from typing import TYPE_CHECKING, Any

from fedpriv.errors import InputError

if TYPE_CHECKING:
    from fedpriv.accounting.guarantees import Guarantee, Sampled

_SLACKS = (1e-6, 1e-7, 1e-8)


def sampled_facts(guarantee: "Sampled", delta: float) -> dict[str, Any]:
    """ε at δ, and what a lifetime budget is charged: a μ for each of some slacks."""
    from fedpriv.accounting.slack import charge_of

    charges = {f"mu_with_slack_{slack:g}": charge_of(guarantee, slack).mu for slack in _SLACKS}
    return {
        "noise_multiplier": guarantee.noise_multiplier,
        "delta": delta,
        "epsilon_at_most": guarantee.epsilon_of(delta),
        **charges,
    }


def aim(mu: float, delta: float, relation: str, unit: str, records: int) -> dict[str, Any]:
    """What several calibrations met: the ε that μ gives at δ."""
    from fedpriv.accounting.gdp import epsilon_of
    from fedpriv.accounting.relation import relation_named
    from fedpriv.privacy.unit import unit_named

    about = {"relation": relation_named(relation), "unit": unit_named(unit, records).words}
    return {"delta": delta, "epsilon_at_most": epsilon_of(mu, delta), **about}


def guarantee_of(
    sampling: str, multiplier: float, rounds: int | None, epochs: int, groups: int, relation: str
) -> "Guarantee":
    """What `multiplier` clips of noise give records that `sampling` draws among `rounds` rounds."""
    from fedpriv.accounting.relation import relation_named
    from fedpriv.participation.secret_order import SecretOrder
    from fedpriv.privacy.setting import Setting

    if rounds is None:
        raise InputError(f"multiplier = {multiplier}: say in how many --rounds records take part")
    order = Setting(rounds, epochs=epochs, sampling=sampling, groups=groups).participation
    if not isinstance(order, SecretOrder):
        raise InputError(
            f"sampling = {sampling!r}: a multiplier says something of records that take part in secret, by "
            '"allocation" or "poisson"; for a public order ask `fedpriv privacy spent`'
        )
    return order.promise(multiplier, relation_named(relation))
