"""Memory limits of a guard's runs, computed before a run and enforced by the system, on Linux.

The system's limit is for all runs together.  An answer that exceeds it is to fail, and not the process, whose end
would interrupt all runs of the silo.

An increment is a record's clipped contribution to a round.  The state is what a silo keeps from one round to the
next.
"""

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from fedpriv.claims.ledger import make_silo_stream
from fedpriv.core.errors import InputError
from fedpriv.core.limits import LIMIT_REMEDIES, MIB, format_mebibytes, memory_limits, memory_usage
from fedpriv.noise.integers.increments import MAX_CHUNK_VALUES
from fedpriv.plan.plan import Plan

MAX_STATE_BYTES = 2**29
"""Largest state in bytes, about half of SQLite's limit of 10^9 bytes for a row."""
MIN_MEMORY, DEFAULT_MEMORY = 64 * MIB, 512 * MIB
_NUMBER_BYTES = 8
"""Bytes of a number, at most."""
_BYTES_PER_UNIT = {"B": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40}
_VIEW_COPIES = 3
"""Copies of a shard's features during their computation from its records."""
_BATCH_COPIES = 6
"""Copies of a round's features that exist at a time, at most: selected, aligned, and as integers."""
_VALUES_PER_COORDINATE = 5
"""Numbers for every value of one record's increment while it is evaluated, clipped and truncated."""
_STATE_COPIES = 5
"""Copies of a state that exist at a time, at most: read, updated, packed, and written by SQLite."""
_MECHANISM_STATES = 2
"""States of the size of the mechanism's: its own, and the state of the strategy for integers."""
_VECTOR_COUNT = 16
"""Vectors of a release: the model, the query, integers, noise and the noise's random bits."""
_MODULE_BYTES = 128 * MIB
"""Memory of torch, the compiled sampler, a model that is a module, and its first plan."""
_REQUEST_BYTES = 128 * MIB
"""Memory for waiting requests, and for a scenario before its memory is computed."""
_MAX_CACHED_RUNS = 4
"""Most runs with cached values."""


def _parse_bytes(value: object) -> object:
    """Convert text such as "512 MiB" to a number of bytes, and leave other values to validation."""
    match = re.fullmatch(r"([0-9]{1,15}) ?([KMGT]iB|B)", value) if isinstance(value, str) else None
    return value if match is None else int(match[1]) * _BYTES_PER_UNIT[match[2]]


def _check_minimum(byte_count: int) -> int:
    if byte_count < MIN_MEMORY:
        raise ValueError(f'at least "{MIN_MEMORY // MIB} MiB"')
    return byte_count


MemorySize = Annotated[int, BeforeValidator(_parse_bytes), AfterValidator(_check_minimum)]
"""Number of bytes, or text such as "512 MiB", at least `MIN_MEMORY`."""


def round_memory(plan: Plan, silo: int, rows: int, features: int) -> int:
    """Return the largest memory in bytes of answering one round of a plan, with all cached values for it.

    Guarantee: the result is a function of public numbers: no record's values are read, and a person counts with
    the most records of a unit, not with the person's own number of records.

    Args:
        plan: Plan of the run.
        silo: Number of the silo.
        rows: Number of the silo's records, or for larger units the number of units times `Unit.max_records`.
        features: Number of values of one record, in the form in which the model takes it.
    """
    draws = max(plan.objective.dimension, *(planned_round.stored_length for planned_round in plan.rounds))
    row_count, value_bytes = (
        min(rows, plan.record_capacity(silo) * plan.unit.max_records),
        plan.objective.initial().element_size(),
    )
    return (
        _MODULE_BYTES
        + _VIEW_COPIES * value_bytes * rows * features
        + _NUMBER_BYTES
        * (
            _BATCH_COPIES * row_count * features
            + _VALUES_PER_COORDINATE * _values_per_record(plan)
            + _VECTOR_COUNT * max(draws, plan.query_length)
        )
        + _STATE_COPIES * state_memory(plan, silo)
    )


def state_memory(plan: Plan, silo: int) -> int:
    """Return the most bytes that the vectors of a silo's state take between rounds."""
    first = plan.estimator.round(1)
    past = plan.estimator.memory if first.split is None else 2 + first.split.rounds_per_epoch
    workload = make_silo_stream(plan, silo, plan.schedule.rounds).workload
    return (
        _NUMBER_BYTES
        * plan.objective.dimension
        * (1 + past + _MECHANISM_STATES * plan.mechanism.memory_vectors(workload))
    )


def _values_per_record(plan: Plan) -> int:
    """Return the most values of a record's increment, of a query, or of a chunk of features."""
    objective, max_values = plan.objective, max(plan.query_length, MAX_CHUNK_VALUES)
    for points in {round_plan.step.gradient_count for round_plan in plan.rounds}:
        max_values = max(max_values, objective.dimension * points + objective.extra_values(points))
    return max_values


def limit_memory(max_bytes: int) -> None:
    """Limit the data memory of this process to its present size plus `max_bytes` and `_REQUEST_BYTES`.

    On systems other than Linux nothing is limited.

    Raises:
        InputError: If a limit of the process or of its container allows less.
    """
    if not (usage := memory_usage()):
        return
    for name, limit in memory_limits().items():
        if usage[name] + max_bytes + _REQUEST_BYTES > limit:
            base = format_mebibytes(usage[name] + _REQUEST_BYTES)
            raise InputError(
                f'allow.memory = "{format_mebibytes(max_bytes)}": the guard itself and its records take {base} of '
                f"{name}, and this process may take {format_mebibytes(limit)} for all; "
                f"lower allow.memory, or raise the limit ({LIMIT_REMEDIES[name]})"
            )
    import resource  # missing on Windows, where advice on settings imports this module, too

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft_limit = usage["data"] + max_bytes + _REQUEST_BYTES
    # A negative hard limit is RLIM_INFINITY.
    resource.setrlimit(resource.RLIMIT_DATA, (soft_limit if hard < 0 else min(soft_limit, hard), hard))


class MemoryPool:
    """Memory that the runs of a silo share: cached values of runs are dropped to make room for others."""

    def __init__(self, size: int) -> None:
        """Start with nothing reserved of `size` bytes."""
        self.size = size
        self._reservations: dict[str, tuple[int, Callable[[], object]]] = {}

    def reserve(self, name: str, byte_count: int, drop_cached: Callable[[], object]) -> None:
        """Reserve memory for a run, and drop the cached values of all other runs if there is no room for them.

        There is no room if their memory does not fit beside the run's, or if they are `_MAX_CACHED_RUNS` or more.

        Args:
            name: Key of the run, which replaces an earlier reservation under this key.
            byte_count: Memory of the run, in bytes, at most `size`.
            drop_cached: Function that drops at least the cached values of this run.
        """
        other_runs = {other: reservation for other, reservation in self._reservations.items() if other != name}
        if (
            byte_count + sum(size for size, _ in other_runs.values()) > self.size
            or len(other_runs) >= _MAX_CACHED_RUNS
        ):
            for _, drop_other in other_runs.values():
                drop_other()
            other_runs = {}
        self._reservations = {**other_runs, name: (byte_count, drop_cached)}
