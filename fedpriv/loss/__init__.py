"""Losses: clipped increments of single records, for models by name or modules of the user.

`Objective` is the protocol of a loss, `MODELS` the table of models, and `Estimator` the rule for a record's
increment in a round.

Imports: rooms from `data` down.
"""
