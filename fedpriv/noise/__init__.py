"""Noise mechanisms: factorizations A = B C of running sums, with a certificate and an integer half each.

`Mechanism` is the protocol, `mechanism_from` reads one from a ledger, and `Trust` says who adds the noise.

Imports: rooms from `loss` down.
"""
