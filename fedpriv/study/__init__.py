"""Studies: sweeps over a scenario's cells, and the folder of results that a run leaves.

`run_sweep` runs the missing cells, `RunFolder` writes them, and `Results` is what a folder has.

Imports: rooms from `engines` down.
"""
