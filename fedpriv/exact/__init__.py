"""Exact releases: records enter as integer vectors of bounded norm, noise is an exactly sampled discrete Gaussian.

What leaves is a function of the noisy integers, so that no floating-point number before them (it costs utility
alone) or after them (post-processing) can break the claim.
"""
