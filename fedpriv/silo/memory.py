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

from fedpriv.claims.ledger import make_silo_stream
from fedpriv.core.errors import InputError
from fedpriv.core.limits import LIMIT_REMEDIES, MIB, format_mebibytes, memory_limits, memory_usage
from fedpriv.noise.integers.increments import MAX_CHUNK_VALUES
from fedpriv.plan.plan import Plan

MAX_STATE_BYTES = 2**29
"""Bytes: half of what a row of the ledger can hold."""
MIN_MEMORY, DEFAULT_MEMORY = 64 * MIB, 512 * MIB
_NUMBER_BYTES = 8  # bytes
_BYTES_PER_UNIT = {"B": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40}
_VIEW_COPIES = 3
"""Copies of a shard's features while they are made from its records; one of them stays."""
_BATCH_COPIES = 6
"""Copies of a round's features: selected, aligned, and as integers."""
_VALUES_PER_COORDINATE = 5
"""Numbers for every value of a record's increment while it is evaluated, clipped and rounded."""
_STATE_COPIES = 5
"""Copies of a state: as it was read, as it is next, packed, and as SQLite writes it."""
_MECHANISM_STATES = 2
"""The strategy that integers go through keeps as much as the mechanism that turns them into what leaves."""
_VECTOR_COUNT = 16
"""Vectors of a release: the model, the query, integers, noise and what it is drawn from."""
_MODULE_BYTES = 128 * MIB
"""What torch and the compiled sampler load for a first run, a model that is a module, and its first plan."""
_REQUEST_BYTES = 128 * MIB
"""Requests that wait, and a scenario before it is known what it takes."""
_MAX_CACHED_RUNS = 4
"""The most runs for which something is kept."""


def _parse_bytes(given: object) -> object:
    """A number of bytes from "512 MiB"; anything else is left to be refused, or to be a number."""
    found = re.fullmatch(r"([0-9]{1,15}) ?([KMGT]iB|B)", given) if isinstance(given, str) else None
    return given if found is None else int(found[1]) * _BYTES_PER_UNIT[found[2]]


def _check_minimum(given: int) -> int:
    if given < MIN_MEMORY:
        raise ValueError(f'at least "{MIN_MEMORY // MIB} MiB"')
    return given


MemorySize = Annotated[int, BeforeValidator(_parse_bytes), AfterValidator(_check_minimum)]
"""A number of bytes, or text such as "512 MiB"."""


def round_memory(plan: Plan, silo: int, rows: int, features: int) -> int:
    """Bytes that answering one round of a plan takes at most, with all that is kept for it.

    `rows` are the silo's, of `features` numbers each, as the model sees them.

    Guarantee: a function of public numbers: no record's values are looked at, and the rows are those of the unit.
    """
    draws = max(plan.rounds[0].stored_length, plan.objective.dimension)
    held, own = min(rows, plan.record_capacity(silo)), plan.objective.initial().element_size()
    return (
        _MODULE_BYTES
        + _VIEW_COPIES * own * rows * features
        + _NUMBER_BYTES
        * (
            _BATCH_COPIES * held * features
            + _VALUES_PER_COORDINATE * _values_per_record(plan)
            + _VECTOR_COUNT * max(draws, plan.query_length)
        )
        + _STATE_COPIES * state_memory(plan, silo)
    )


def state_memory(plan: Plan, silo: int) -> int:
    """Bytes that a silo keeps from round to round at most."""
    first = plan.estimator.round(1)
    past = plan.estimator.memory if first.split is None else 2 + first.split.rounds_per_epoch
    workload = make_silo_stream(plan, silo, plan.schedule.rounds).workload
    return (
        _NUMBER_BYTES
        * plan.objective.dimension
        * (1 + past + _MECHANISM_STATES * plan.mechanism.memory_vectors(workload))
    )


def _values_per_record(plan: Plan) -> int:
    """Values of a record's increment, or features that are looked at together, where they are the most."""
    objective, most = plan.objective, max(plan.query_length, MAX_CHUNK_VALUES)
    for points in {planned.step.gradient_count for planned in plan.rounds}:
        most = max(most, objective.dimension * points + objective.extra_values(points))
    return most


def limit_memory(max_bytes: int) -> None:
    """Let this process take so many bytes more than it has now, and no more, for good.

    InputError where the machine, the container or a limit gives it less: it would be ended in the middle of a run.
    """
    if not (has := memory_usage()):
        return  # only Linux says it
    for name, limit in memory_limits().items():
        if has[name] + max_bytes + _REQUEST_BYTES > limit:
            own = format_mebibytes(has[name] + _REQUEST_BYTES)
            raise InputError(
                f'allow.memory = "{format_mebibytes(max_bytes)}": the guard itself and its records take {own} of '
                f"{name}, "
                f"and this process may take {format_mebibytes(limit)} for all; lower allow.memory, or raise the "
                "limit "
                f"({LIMIT_REMEDIES[name]})"
            )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = has["data"] + max_bytes + _REQUEST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


class MemoryPool:
    """The bytes that the runs of a silo share: what is kept for some makes way for what others take."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._reservations: dict[str, tuple[int, Callable[[], object]]] = {}

    def reserve(self, name: str, byte_count: int, drop_cached: Callable[[], object]) -> None:
        """Note that a run takes so many bytes, and let go what is kept for others if all do not fit.

        `forget` lets go all that is kept for this one.
        """
        others = {other: noted for other, noted in self._reservations.items() if other != name}
        if byte_count + sum(size for size, _ in others.values()) > self.size or len(others) >= _MAX_CACHED_RUNS:
            for _, each in others.values():
                each()
            others = {}
        self._reservations = {**others, name: (byte_count, drop_cached)}
