"""Running and reading from Python.

`run` runs a scenario, `load` reads a folder, and both return `RunResults`; `import fedpriv` offers all of it.

Imports: rooms from `cli` down.
"""
