"""Which keys a grid may vary: what trains, never what is protected, against whom, or what the records are."""

from collections.abc import Mapping
from typing import Any

from fedpriv.errors import InputError
from fedpriv.scenario import Cell

_ROUNDS = ("rounds", "batch", "batches", "cohort", "epochs")
"""Of [federation]: how the records are read.  Who has them, and what of the reading is secret, is not chosen."""
_PROMISED = ("sampling", "groups", "min_separation", "max_participations")
_ALLOWED = f"algorithm.KEY, model.KEY and federation.{', '.join(_ROUNDS[:-1])} or {_ROUNDS[-1]}"


def check_grid(grid: Any, where: str) -> None:
    """InputError, naming the key, for a grid over something else than what trains, or for what is no grid.

    Guarantee: settings of such a grid differ in no key of [privacy], [data] or [evaluation], nor in
    algorithm.trust, the silos or clients, or the sampling: a choice among them keeps the promise and the problem.
    """
    if not isinstance(grid, Mapping):
        raise InputError(
            f"{where.rstrip(':')}: expected keys with lists of values, such as algorithm.step = [0.1, 1, 10]"
        )
    for key, values in grid.items():
        if (reason := _refused(key)) is not None:
            raise InputError(f"{where} {key}: {reason}")
        if not isinstance(values, list) or not values:
            raise InputError(f"{where} {key}: expected a list of values, such as [0.1, 1, 10]")


def _refused(key: str) -> str | None:
    """Why a grid may not vary a key; None where it may."""
    section, _, name = key.partition(".")
    if key in ("seed", "seeds"):
        return "no setting to choose; give --seeds for those of the trials"
    if section not in Cell.model_fields:
        meant = "." if name else f"; did you mean 'algorithm.{key}'?"
        return f"no key of a scenario{meant} A grid is over {_ALLOWED}"
    if key == "algorithm.name":
        return "every algorithm is a row of its own; sweep it, and give every row its grid"
    promise = section == "privacy" or key.split(".")[:2] == ["algorithm", "trust"]
    if promise or (section == "federation" and name in _PROMISED):
        return (
            "says what is protected, against whom or at which price, which is given and not chosen: the weakest "
            f"would always win. A grid is over {_ALLOWED}; sweep {key} for a row of each"
        )
    if name and (section in ("algorithm", "model") or (section == "federation" and name in _ROUNDS)):
        return None
    return f"another value is another problem, or another measure of it. A grid is over {_ALLOWED}"
