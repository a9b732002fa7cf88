"""Private counts, quantiles, survival curves and ROC curves of tables.

`Statistics` is a plan of them, `Indicators` the model that a run counts with, and `CurveScores` the tables that
evaluations sum.

Imports: the core.
"""
