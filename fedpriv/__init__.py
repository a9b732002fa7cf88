"""fedpriv: differentially private federated optimization, simulated and deployed.

    import fedpriv

    results = fedpriv.run("quickstart")
    print(results.table())

| name | purpose |
|---|---|
| `run` | run a scenario, by name, file or dictionaries, also with records and modules of your own |
| `load` | read the folder of a run |
| `statistics`, `StatisticsResults` | release counts, quantiles and survival curves of a table, with noise |
| `tune`, `TuningResults` | choose settings on held-out records, openly or in private |
| `advise` | recommend algorithm, clip, step and rounds from public facts, as a scenario |
| `RunResults`, `CellResults`, `Evaluation`, `Privacy` | results of `run` and `load` |
| `Drawing` | figure of results, which a notebook shows inline |
| `add_algorithm`, `add_mechanism`, `add_participation` | register one of your own under a name for scenarios |
| `add_model`, `add_data` | the same for models and data |
| `freeze` | copy a module, so that only the layers that you name are trained |
| `lora`, `merged` | add small trainable matrices to Linear layers, and merge them into plain Linear layers |
| `RunObserver` | receives the events of a run |
| `InputError`, `RunError`, `FedprivError` | errors with a message for users |

The module of a name is imported when the name is first used, so that `fedpriv privacy` does not wait for torch.
"""

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpriv.addons.begin.advise import advise
    from fedpriv.addons.statistics.command import StatisticsResults, statistics
    from fedpriv.addons.tune.command import TuningResults, tune
    from fedpriv.api.results import CellResults, Drawing, Evaluation, Privacy, RunResults
    from fedpriv.api.run import load, run
    from fedpriv.claims.outcome import RunObserver
    from fedpriv.core.errors import FedprivError, InputError, RunError
    from fedpriv.data.named import add_data
    from fedpriv.loss.frozen import freeze
    from fedpriv.loss.models import add_module as add_model
    from fedpriv.loss.presets import lora, merged
    from fedpriv.noise.registry import add_mechanism
    from fedpriv.papers.table import add_algorithm
    from fedpriv.participation.registry import add_participation

    __version__: str

# server/ and clients/ lie beside this folder in a checkout and in Flower's bundle, and inside of it in a wheel.
if not Path(__path__[0], "server").exists():
    __path__.append(str(Path(__path__[0]).parent))

__all__ = [
    "CellResults",
    "Drawing",
    "Evaluation",
    "FedprivError",
    "InputError",
    "Privacy",
    "RunError",
    "RunObserver",
    "RunResults",
    "StatisticsResults",
    "TuningResults",
    "__version__",
    "add_algorithm",
    "add_data",
    "add_mechanism",
    "add_model",
    "add_participation",
    "advise",
    "freeze",
    "load",
    "lora",
    "merged",
    "run",
    "statistics",
    "tune",
]

_HOMES = {
    **dict.fromkeys(
        ("CellResults", "Drawing", "Evaluation", "Privacy", "RunResults"), ("fedpriv.api.results", None)
    ),
    **dict.fromkeys(("load", "run"), ("fedpriv.api.run", None)),
    **dict.fromkeys(("StatisticsResults", "statistics"), ("fedpriv.addons.statistics.command", None)),
    **dict.fromkeys(("TuningResults", "tune"), ("fedpriv.addons.tune.command", None)),
    **dict.fromkeys(("FedprivError", "InputError", "RunError"), ("fedpriv.core.errors", None)),
    "RunObserver": ("fedpriv.claims.outcome", None),
    "add_algorithm": ("fedpriv.papers.table", None),
    "add_data": ("fedpriv.data.named", None),
    "add_mechanism": ("fedpriv.noise.registry", None),
    "add_model": ("fedpriv.loss.models", "add_module"),
    "add_participation": ("fedpriv.participation.registry", None),
    "advise": ("fedpriv.addons.begin.advise", None),
    "freeze": ("fedpriv.loss.frozen", None),
    **dict.fromkeys(("lora", "merged"), ("fedpriv.loss.presets", None)),
}


def __getattr__(name: str) -> Any:
    """Import the object of a public name from the module that defines it, or return the version.

    Raises:
        AttributeError: fedpriv has no such name.
    """
    if name == "__version__":
        return version("fedpriv")
    if name not in _HOMES:
        raise AttributeError(f"module 'fedpriv' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    """List the public names, imported or not, and the names that begin with two underscores."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
