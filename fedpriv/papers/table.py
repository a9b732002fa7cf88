"""Table of algorithms: a name, with the estimator, mechanism and optimizer of a paper.

`base.Algorithm` describes a row.  A new algorithm is a new row, with a small file for each part that is new.
"""

from fedpriv.core.errors import InputError, suggest_name_or_import
from fedpriv.core.extensions import load_extensions, note_table_change
from fedpriv.papers.adam import DP_ADAM, DP_ADAMW
from fedpriv.papers.base import Algorithm, Positive, Problem, Settings
from fedpriv.papers.choquette_choo import ACCELERATED_DP_SRGD, ACCELERATED_INDEPENDENT, UNACCELERATED_DP_SRGD
from fedpriv.papers.fedavg import (
    DP_FEDADAGRAD,
    DP_FEDADAM,
    DP_FEDAVG,
    DP_FEDYOGI,
    FEDERATED_AVERAGING,
    LOCAL_DP_SGD,
)
from fedpriv.papers.ftrl import DP_FTRL
from fedpriv.papers.kornowski import GOLDSTEIN_ERM, GOLDSTEIN_SINGLE_PASS
from fedpriv.papers.newton import NOISY_NEWTON
from fedpriv.papers.noisy_minibatch import NOISY_MINIBATCH
from fedpriv.papers.online_to_batch import ONLINE_TO_BATCH
from fedpriv.papers.phased import PHASED_SGD
from fedpriv.papers.reshef_levy import DP_MU2_FL
from fedpriv.papers.sgd import DP_SGD
from fedpriv.papers.tran_cutkosky import MOMENTUM_TREE, MOMENTUM_TREE_ALIGNED, MOMENTUM_TREE_REDUCED

__all__ = [
    "ALGORITHMS",
    "SHIPPED",
    "Algorithm",
    "Positive",
    "Problem",
    "Settings",
    "add_algorithm",
    "find_algorithm",
]

ALGORITHMS = {
    row.name: row
    for row in (
        DP_MU2_FL,
        ACCELERATED_DP_SRGD,
        UNACCELERATED_DP_SRGD,
        ACCELERATED_INDEPENDENT,
        MOMENTUM_TREE,
        MOMENTUM_TREE_REDUCED,
        MOMENTUM_TREE_ALIGNED,
        ONLINE_TO_BATCH,
        DP_SGD,
        LOCAL_DP_SGD,
        DP_FTRL,
        NOISY_MINIBATCH,
        NOISY_NEWTON,
        FEDERATED_AVERAGING,
        DP_FEDAVG,
        DP_FEDADAM,
        DP_FEDYOGI,
        DP_FEDADAGRAD,
        GOLDSTEIN_SINGLE_PASS,
        GOLDSTEIN_ERM,
        PHASED_SGD,
        DP_ADAM,
        DP_ADAMW,
    )
}


SHIPPED = frozenset(ALGORITHMS)
"""Names of the rows that fedpriv ships."""


def add_algorithm(row: Algorithm) -> None:
    """Add a user's row to the table, or replace the user's row of the same name.

    Args:
        row: Row of the table.

    Raises:
        InputError: `row` is no `Algorithm`, or has the name of a shipped row, since a scenario must
            mean the same everywhere.
    """
    if not isinstance(row, Algorithm):
        raise InputError(
            f"add_algorithm: expected an Algorithm, found {type(row).__name__}; see docs/adding-an-algorithm.md"
        )
    if row.name in SHIPPED:
        raise InputError(f"add_algorithm: {row.name!r} is an algorithm of fedpriv; give yours another name")
    ALGORITHMS[row.name] = row
    note_table_change()


_ABSENT_ALGORITHMS = {
    "scaffold": "a client's control variate is state from round to round, which clients here do not keep, and "
    "its second vector would be a second release to clip and to charge; take dp-fedavg with few local steps, or a "
    "pull to the server's model (docs/adding-an-algorithm.md)",
    "fedprox": "a local step of your own, of ten lines: docs/adding-an-algorithm.md",
    "dp-fedprox": "a local step of your own, of ten lines: docs/adding-an-algorithm.md",
}
"""Answers to names of algorithms that fedpriv does not have under this name."""


def find_algorithm(name: str) -> Algorithm:
    """Return a row by its name, after loading a user's extension modules for an unknown name.

    Raises:
        InputError: There is no such row, or an extension cannot be imported.
    """
    if name not in ALGORITHMS:
        load_extensions()
    if name not in ALGORITHMS:
        # A user may look for an algorithm of the literature that fedpriv does not have under this name.
        if (answer := _ABSENT_ALGORITHMS.get(name.lower())) is not None:
            raise InputError(f"algorithm.name = {name!r}: is not of fedpriv: {answer}")
        raise InputError(
            f"algorithm.name = {name!r}: known algorithms are {', '.join(map(repr, ALGORITHMS))}"
            f"{suggest_name_or_import(name, ALGORITHMS)}"
        )
    return ALGORITHMS[name]
