"""Small things that every room needs: errors, figures in words, files, random numbers, extensions and add-ons.

`FedprivError` is the root of all errors that a user sees.  `KeyedNormal` draws every random number.  `added` finds
what an add-on gives.

Imports: no room.
"""
