"""Choosing settings: the same number for every row, on training records that are held out."""
