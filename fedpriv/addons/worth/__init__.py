"""Gain of joining a federation: released models compared with the silos' local models.

`compute_references` fits local models, `evaluate_gains` compares a released model with them, and `study_joining`
finds the ε from which a silo gains.

Imports: the core.
"""
