"""Silo: its records, its guard, its ledger and its policy.

`Guard` answers queries within a `Policy`, `SiloLedger` stores charges and releases, and `Silo` computes releases.

Imports: rooms from `protocol` down.
"""
