"""Engines: different ways to run the same cells.

`ENGINES` is the table of engines, `run_vectorized` computes cells that differ in seeds and some numbers together,
and `run_inprocess` runs the Flower apps in one process.

Imports: rooms from `flower` down.
"""
