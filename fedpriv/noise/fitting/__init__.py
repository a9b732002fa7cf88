"""Fitting: noise for the points that a run publishes, fitted before the run is planned.

`make_noise_cost` gives the cost of a mechanism's noise for a row, `fit_named` the fitted mechanism, and
`compare_mechanism` its line in a comparison.
"""
