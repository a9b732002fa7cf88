"""Vectorized engine: cells of a sweep with the same parts, computed together."""
