"""Vectorized engine: all seeds and noise levels of a sweep in one program."""
