"""One owner's noise, several rounds at a time."""

import numpy as np
from numpy.typing import NDArray

from fedpriv.randomness import KeyedNormal


class DrawAhead:
    """One owner's vectors for rounds in order, drawn `ahead` at a time: a batch costs half of single draws.

    A cache and nothing more: any round may be asked for, any number of times.
    """

    def __init__(self, source: KeyedNormal, size: int, owner: int, rounds: int, ahead: int) -> None:
        self._source, self._size, self._owner, self._rounds = source, size, owner, rounds
        self._ahead = ahead
        self._first = 0
        self._drawn = np.empty((0, size), source.dtype)

    def vector(self, t: int) -> NDArray[np.floating]:
        """The vector of round t, shape (size,): do not write into it."""
        if self._ahead == 1:  # kept, it would be one long vector of every owner
            return self._source.vector(self._size, self._owner, t)
        if not self._first <= t < self._first + len(self._drawn):
            rounds = range(t, max(t, min(t + self._ahead - 1, self._rounds)) + 1)
            self._drawn = self._source.vectors(self._size, [self._owner] * len(rounds), rounds)
            self._first = t
        vector: NDArray[np.floating] = self._drawn[t - self._first]
        return vector
