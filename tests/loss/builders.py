"""Builders of what tests of losses start from."""

from collections.abc import Sequence

import numpy as np

from fedpriv.loss.objective import BatchLayout


def first_rows(t: int, silos: Sequence[tuple[int, int]]) -> BatchLayout:
    """The slots of round t for rows 0, 1, … of each silo; `silos` has (number, records)."""
    rows = [np.arange(count, dtype=np.int64) for _, count in silos]
    return BatchLayout(t, tuple(silos), np.concatenate([np.empty(0, np.int64), *rows]))
