"""Sensitivity of Tran & Cutkosky's tree over all public orders, for plans before a seed is known.

A run with fresh permutations is certified for its own order (`visited_squared_norms` of fedpriv/noise/tree.py).
The bound here holds for every order.  The fixed order is not the worst one: a record can be last in one epoch and
first in the next.

A node of level k covers 2^k rounds, and holds the sum of their increments, decayed per round until the node's last
round.  An increment is a record's clipped contribution to a round.  A record's weight in a node is what it adds to
this sum, at clip 1.  The squared norm of a record is the sum of its squared weights in the nodes that count.
"""

import numpy as np
from numpy.typing import NDArray

from fedpriv.noise.series import Floats, geometric_sums
from fedpriv.noise.tree import level_count


def max_node_weights(rounds: int, rounds_per_epoch: int, decay: float, level: int) -> Floats:
    """Compute the largest weight of a record in every node of a level, over all permutations, (nodes,).

    The weight of a record is Σ decay^(z-i) over its rounds i in the node, which ends at z.  It is largest for the
    record that is last in each epoch of the node, and in round z: 1 in the last epoch, decay^r in the one that
    ended r rounds before z, and a factor decay^N for each epoch before.

    Args:
        rounds: T.
        rounds_per_epoch: N.
        decay: Decay per round.
        level: Level of the nodes, which have 2^level rounds.
    """
    last_rounds = np.arange(1 << level, rounds + 1, 1 << level) - 1  # counted from 0
    last_epochs = last_rounds // rounds_per_epoch
    earlier_epochs = last_epochs - (last_rounds + 1 - (1 << level)) // rounds_per_epoch
    rounds_since = last_rounds + 1 - last_epochs * rounds_per_epoch
    return np.asarray(
        1.0
        + float(decay) ** rounds_since * geometric_sums(decay**rounds_per_epoch, earlier_epochs.astype(np.float64))
    )


def bound_over_orders(rounds: int, rounds_per_epoch: int, decay: float, *, all_nodes: bool = False) -> float:
    """Bound the squared norm of a record at clip 1 over all permutations of all epochs.

    The nodes that count are the left halves of their parents, of which the sums of the first t rounds are
    composed, or all.  The time is O(T N log N).

    A node of at most N rounds meets two epochs at most, so that the largest sum over these nodes follows exactly
    by dynamic programming over the record's position in the last epoch.  A longer node counts with the square of
    `max_node_weights`.

    Guarantee: no sequence of permutations has a record of a larger `visited_squared_norms`, so that noise for this
    bound can be planned before a seed is known.

    Args:
        rounds: T.
        rounds_per_epoch: N, as each record takes part once in an epoch.
        decay: Decay per round, from 0 to 1.
        all_nodes: Whether right halves are counted, too.

    Example:
        >>> bound_over_orders(rounds=4, rounds_per_epoch=2, decay=1.0)
        7.0
    """
    positions, node_step = np.arange(rounds_per_epoch), 1 if all_nodes else 2
    levels = range(level_count(rounds))

    def weigh_rounds(epoch: int, level: int) -> tuple[Floats, NDArray[np.int64]]:
        """Return the weight of each round of an epoch in its node, or 0 if none counts, and the node."""
        epoch_rounds = epoch * rounds_per_epoch + positions
        nodes = epoch_rounds >> level
        ends = (nodes + 1) << level
        is_counted = (nodes % node_step == 0) & (ends <= rounds)
        return np.where(is_counted, float(decay) ** (ends - 1 - epoch_rounds), 0.0), nodes

    best = np.zeros(rounds_per_epoch)  # best[p]: largest sum of a record at position p of the last epoch
    for epoch in range(-(-rounds // rounds_per_epoch)):
        transitions, squares = np.repeat(best[:, None], rounds_per_epoch, axis=1), np.zeros(rounds_per_epoch)
        for level in (level for level in levels if 1 << level <= rounds_per_epoch):
            weights, nodes = weigh_rounds(epoch, level)
            squares += weights**2
            earlier_weights, earlier_nodes = weigh_rounds(epoch - 1, level)
            if epoch and (crossing := nodes[0]) == earlier_nodes[-1]:
                transitions += 2.0 * np.outer(
                    earlier_weights * (earlier_nodes == crossing), weights * (nodes == crossing)
                )
        best = np.max(transitions, axis=0) + squares
    long_nodes = (
        max_node_weights(rounds, rounds_per_epoch, decay, level)[::node_step]
        for level in levels
        if 1 << level > rounds_per_epoch
    )
    return float(np.max(best)) + sum(float(np.sum(weights**2)) for weights in long_nodes)
