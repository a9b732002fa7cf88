"""Choice of settings on held-out records, and private choice.

`tune` runs the trials of a `Grid`.

Imports: the core.
"""
