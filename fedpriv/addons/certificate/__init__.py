"""Signed certificates of released models.

`certify` writes a certificate, `attest` signs a silo's part, and `verify_certificate` recomputes its figures
without data.

Imports: the core.
"""
