"""Private training in a user's own Flower app.

| name | where | what it does |
|---|---|---|
| `DPMu2FL`, `AcceleratedDPSRGD`, `DPMomentum`, `DPGoldstein`, `DPSGD`, `DPFTRL` | ServerApp | strategies |
| `PrivateStrategy` | ServerApp | a row of the table of algorithms by its name, or a scenario file |
| `PrivateClient` | ClientApp | answers these strategies, by itself or by the silo's guard |
| `guard_of`, `SiloGuard` | ClientApp | train and evaluate for Flower's own strategies, by the silo's guard |
| `ExactAccountant` | ServerApp | Flower's `PrivacyAccountant` by exact accounting |

A name is imported on first use, since a SuperNode can start a process for every message.

Imports: rooms from `server` and `clients` down.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpriv.flower.accountant import ExactAccountant
    from fedpriv.flower.client import PrivateClient
    from fedpriv.flower.guards import SiloGuard, guard_of
    from fedpriv.flower.strategies import (
        DPFTRL,
        DPSGD,
        AcceleratedDPSRGD,
        DPGoldstein,
        DPMomentum,
        DPMu2FL,
        PrivateStrategy,
    )

__all__ = [
    "DPFTRL",
    "DPSGD",
    "AcceleratedDPSRGD",
    "DPGoldstein",
    "DPMomentum",
    "DPMu2FL",
    "ExactAccountant",
    "PrivateClient",
    "PrivateStrategy",
    "SiloGuard",
    "guard_of",
]

_MODULES = {
    "ExactAccountant": "accountant",
    "PrivateClient": "client",
    "SiloGuard": "guards",
    "guard_of": "guards",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fedpriv.flower' has no attribute {name!r}")
    return getattr(import_module(f"fedpriv.flower.{_MODULES.get(name, 'strategies')}"), name)
