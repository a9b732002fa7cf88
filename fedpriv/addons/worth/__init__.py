"""The worth of joining a federation: the released model beside each silo's own.

`compute_references` fits local models, `evaluate_gains` compares, and `study_joining` finds the ε at which a silo
gains.

Imports: the core.
"""
