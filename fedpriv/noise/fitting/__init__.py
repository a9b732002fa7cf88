"""Fitting of noise to what a run publishes, before it is planned."""
