"""One round of a run: clipped increments, sum, noise, release.

`release_of_round` is a silo's round.  `FloatSteps` takes its steps in a simulation, and `IntegerSteps` at a guard.

Imports: rooms from `plan` down.
"""
