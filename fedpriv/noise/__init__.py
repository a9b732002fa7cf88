"""Noise mechanisms: factorizations A = B C of running sums, in floating point and on integers.

`Mechanism` is the protocol, with a certified sensitivity.  `mechanism_from_data` reads a mechanism from a ledger,
and `Trust` decides which party adds the noise.

Imports: rooms from `loss` down.
"""
