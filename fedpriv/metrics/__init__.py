"""Measures of a model that are more than a mean over records; computed on public or test data."""
