"""A silo's state inside Flower's Context: tensors as arrays, so that it survives between rounds on any engine."""

from collections.abc import Iterator

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from clients.silo import Silo, SiloState
from fedpriv.running_sum import RunningSum
from fedpriv.wire import array_of, number_in, tensor_of

_ARRAYS, _NUMBERS = "silo-arrays", "silo-numbers"


def load_state(store: RecordDict, silo: Silo) -> SiloState:
    """The state kept in a Context, or the silo's start if there is none."""
    if _ARRAYS not in store:
        return silo.start()
    vectors = {name: tensor_of(array) for name, array in store.array_records[_ARRAYS].items()}
    answered, queries, hidden = (number_in(store, _NUMBERS, name) for name in ("answered", "queries", "hidden"))
    return SiloState(
        answered,
        RunningSum(tuple(vectors[f"query-{age}"] for age in range(queries)), vectors["total"]),
        tuple(vectors[f"hidden-{place}"] for place in range(hidden)),
    )


def save_state(store: RecordDict, state: SiloState) -> None:
    """Keep the state; called last, so that a client that failed half-way has changed nothing."""
    arrays = ArrayRecord()
    for name, vector in _vectors(state):
        arrays[name] = array_of(vector)
    store[_ARRAYS] = arrays
    store[_NUMBERS] = ConfigRecord(
        {"answered": state.answered, "queries": len(state.sum.queries), "hidden": len(state.hidden)}
    )


def _vectors(state: SiloState) -> Iterator[tuple[str, Tensor]]:
    yield "total", state.sum.total
    yield from ((f"query-{age}", query) for age, query in enumerate(state.sum.queries))
    yield from ((f"hidden-{place}", vector) for place, vector in enumerate(state.hidden))
