"""One round of a run: clipped increments, sum, noise, release.

`RoundSteps` names the steps, `FloatSteps` takes them in a simulation and `IntegerSteps` at a guard.

Imports: rooms from `plan` down.
"""
