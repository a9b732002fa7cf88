"""Engines: different ways to run the same cells.

`ENGINES` is the table of engines, `run_vectorized` computes cells with the same parts together, and
`run_inprocess` runs the Flower apps in one process.

Imports: rooms from `flower` down.
"""
