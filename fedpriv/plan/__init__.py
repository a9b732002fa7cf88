"""The plan of a run: everything that is public and fixed before round 1, as a value.

`plan_of` builds the same `Plan` from the same cell for silos, servers, engines and accountants.  `task_of_cell`
gives a cell's data set and loss.

Imports: rooms from `scenario` down.
"""
