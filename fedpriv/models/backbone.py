"""Frozen features of a pre-trained module: a public map of one record, by weights on this disk.

Weights are named by their SHA-256 and looked for in $FEDPRIV_WEIGHTS (or fedpriv/weights in the user's cache
folder) as HEX.pt, so a scenario names no path, and silo and server have the same map or none.
"""

import copy
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

from fedpriv.errors import CodeError, InputError, printable
from fedpriv.models.imported import build
from fedpriv.objectives.alone import each_alone

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def weights_folder() -> Path:
    """$FEDPRIV_WEIGHTS, or fedpriv/weights in the user's cache folder."""
    if chosen := os.environ.get("FEDPRIV_WEIGHTS"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedpriv" / "weights"


def frozen_features(
    values: Tensor, path: str, arguments: dict[str, Any], weights: str, shape: tuple[int, ...]
) -> Tensor:
    """(n, f) -> (n, features) by the module at `path` with these weights, one record after another.

    Guarantee: a record's features are a function of it and the weights, bit for bit, whatever the module does with
    a batch: each record is one of its own.  A record on which the module raises has zeros for features, and no
    other record's change; buffers are what they were before every record.  The code is trusted to keep nothing
    else between calls.  InputError if the weights are not here, or the module fails or draws random numbers on a
    record of zeros.
    """
    module = copy.deepcopy(_loaded(path, json.dumps(arguments, sort_keys=True), weights)).to(values.dtype)
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def of_one(record: Tensor) -> Tensor:
        for buffer, before in kept:
            buffer.copy_(before)
        given: Tensor = module(record.view(1, *shape) if shape else record)
        return given.reshape(1, -1)

    nothing = _of_zeros(of_one, values.new_zeros(1, values.shape[1]), path)
    rows = values.new_empty(len(values), nothing.shape[1])
    for place, row in enumerate(each_alone(of_one, (values,), nothing)):
        rows[place] = row
    return rows


def _of_zeros(of_one: Callable[[Tensor], Tensor], record: Tensor, path: str) -> Tensor:
    """Zeros of the shape and the type of a record's features."""
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            given = of_one(record)
    except Exception as error:  # whatever a stranger's module does
        reason = printable(str(error).split("\n")[0]) or type(error).__name__
        size = record.shape[1]
        raise CodeError(f"model.backbone = {path!r}: fails on records of {size} values", reason) from None
    if not torch.equal(before, torch.get_rng_state()):
        raise InputError(f"model.backbone = {path!r}: draws random numbers; features are a record's own")
    return record.new_zeros(given.shape)


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
