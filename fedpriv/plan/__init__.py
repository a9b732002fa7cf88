"""Plan of a run: everything that is public and fixed before round 1, as a value.

`make_plan` builds the same `Plan` from the same arguments for silos, servers, engines and accountants.
`load_task` loads a cell's data set and loss.

Imports: rooms from `scenario` down.
"""
