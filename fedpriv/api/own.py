"""Records and modules of the calling program: what `fedpriv.run(train=…, test=…, model=…)` makes of them."""

from collections.abc import Mapping, Sized
from hashlib import sha256
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedpriv.data.registered import ARGUMENTS, GIVEN, Part, add_data, dataset_of
from fedpriv.errors import InputError
from fedpriv.models.own import REGRESSION_LOSSES, add_given
from fedpriv.models.probes import GIVEN as OF_MODULE

Given = Part | Dataset[Any]
"""(records, labels), or a torch Dataset of such pairs."""

ENGINES = ("vectorized", "inprocess")
"""The engines that run in the calling process, and so have what it holds."""


def with_own(
    tree: Mapping[str, Any],
    train: Given | None,
    test: Given | None,
    model: nn.Module | None,
    classes: int | None,
    loss: str,
) -> dict[str, Any]:
    """The scenario with these records and this module in place of its [data] and [model].

    Both get names made from their content, so that a run is resumed with the same ones only.  Where the scenario
    gives neither `federation.samples` nor `batch`, all training records are read, once an epoch.
    """
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    if (train is None) != (test is None):
        raise InputError("train and test: give both; a model is evaluated on records that it was not trained on")
    if loss not in REGRESSION_LOSSES:
        raise InputError(f"loss = {loss!r}: accepted are {', '.join(map(repr, REGRESSION_LOSSES))}")
    if train is None or test is None:
        if model is not None:
            raise InputError("model: a module is given with train and test; a scenario's data has models by name")
        return found
    parts = _part(train), _part(test)
    checked = dataset_of(ARGUMENTS, *parts, classes)
    name = f"{GIVEN}{_digest(*(array for part in parts for array in part))}"
    add_data(name, lambda: parts, checked.classes)
    data = found.setdefault("data", {})
    data["name"] = name
    federation = found.setdefault("federation", {})
    if "samples" not in federation and "batch" not in federation:
        federation["samples"] = len(checked.train_labels)
    if model is not None:
        record = checked.train_images.shape[1:]
        parameters = [each.detach().cpu().numpy() for each in model.parameters()]
        of_model = (
            f"{OF_MODULE}{_digest(*parameters, np.array([*record, checked.classes]), text=repr(model) + loss)}"
        )
        add_given(of_model, model, record, regression=checked.classes == 0, loss=loss)
        found["model"] = {"name": of_model}
    return found


def _part(given: Given) -> tuple[NDArray[Any], NDArray[Any]]:
    """Two arrays, copied: what the program does to its own later changes no run."""
    if isinstance(given, TensorDataset):
        return _pair(given.tensors)
    if isinstance(given, Dataset):
        pairs: list[tuple[Any, Any]] = [given[place] for place in range(len(cast(Sized, given)))]
        return _pair([np.stack([_array(each) for each in column]) for column in zip(*pairs, strict=True)])
    return _pair(given)


def _pair(given: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        records, labels = given
    except (TypeError, ValueError):
        raise InputError("train, test: expected (records, labels) or a torch Dataset of such pairs") from None
    return _array(records), _array(labels)


def _array(values: ArrayLike) -> NDArray[Any]:
    return np.array(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)


def _digest(*arrays: NDArray[Any], text: str = "") -> str:
    digest = sha256(text.encode())
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
