"""Studies: sweeps over a scenario's cells, and the results folder of a run.

`run_sweep` runs the missing cells, `RunFolder` writes their results, and `Results` holds the settings and the
finished cells of a folder.

Imports: rooms from `engines` down.
"""
