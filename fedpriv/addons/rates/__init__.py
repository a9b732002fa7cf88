"""Rates of the four papers: exponents by formulas and accounting, and of measured runs.

`RateFigure` holds lines with fitted exponents, `FIGURES` has a figure for each paper, and `scaling_table` and
`scaling_chart` show the section [scaling] of a run.  `theorem` prints what theorems prescribe for a scenario.

Imports: the core.
"""
