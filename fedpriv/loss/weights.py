"""Weights of modules by the SHA-256 of the file that holds them: a scenario names no path, and all have the same.

A file is looked for in $FEDPRIV_WEIGHTS (or fedpriv/weights in the user's cache folder) as HEX.pt.
"""

import hashlib
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedpriv.core.errors import CodeError, InputError, printable
from fedpriv.loss.frozen import frozen_of, trained_of
from fedpriv.loss.module import parameters_of
from fedpriv.loss.objective import RecordView

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def weights_folder() -> Path:
    """$FEDPRIV_WEIGHTS, or fedpriv/weights in the user's cache folder."""
    if chosen := os.environ.get("FEDPRIV_WEIGHTS"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedpriv" / "weights"


def content_of(weights: str, key: str) -> bytes:
    """The bytes of the file of this digest; InputError, naming `key`, where there is none.

    Guarantee: their SHA-256 is the one that is named, so what a claim names is what a record passes through.
    """
    file = weights_folder() / f"{weights.removeprefix('sha256:')}.pt"
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"{key} = {weights!r}: {file}: {error.strerror}; put the file there, or set FEDPRIV_WEIGHTS"
        ) from None
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != weights:
        raise InputError(f"{key} = {weights!r}: {file} has another SHA-256")
    return content


def state_of(weights: str, key: str, path: str) -> dict[str, Tensor]:
    """The state_dict in that file, of the module at `path`."""
    content = content_of(weights, key)
    try:
        with torch.device("cpu"):
            return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    except Exception as error:  # of a damaged file
        raise misfit(weights, key, path, error) from None


def misfit(weights: str, key: str, path: str, error: Exception) -> CodeError:
    """The error of weights that a module at `path` does not take."""
    return CodeError(f"{key} = {weights!r}: do not fit {path!r}", str(error).split("\n")[0][:200])


@dataclass(frozen=True)
class Started(RecordView):
    """`base`, from the values of the parameters that `module` has, but for those named in `without`."""

    module: nn.Module
    without: frozenset[str] = frozenset()

    @property
    def convex_within(self) -> float:
        return 0.0

    def initial(self) -> Tensor:
        like = self.base.initial()
        own = trained_of(self.module)
        parts = [
            values if name in self.without else own[name].detach().to(like.dtype)
            for name, values in parameters_of(self.module, like).items()
        ]
        return torch.cat([part.flatten() for part in parts])


def load_constants(module: nn.Module, weights: str | None, path: str) -> frozenset[str]:
    """Put the file's values into the module; the names of parameters to train that it lacks.

    These begin as the scenario's seed says: a head, or what `lora` adds.

    Guarantee: every frozen parameter, and every buffer of a state_dict, has the values of the named digest;
    InputError where one has not, as a silo and its server might fill it each in its own way.
    """
    frozen = frozen_of(module)
    if weights is None:
        if frozen:
            raise InputError(
                f"model.name = {path!r}: {printable(frozen[0])} is not trained; name its values by "
                'model.weights = "sha256:…", of the file with the state_dict'
            )
        return frozenset(trained_of(module))
    where = next(module.parameters()).device  # none of memory, where a size is measured
    state = {name: values.to(where) for name, values in state_of(weights, "model.weights", path).items()}
    learnt = {name for name, each in module.named_parameters(remove_duplicate=False) if each.requires_grad}
    if missing := [name for name in module.state_dict() if name not in {*learnt, *state}]:
        raise InputError(f"model.weights = {weights!r}: holds no {printable(missing[0])}, which is not trained")
    try:
        found = module.load_state_dict(state, strict=False)
        if found.unexpected_keys:
            raise InputError(f"holds {found.unexpected_keys[0]}, which the module does not have")
    except Exception as error:  # of another shape
        raise misfit(weights, "model.weights", path, error) from None
    return frozenset(set(trained_of(module)) - set(state))
