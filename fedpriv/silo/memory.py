"""Limit the memory that runs may take of a guard: counted before they are opened, enforced by the system.

What a run takes is counted from public numbers: the scenario, the policy, how many records the silo has and their
shape.  Where too little was counted, one answer fails, and not the process, with which all runs of the silo would
end.
"""

import re
import resource
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from fedpriv.claims.ledger import stream_of
from fedpriv.core.errors import InputError
from fedpriv.core.limits import MIB, REMEDIES, limits, mebibytes, taken
from fedpriv.noise.integers.increments import VALUES_TOGETHER
from fedpriv.plan.plan import Plan

LONGEST_STATE = 2**29
"""Bytes: half of what a row of the ledger can hold."""
LEAST, DEFAULT = 64 * MIB, 512 * MIB
_NUMBER = 8  # bytes
_UNITS = {"B": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40}
_VIEW = 3
"""Copies of a shard's features while they are made from its records; one of them stays."""
_BATCH = 6
"""Copies of a round's features: selected, aligned, and as integers."""
_RECORD = 5
"""Numbers for every value of a record's increment while it is evaluated, clipped and rounded."""
_STATE = 5
"""Copies of a state: as it was read, as it is next, packed, and as SQLite writes it."""
_HALVES = 2
"""The strategy that integers go through keeps as much as the mechanism that turns them into what leaves."""
_VECTORS = 16
"""Vectors of a release: the model, the query, integers, noise and what it is drawn from."""
_MODULE = 128 * MIB
"""What torch and the compiled sampler load for a first run, a model that is a module, and its first plan."""
_BESIDE = 128 * MIB
"""Requests that wait, and a scenario before it is known what it takes."""
_RUNS = 4
"""The most runs for which something is kept."""


def _bytes(given: object) -> object:
    """A number of bytes from "512 MiB"; anything else is left to be refused, or to be a number."""
    found = re.fullmatch(r"([0-9]{1,15}) ?([KMGT]iB|B)", given) if isinstance(given, str) else None
    return given if found is None else int(found[1]) * _UNITS[found[2]]


def _enough(given: int) -> int:
    if given < LEAST:
        raise ValueError(f'at least "{LEAST // MIB} MiB"')
    return given


MemorySize = Annotated[int, BeforeValidator(_bytes), AfterValidator(_enough)]
"""A number of bytes, or text such as "512 MiB"."""


def taken_by(plan: Plan, silo: int, rows: int, features: int) -> int:
    """Bytes that answering one round of a plan takes at most, with all that is kept for it.

    `rows` are the silo's, of `features` numbers each, as the model sees them.

    Guarantee: a function of public numbers: no record's values are looked at, and the rows are those of the unit.
    """
    draws = max(plan.rounds[0].stored_length, plan.objective.dimension)
    held, own = min(rows, plan.most_held(silo)), plan.objective.initial().element_size()
    return (
        _MODULE
        + _VIEW * own * rows * features
        + _NUMBER
        * (_BATCH * held * features + _RECORD * _of_record(plan) + _VECTORS * max(draws, plan.query_length))
        + _STATE * state_of(plan, silo)
    )


def state_of(plan: Plan, silo: int) -> int:
    """Bytes that a silo keeps from round to round at most."""
    first = plan.estimator.round(1)
    past = plan.estimator.memory if first.split is None else 2 + first.split.rounds_per_epoch
    workload = stream_of(plan, silo, plan.schedule.rounds).workload
    return _NUMBER * plan.objective.dimension * (1 + past + _HALVES * plan.mechanism.memory_vectors(workload))


def _of_record(plan: Plan) -> int:
    """Values of a record's increment, or features that are looked at together, where they are the most."""
    objective, most = plan.objective, max(plan.query_length, VALUES_TOGETHER)
    for points in {planned.step.gradients for planned in plan.rounds}:
        most = max(most, objective.dimension * points + objective.beside(points))
    return most


def hold_to(memory: int) -> None:
    """Let this process take so many bytes more than it has now, and no more, for good.

    InputError where the machine, the container or a limit gives it less: it would be ended in the middle of a run.
    """
    if not (has := taken()):
        return  # only Linux says it
    for name, limit in limits().items():
        if has[name] + memory + _BESIDE > limit:
            own = mebibytes(has[name] + _BESIDE)
            raise InputError(
                f'allow.memory = "{mebibytes(memory)}": the guard itself and its records take {own} of {name}, '
                f"and this process may take {mebibytes(limit)} for all; lower allow.memory, or raise the limit "
                f"({REMEDIES[name]})"
            )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = has["data"] + memory + _BESIDE
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


class Room:
    """The bytes that the runs of a silo share: what is kept for some makes way for what others take."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: dict[str, tuple[int, Callable[[], object]]] = {}

    def make_way(self, name: str, taken: int, forget: Callable[[], object]) -> None:
        """Note that a run takes so many bytes, and let go what is kept for others if all do not fit.

        `forget` lets go all that is kept for this one.
        """
        others = {other: noted for other, noted in self._taken.items() if other != name}
        if taken + sum(size for size, _ in others.values()) > self.size or len(others) >= _RUNS:
            for _, each in others.values():
                each()
            others = {}
        self._taken = {**others, name: (taken, forget)}
