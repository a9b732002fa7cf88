"""Losses: clipped increments of single records, for models by name or modules of one's own.

`Objective` is the protocol of a loss, `MODELS` the table of models, and `Estimator` what a record contributes in a
round.

Imports: rooms from `data` down.
"""
