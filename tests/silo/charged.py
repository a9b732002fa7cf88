"""Charges of a ledger, as tests compare them."""

from fedpriv.silo.ledger import SiloLedger


def charged(ledger: SiloLedger) -> list[float]:
    """Return μ of every run that was ever opened, in order."""
    return [charge.mu for charge in ledger.charges()]
