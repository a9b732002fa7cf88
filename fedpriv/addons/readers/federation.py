"""Complete the section [federation] of a scenario for records that a program gives.

The shipped scenario own-data has numbers of silos, samples and rounds, which give way to the program's records and
settings.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from fedpriv.core.errors import InputError
from fedpriv.data.own import Dataset


def complete_federation(
    tree: Mapping[str, Any], data: Dataset, settings: Mapping[str, Any] | None, _module: nn.Module | None = None
) -> dict[str, Any]:
    """Return a scenario whose [federation] follows the records, their sites, and the program's settings.

    For the scenario own-data `samples` becomes the number of training records, or of clients that have them, and
    `_follow_settings` adapts numbers that the program's settings contradict.

    For records with sites each site becomes a silo, and `data.partition` becomes "site".  Then `batches`, a number
    for each silo, takes the place of `samples` if

    * `samples` is the number of all training records,
    * rounds and epochs have one value each, and
    * there is no `batch`, and neither the settings nor the sweep have samples, batch or batches.

    Args:
        tree: Scenario as nested dictionaries.
        data: Records that a program gives.
        settings: Values that the program sets for the scenario own-data, or None for another scenario.

    Raises:
        InputError: The scenario, or for own-data the program, sets another number of silos than there are sites,
            or the program sweeps `batches` with different sums and sets no rounds.
    """
    federation = dict(tree.get("federation", {}))
    # Values that the program sets or, for another scenario, sweeps.  A sweep that is no table is refused later.
    program_values = {
        key.removeprefix("federation."): value
        for key, value in getattr(tree.get("sweep") if settings is None else settings, "items", dict)()
        if "federation." in key
    }
    if data.sites is not None:
        counts = np.bincount(data.sites.train).tolist()
        silos = (federation if settings is None else program_values).get("silos")
        if silos not in (None, len(counts)):
            raise InputError(
                f"federation.silos = {silos}: the records are of {len(counts)} sites, each of which is a silo; "
                "give that number, or leave it out"
            )
        federation["silos"] = len(counts)
    if settings is not None:
        records = settings.get("privacy.records") if settings.get("privacy.unit") == "client" else 1
        units = len(data.train_labels) // (records if isinstance(records, int) and records > 0 else 1)
        federation = _follow_settings({**federation, "samples": units}, program_values, units)
    if data.sites is None:
        return {**tree, "federation": federation}
    # If an epoch is to read all records, each silo divides its records into batches of equal size.
    rounds, epochs = ({**federation, **program_values}.get(key, 1) for key in ("rounds", "epochs"))
    if (
        federation.get("samples") == sum(counts)
        and "batch" not in federation
        and program_values.keys().isdisjoint(("samples", "batch", "batches"))
        and all(type(count) is int and count > 0 for count in (rounds, epochs))
    ):
        del federation["samples"]
        federation["batches"] = [max(1, count // max(1, rounds // epochs)) for count in counts]
    return {
        **tree,
        "data": {**tree.get("data", {}), "partition": "site"},
        "federation": {**federation, "silos": len(counts)},
    }


def _follow_settings(federation: dict[str, Any], program_values: Mapping[str, Any], units: int) -> dict[str, Any]:
    """Return the section without shipped numbers that the program's numbers contradict.

    Keys that the program sets are kept, since their values replace the shipped ones later.

    * With `clients`, which come in cohorts, silos, samples and epochs are left out.
    * With `batches` (lists of a number for each silo), samples and epochs are left out, and the rounds become so
      many that they read about `units` records.
    * With `batch`, epochs are left out, rounds unless the program sets them, and samples if the rounds that it
      sets do not read all units.
    * Otherwise `rounds` alone, or one value of `epochs` alone, determines the other number.

    Args:
        federation: Section of the shipped scenario, with `units` as its samples, and any sites as its silos.
        program_values: Values that the program sets, by key, such as "rounds".
        units: Number of training records, or of clients that have them.

    Raises:
        InputError: The program sweeps `batches` with different sums, and sets no rounds.
    """
    rounds, batch = program_values.get("rounds"), program_values.get("batch")
    excluded: set[str] = set()
    if "clients" in program_values:
        excluded = {"silos", "samples", "epochs"}
    elif "batches" in program_values:
        excluded = {"samples", "epochs"}
        # Each value of a sweep is a list of integers.  Other values are refused later, when the scenario is read.
        values = [value for value in np.atleast_1d(np.array(program_values["batches"], object)) if np.ndim(value)]
        batch_sums = {
            int(np.sum(value)) for value in values if all(isinstance(count, int | np.integer) for count in value)
        }
        if len(batch_sums) > 1 and rounds is None:
            raise InputError(
                "federation.batches: values with different sums need different numbers of rounds for one pass; "
                "run them one by one, or give federation.rounds"
            )
        federation = {**federation, "rounds": max(1, units // max(1, *batch_sums, 1))}
    elif "batch" in program_values:
        excluded = {"epochs"} if "rounds" in program_values else {"epochs", "rounds"}
        if (
            isinstance(rounds, int)
            and isinstance(batch, int)
            and isinstance(silos := program_values.get("silos", federation["silos"]), int)
            and rounds * batch * silos < units
        ):
            excluded |= {"samples"}  # the rounds do not read all units
    elif "rounds" in program_values and "epochs" not in program_values:
        counts = rounds if isinstance(rounds, list | tuple) else [rounds]
        if counts and all(type(count) is int and count > 0 for count in counts):
            federation = {**federation, "rounds": counts[0], "epochs": math.gcd(*counts)}
    elif type(epochs := program_values.get("epochs")) is int and epochs > 0 and "rounds" not in program_values:
        federation = {**federation, "rounds": epochs}
    return {key: value for key, value in federation.items() if key not in excluded - program_values.keys()}
