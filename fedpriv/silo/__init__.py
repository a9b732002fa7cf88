"""A silo: its records, its guard, its ledger and its policy.

`Guard` answers queries within a `Policy`, `SiloLedger` keeps what was charged and released, and `Silo` computes
releases.

Imports: rooms from `protocol` down.
"""
