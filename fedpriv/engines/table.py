"""The engines by name; each is imported when it is asked for, because each is heavy in its own way."""

from importlib import import_module
from typing import cast

from fedpriv.engines.base import Engine
from fedpriv.errors import InputError

ENGINES = {
    "vectorized": ("fedpriv.engines.vectorized.engine", "run_vectorized"),
    "inprocess": ("fedpriv.engines.inprocess", "run_inprocess"),
    "ray": ("fedpriv.engines.ray", "run_ray"),
    "deployment": ("fedpriv.engines.deployment", "run_deployment"),
}


def engine_named(name: str) -> Engine:
    if name not in ENGINES:
        raise InputError(f"--engine {name}: known engines are {', '.join(ENGINES)}")
    module, function = ENGINES[name]
    return cast(Engine, getattr(import_module(module), function))
