"""The keys of a deployed server's noise: one a round, bound to every sum that the noise is added to.

    link_t   = HMAC(key, "received", link_{t-1}, t, the mean of round t)
    subkey_t = HMAC(key, "noise", link_t)

A journal can be put back to an earlier copy with its key, by accident or not.  Were the noise of round t a
function of the key and of t alone, another sum in round t would meet the same noise, and the difference of what
was released would be exact.  So a round whose sum is another one, or follows other ones, draws other
fresh vectors; a round that is the same draws the same, and a resumed server releases the same bytes.  What a
tree keeps of earlier rounds is common to both, and a second release is one that nobody has charged.
"""

import hashlib
import hmac

import numpy as np
from torch import Tensor

from fedpriv.randomness import KeyedNormal

LINK_BYTES = hashlib.sha256().digest_size


class NoiseChain:
    """Subkeys of one run's secret key, for noise that is really released: drawn in float64.

    Guarantee: links and subkeys are values of a pseudorandom function of the key, so that a link says nothing
    about the sums once the key is wiped, and noise of different links is independent.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def link(self, before: bytes, t: int, mean: Tensor) -> bytes:
        """The link of round t: `before` is round t-1's (b"" at first), `mean` (d,) what noise is added to."""
        return self._of(b"received", before, t.to_bytes(8, "big"), mean.contiguous().numpy().tobytes())

    def source(self, link: bytes) -> KeyedNormal:
        """Where the fresh vectors of the link's round come from."""
        return KeyedNormal(self._of(b"noise", link), np.float64)

    def _of(self, *parts: bytes) -> bytes:
        digest = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.digest()
