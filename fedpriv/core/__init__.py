"""Foundations of all rooms: errors, formatted figures, files, random numbers and extensions.

`FedprivError` is the root of all errors that a user sees.  `KeyedNormal` draws all noise.  `load_add_on_part`
loads code of an add-on.

Imports: no room.
"""
