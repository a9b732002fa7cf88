"""One round of a run: clipped increments, their sum, noise, and the release.

`run_silo_round` computes a silo's round.  `FloatSteps` has the steps of a round in floating point, and
`IntegerSteps` those in integers.

Imports: rooms from `plan` down.
"""
