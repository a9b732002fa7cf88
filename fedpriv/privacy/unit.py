"""Whose contribution is clipped and counted."""

UNIT = "one record of a silo"
