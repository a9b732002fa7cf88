"""Choice of settings on held-out records, and private choice.

`Grids` are what is tried, `tune_scenario` runs the trials, and `choose_settings` is what comes of them.

Imports: the core.
"""
