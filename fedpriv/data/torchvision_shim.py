"""Import torchvision for its data sets beside a torch it was not built for.

The published torchvision is built for a CUDA torch.  Beside a CPU torch its import fails while it registers meta
kernels of operators that are not there, which its data sets never use.
"""

import importlib
import sys
from types import ModuleType

_REGISTRATIONS = "torchvision._meta_registrations"


def import_torchvision() -> ModuleType:
    """torchvision, with its operator registration left out only if the plain import fails on it."""
    try:
        return importlib.import_module("torchvision")
    # "operator torchvision::nms does not exist", or what an import that failed so before has left half done.
    except (RuntimeError, AttributeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules[_REGISTRATIONS] = ModuleType(_REGISTRATIONS)
        return importlib.import_module("torchvision")
