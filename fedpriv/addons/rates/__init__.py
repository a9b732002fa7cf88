"""Rates of the four papers as figures of exponents, by formulas and accounting without a run.

`RateFigure` holds lines with fitted exponents, `FIGURES` has a figure for each paper, and the command is
`fedpriv privacy rates`.

Imports: the core.
"""
