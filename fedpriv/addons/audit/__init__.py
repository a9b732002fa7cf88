"""Attempts to refute a claim, by canaries, hostile queries and guards.

`audit` runs the families of tests of a cell and returns an `Audit`, and `Trials` hold an adversary's view.

Imports: the core, and `statistics`.
"""
