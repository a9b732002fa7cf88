"""Plan of a run: everything that is public and fixed before round 1, as a value.

`make_plan` plans the run of a cell, and `load_task` loads the cell's data set and loss.

Imports: rooms from `scenario` down.
"""
