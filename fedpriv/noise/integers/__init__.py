"""The integer half of noise: lattices, discrete Gaussians and increments as integers."""
