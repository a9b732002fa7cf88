"""Foundations of all rooms: errors, formatted figures, files, random numbers and extensions.

`FedprivError` is the base of fedpriv's errors for users.  `KeyedNormal` draws noise in floating point.
`load_add_on_part` loads code of an add-on.

Imports: no room.
"""
