"""Fitting: noise for the points that a run publishes, fitted before the run is planned.

`make_noise_cost` gives the cost of noise in these points, `fit_named` fits a mechanism, and `compare_mechanism`
makes its line in a comparison.
"""
