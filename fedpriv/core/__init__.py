"""Foundations of all rooms: errors, formatted figures, files, random numbers and extensions.

`FedprivError` is the root of all errors that a user sees.  `KeyedNormal` draws noise in floating point.
`load_add_on_part` loads code of an add-on.

Imports: no room.
"""
