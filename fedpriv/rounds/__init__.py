"""One round of a run: clipped increments, their sum, noise, and the release.

`run_silo_round` computes a silo's round.  `FloatSteps` has its steps for a simulation, and `IntegerSteps` for a
silo with a guard.

Imports: rooms from `plan` down.
"""
