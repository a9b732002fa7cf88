"""Attempts to refute a claim of privacy, by canaries and hostile queries on real guards and servers.

`audit` runs the families of tests of a cell and returns an `Audit`, and `Trials` hold an adversary's view.

Imports: the core, and `statistics`.
"""
