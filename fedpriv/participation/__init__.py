"""Participation: which records take part in which round, who may know it, and what that costs.

`Schedule` is the fixed order, and `Poisson` and `Allocation` are secret.  `Dependence` names what an increment may
depend on.

Imports: rooms from `accounting` down.
"""
