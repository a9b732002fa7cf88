"""Choice of settings by scores on held-out records, openly or privately.

`Grids` holds the values to try, `choose_settings` picks the settings of each row, and `tune_scenario` runs the
trials and writes the scenario with the best settings.

Imports: the core.
"""
