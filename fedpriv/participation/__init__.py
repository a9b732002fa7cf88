"""Participation: which records take part in which round, who may know it, and its privacy.

`FixedOrder` is public, and `PoissonSampling` and `RandomAllocation` are secret.  `Dependence` lists the facts that
an increment may depend on.

Imports: rooms from `accounting` down.
"""
