"""Charges of a ledger, as tests compare them."""

from pathlib import Path

from fedpriv.silo.guard import Guard
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import read_policy


def charged(place: Guard | SiloLedger | Path) -> list[float]:
    """Return μ of every run that was ever opened, in order: by a guard, in a ledger, or under a policy's path."""
    if isinstance(place, Path):
        place = SiloLedger(read_policy(place).ledger)
    ledger = place._ledger if isinstance(place, Guard) else place
    return [charge.mu for charge in ledger.charges()]
