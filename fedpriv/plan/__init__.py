"""Plan of a run: everything that is public and fixed before round 1, as a value.

`make_plan` returns the `Plan` of a cell's run, and `load_task` loads the cell's data set and loss.

Imports: rooms from `scenario` down.
"""
