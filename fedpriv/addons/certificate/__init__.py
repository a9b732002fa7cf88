"""Signed certificates of released models.

`certify` writes one, `attested` signs a silo's part, and `verify` recomputes it without data.

Imports: the core.
"""
