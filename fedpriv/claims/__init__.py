"""Releases of a run, and the guarantee that follows from them.

A `ReleaseStream` describes the releases of one party, and `compute_claim` computes the guarantee of all streams.
`CellOutcome` is the outcome of a run.

Imports: rooms from `rounds` down.
"""
