"""Algorithms: a file for each paper, with its optimizer, parameters, theorems and bounds.

`ALGORITHMS` is the table of rows, `Algorithm` one row, and `Optimizer` the server's state machine.

Imports: rooms from `noise` down.
"""
