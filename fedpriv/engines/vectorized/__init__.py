"""Vectorized engine: cells of a sweep that differ in seeds and some numbers, computed together."""
