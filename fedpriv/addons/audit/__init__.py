"""Attempts to refute a claim, by canaries, hostile queries and guards.

`audit` runs the families of tests of a cell and returns an `Audit`, and `Trials` are what its silos sent.

Imports: the core, and `statistics`.
"""
