"""Private counts, means, quantiles, survival curves and ROC curves of tables.

`Statistics` is a plan with its scenario, `Indicators` is the model with which a run counts, and `CurveScores` adds
the tables of ROC and calibration curves to an evaluation.

Imports: the core.
"""
