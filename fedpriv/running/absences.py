"""Which silos of a simulation do not answer in which round, and what a server counts in their place.

In a deployment a silo is away when it is; a scenario says so beforehand, in public: `federation.away` names
rounds, `federation.drop_out` is the probability of every silo and round, by coins of the scenario's seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.randomness import public_generator
from fedpriv.running.plan import Plan
from fedpriv.scenario import Cell


@dataclass(frozen=True)
class Absences:
    """Silo -> the rounds, in order, in which it is away; silos that never are have none."""

    rounds: Mapping[int, tuple[int, ...]]

    def __bool__(self) -> bool:
        return bool(self.rounds)

    def away(self, t: int) -> frozenset[int]:
        """The silos that do not answer in round t."""
        return frozenset(silo for silo, rounds in self.rounds.items() if t in rounds)


NOBODY = Absences({})


def absences_of(cell: Cell) -> Absences:
    """What the scenario says, a function of its seed; the same for every engine."""
    federation, rounds = cell.federation, cell.schedule.rounds
    away: dict[int, set[int]] = {int(silo): set(given) for silo, given in federation.away.items()}
    if federation.drop_out:
        coins = public_generator(cell.seed, "drop-outs").random((rounds, federation.silos))
        for t, silo in zip(*(coins < federation.drop_out).nonzero(), strict=True):
            away.setdefault(int(silo), set()).add(int(t) + 1)
    return Absences({silo: tuple(sorted(given)) for silo, given in sorted(away.items()) if given})


def stand_in(plan: Plan, last: Tensor, t: int) -> Tensor:
    """What a silo that is away in round t counts with, (d,) or as its message would be; `last` is what it counted
    with in the round before, zeros before round 1.

    Its increment is 0: sums go on from what they were, its weight p_i and its batch B_i stay.

    Guarantee: nothing but earlier releases enters, so that all that is released keeps what `plan.releases` claims,
    for silos whose answering depends on themselves and public things only: a silo's own noisy stream has a part
    left out, and a server with noise of its own adds as much to a sum in which a record moves less, or nothing.
    """
    if plan.of_one_round:
        return torch.zeros(plan.message_length(t), dtype=plan.message_dtype)
    return last * plan.estimator.round(t).decay
