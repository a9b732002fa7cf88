"""Releases of a run, and the guarantee that follows from them.

A `ReleaseStream` describes the releases of a party, or of several silos alike, and `compute_claim` computes the
guarantee of all streams together.  `CellOutcome` is the outcome of a run.

Imports: rooms from `rounds` down.
"""
