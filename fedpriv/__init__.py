"""fedpriv: differentially private federated optimization, simulated and deployed.

    import fedpriv

    results = fedpriv.run("scenarios/mnist-untrusted.toml", set={"federation.silos": 100})
    print(results.table())

| name | what it is |
|---|---|
| `run` | run a scenario: a file or nested dictionaries |
| `load` | read the folder of a run |
| `RunResults`, `CellResults`, `Evaluation`, `Privacy` | what both return, frozen |
| `RunObserver` | hears how a run goes |
| `InputError`, `RunError`, `FedprivError` | what is raised on purpose |

Each is imported when it is first asked for, so that `fedpriv privacy` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpriv.api import CellResults, Evaluation, Privacy, RunResults, load, run
    from fedpriv.errors import FedprivError, InputError, RunError
    from fedpriv.running.observer import RunObserver

__version__ = "0.1.0"

__all__ = [
    "CellResults",
    "Evaluation",
    "FedprivError",
    "InputError",
    "Privacy",
    "RunError",
    "RunObserver",
    "RunResults",
    "__version__",
    "load",
    "run",
]

_HOMES = {
    **dict.fromkeys(("CellResults", "Evaluation", "Privacy", "RunResults", "load", "run"), "fedpriv.api"),
    **dict.fromkeys(("FedprivError", "InputError", "RunError"), "fedpriv.errors"),
    "RunObserver": "fedpriv.running.observer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedpriv' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
