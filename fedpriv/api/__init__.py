"""Python interface: run scenarios and read their results.

`run` runs a scenario, `load` reads a folder, and both return `RunResults`.  `import fedpriv` offers all three.

Imports: rooms from `cli` down.
"""
