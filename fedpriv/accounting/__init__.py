"""Exact privacy accounting of Gaussian compositions: GDP, zCDP, RDP and (ε, δ).  Imports no torch."""

from fedpriv.accounting.claim import (
    RELATIONS,
    EpsilonDelta,
    GaussianDP,
    PrivacyClaim,
    Relation,
    relation_named,
)

__all__ = ["RELATIONS", "EpsilonDelta", "GaussianDP", "PrivacyClaim", "Relation", "relation_named"]
