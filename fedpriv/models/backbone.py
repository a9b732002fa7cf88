"""Frozen features of a pre-trained module: a public map of one record, by weights on this disk.

Weights are named by their SHA-256 and looked for in $FEDPRIV_WEIGHTS (or fedpriv/weights in the user's cache
folder) as HEX.pt, so a scenario names no path, and silo and server have the same map or none.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedpriv.errors import CodeError, InputError, printable
from fedpriv.models.imported import build

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_VALUES = 2**22  # of inputs and outputs at a time, about


def weights_folder() -> Path:
    """$FEDPRIV_WEIGHTS, or fedpriv/weights in the user's cache folder."""
    if chosen := os.environ.get("FEDPRIV_WEIGHTS"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedpriv" / "weights"


def frozen_features(
    values: Tensor, path: str, arguments: dict[str, Any], weights: str, shape: tuple[int, ...]
) -> Tensor:
    """(n, f) -> (n, features) by the module at `path` with these weights, each record in a batch of one.

    Guarantee: a record's features are a function of it and the weights, whatever the module does with a batch: no
    other record is in its batch.  A record on which the module raises has zeros for features.  The code is trusted
    to keep nothing between calls.  InputError if the weights are not here, or the module fails on zeros.
    """
    module = _loaded(path, json.dumps(arguments, sort_keys=True), weights)
    state = {
        name: tensor.to(values.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }

    def of_one(record: Tensor) -> Tensor:
        batch = record.view(1, *shape) if shape else record.unsqueeze(0)
        given: Tensor = functional_call(module, state, (batch,))
        return given.flatten()

    rows = max(1, _VALUES // max(1, values[0].numel() * 16))
    with torch.no_grad():
        try:
            nothing = of_one(torch.zeros_like(values[0]))
        except Exception as error:  # whatever a stranger's module does
            reason = printable(str(error).split("\n")[0]) or type(error).__name__
            size = values.shape[1]
            raise CodeError(f"model.backbone = {path!r}: fails on records of {size} values", reason) from None
        try:
            return torch.cat([vmap(of_one)(part) for part in torch.split(values, rows)])
        except Exception:  # as above, on some record: whether a silo answers must not depend on it
            return torch.stack([_or(nothing, of_one, record) for record in values])


def _or(nothing: Tensor, of_one: Callable[[Tensor], Tensor], record: Tensor) -> Tensor:
    try:
        return of_one(record)
    except Exception:  # as above
        return torch.zeros_like(nothing)


@lru_cache(maxsize=2)
def _loaded(path: str, arguments: str, weights: str) -> nn.Module:
    file = weights_folder() / f"{weights.removeprefix('sha256:')}.pt"
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"model.backbone_weights = {weights!r}: {file}: {error.strerror}; put the file there, or set "
            "FEDPRIV_WEIGHTS"
        ) from None
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != weights:
        raise InputError(f"model.backbone_weights = {weights!r}: {file} has another SHA-256")
    with torch.device("cpu"):
        module = build(path, "model.backbone", (), json.loads(arguments))
        try:
            module.load_state_dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
        except Exception as error:  # of a damaged file, or one for another module
            reason = str(error).split("\n")[0][:200]
            raise CodeError(f"model.backbone_weights = {weights!r}: do not fit {path!r}", reason) from None
    return module.eval().requires_grad_(False)
