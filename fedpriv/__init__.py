"""fedpriv: differentially private federated optimization, simulated and deployed.

    import fedpriv

    results = fedpriv.run("quickstart")
    print(results.table())

| name | what it is |
|---|---|
| `run` | run a scenario, by name, file or dictionaries; with records and modules of your own |
| `load` | read the folder of a run |
| `statistics`, `StatisticsResults` | counts, quantiles and survival curves of a table |
| `advise` | from public facts which row, clip, step and rounds to take, and the scenario with them |
| `RunResults`, `CellResults`, `Evaluation`, `Privacy` | what both return, frozen |
| `add_algorithm`, `add_mechanism`, `add_participation` | give one of your own a name that scenarios can use |
| `add_model`, `add_data` | the same |
| `freeze` | a module of yours of which only some layers are trained |
| `lora`, `merged` | small matrices beside its Linear layers, which alone are trained; and one module of both |
| `RunObserver` | receives the events of a run |
| `InputError`, `RunError`, `FedprivError` | what is raised on purpose |

Each is imported when it is first asked for, so that `fedpriv privacy` does not wait for torch.
"""

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpriv.addons.begin.advise import advise
    from fedpriv.addons.statistics.command import StatisticsResults, statistics
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
]

_HOMES = {
    **dict.fromkeys(
        ("CellResults", "Drawing", "Evaluation", "Privacy", "RunResults"), ("fedpriv.api.results", None)
    ),
    **dict.fromkeys(("load", "run"), ("fedpriv.api.run", None)),
    **dict.fromkeys(("StatisticsResults", "statistics"), ("fedpriv.addons.statistics.command", None)),
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
    if name == "__version__":
        return version("fedpriv")
    if name not in _HOMES:
        raise AttributeError(f"module 'fedpriv' has no attribute {name!r}")
    home, called = _HOMES[name]
    return getattr(import_module(home), called or name)


def __dir__() -> list[str]:
    """The public names, those too that are imported when they are first asked for: for completion and `dir`."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
