"""Privacy accounting of Gaussian and sampled releases, without torch.

`GaussianDP` is the guarantee of a fixed order.  `PoissonGaussian` and `AllocatedGaussian` are the guarantees
of secret participation.

Imports: `core`.
"""

from fedpriv.accounting.guarantees import GaussianDP

__all__ = ["GaussianDP"]
