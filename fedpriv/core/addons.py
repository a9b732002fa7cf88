"""Table of what add-ons give to the core, imported on first use by name.

The core imports no add-on, which is a folder of `fedpriv/addons`.  `ADDED` has a kind for each place of the core
that asks.  Without the folder the core works, and says which add-on is not there.
"""

import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from fedpriv.core.errors import InputError

_FOLDER = "fedpriv.addons."
ADDED: Mapping[str, Mapping[str, str]] = {
    "model": {"statistics": "statistics.indicators:ROW"},
    "evaluation": {"curves": "statistics.curves:CurveSettings"},
    "guard": {"statistics": "statistics.admission:GUARD"},
    "scenario file": {"statistics": "statistics.tables:cell_of_plan"},
    "tables": {"curves": "statistics.intervals:intervals_of"},
    "rows": {"local models": "worth.references:local_models_row"},
    "engine": {"ray": "services.deployment:run_ray", "deployment": "services.deployment:run_deployment"},
    "Flower": {"names": "services.flower_private.names:check_names"},
    "own data": {"advice": "begin.advised:as_advised"},
}
"""Kind -> name -> "module:attribute" in the folder of add-ons."""
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "audit": ("audit",),
    "begin": ("advise", "init", "data inspect"),
    "certificate": ("certify", "silo key", "silo sign"),
    "services": ("superlink", "supernode", "certificates", "federation"),
    "statistics": ("statistics",),
    "tune": ("tune",),
    "worth": ("worth", "silo refine"),
}
"""Add-on -> its commands, which `register` of its module `options` adds."""


def added(kind: str, name: str) -> Any:
    """Return what an add-on gives under a name.  InputError if the add-on is not there."""
    return _attribute(ADDED[kind][name], f"{kind} {name!r}")


def all_added(kind: str) -> dict[str, Any]:
    """Return everything of a kind by name, as far as its add-on is there."""
    found = {}
    for name in ADDED[kind]:
        with suppress(InputError):
            found[name] = added(kind, name)
    return found


def is_loaded(kind: str, name: str) -> bool:
    """Whether an add-on's part was imported already."""
    return _FOLDER + ADDED[kind][name].partition(":")[0] in sys.modules


def register_of(add_on: str) -> Any:
    """Return the function that adds an add-on's commands.  InputError if the add-on is not there."""
    return _attribute(f"{add_on}.options:register", f"fedpriv {COMMANDS[add_on][0]}")


def _attribute(place: str, what: str) -> Any:
    module, _, attribute = place.partition(":")
    try:
        return getattr(import_module(_FOLDER + module), attribute)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_FOLDER.rstrip(".")):
            raise
        raise InputError(
            f"{what}: it is of the add-on {module.partition('.')[0]!r}, which this installation lacks; install "
            "fedpriv with its folder fedpriv/addons"
        ) from None
