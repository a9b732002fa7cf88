"""Integer half of noise: lattices, discrete Gaussians and increments as integers.

`fit_lattice` plans a run's lattice and noise, `IntegerStrategy` is the protocol of C on integers, and
`KeyedDiscreteGaussian` draws the noise.
"""
