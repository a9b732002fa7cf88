"""Gain of joining a federation: released models compared with the silos' local models.

`compute_references` fits local models, `evaluate_gains` compares a released model with them, and `study_joining`
finds the ε from which silos gain on average.

Imports: the core.
"""
