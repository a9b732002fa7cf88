"""Exact privacy accounting of Gaussian compositions: GDP, zCDP, RDP and (ε, δ).  Imports no torch."""

from fedpriv.accounting.guarantees import EpsilonDelta, GaussianDP

__all__ = ["EpsilonDelta", "GaussianDP"]
