"""Exact privacy accounting of Gaussian compositions: GDP, zCDP, RDP and (ε, δ).  Imports no torch."""

from fedpriv.accounting.guarantees import GaussianDP

__all__ = ["GaussianDP"]
