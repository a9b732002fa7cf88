"""What a run released, and what that guarantees.

A `ReleaseStream` is what one party released, and `claim_of` computes what follows from all of them.  `Finished` is
the outcome of a run.

Imports: rooms from `rounds` down.
"""
