"""Terms of an app's run: a scenario made from keywords, and the message keys that carry it to silos.

Every message of a strategy has the terms in `config`, beside the keys of the app's own `train_config`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, RecordDict

from fedpriv.core.errors import InputError, RunError
from fedpriv.noise.trust import CURATOR, RECORD
from fedpriv.papers.table import algorithm_named
from fedpriv.plan.fitted import fitted
from fedpriv.protocol.messages import CONFIG, number_in, values_in
from fedpriv.scenario.load import load_scenario, resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.scenario.sections import FederationSection, PrivacySection

ARRAYS = "arrays"
ROUND = "server-round"
CELL = "fedpriv-cell"
SEEDED = "fedpriv-seeded"


class Terms(NamedTuple):
    """Terms of a run, as one message carries them."""

    t: int
    """Number of the round, or 0 before round 1, when silos say who they are."""
    cell_json: str
    seeded: bool
    """Whether noise follows from the scenario's seed, as in a simulation."""


def terms_in(content: RecordDict) -> Terms:
    """Read the terms of a message.  RunError if another strategy sent it."""
    config = values_in(content).get(CONFIG)
    values = values_in(config) if isinstance(config, ConfigRecord) else {}
    cell_json, seeded = values.get(CELL), values.get(SEEDED)
    if not isinstance(cell_json, str) or not isinstance(seeded, bool):
        raise RunError(
            "the server's strategy is none of fedpriv.flower: PrivateClient answers DPMu2FL and its sisters; "
            "for a strategy of Flower's use guard_of"
        )
    return Terms(number_in(content, CONFIG, ROUND), cell_json, seeded)


def terms_config(cell: Cell, *, seeded: bool) -> ConfigRecord:
    """Make the keys by which a strategy sends the terms."""
    return ConfigRecord({CELL: json.dumps(cell.canonical()), SEEDED: seeded})


def cell_of_scenario(path: Path, row: str | None, seed: int | None) -> Cell:
    """Resolve the single run of a scenario file.  InputError for another row, and for a sweep."""
    points = load_scenario(path, [] if seed is None else [f"seed={seed}"]).points
    if len(points) != 1:
        raise InputError(f"{path}: sweep: an app is one run, and this stands for {len(points)}")
    cell = points[0].cell
    if row not in (None, cell.algorithm.name):
        raise InputError(f"{path}: algorithm.name = {cell.algorithm.name!r}: this strategy is {row!r}")
    return _checked(cell, str(path))


def cell_of_keywords(row: str, keywords: Mapping[str, Any], seed: int | None) -> Cell:
    """Resolve the run that keywords describe.

    A keyword is a key of [federation] or [privacy], or else one of the row's own keys.  `model` is a section.
    """
    row_keys = algorithm_named(row).settings.model_fields
    tree: dict[str, Any] = {
        "name": row,
        "seed": seed or 0,
        "data": {"name": "synthetic"},  # ignored: silos have their own records
        "federation": {},
        "privacy": {},
        "algorithm": {"name": row},
    }
    for key, value in keywords.items():
        sections = {"federation": FederationSection.model_fields, "privacy": PrivacySection.model_fields}
        section_names = [name for name, fields in sections.items() if key in fields and key not in row_keys]
        if key == "model":
            tree["model"] = {"name": value} if isinstance(value, str) else value
        else:
            tree[(*section_names, "algorithm")[0]][key] = value
    return _checked(resolve_cell(tree, row), row)


def with_dtype(cell: Cell, dtype: str) -> Cell:
    """Return the same run in the type of the app's arrays, with its noise mechanism fitted."""
    tree = cell.canonical()
    return fitted(resolve_cell({**tree, "run": {**tree["run"], "dtype": dtype}}, cell.name))


def _checked(cell: Cell, source: str) -> Cell:
    """Return `cell`, or refuse a run that an app's own module and records cannot do."""
    algorithm = cell.algorithm
    reason = ""
    if algorithm.row.model is not None:
        reason = f"algorithm.name = {algorithm.name!r}: asks silos for more than gradients of a module"
    elif algorithm.trust == CURATOR.name:
        reason = f"algorithm.trust = {algorithm.trust!r}: a curator has all records, and no silos"
    elif cell.privacy.unit != RECORD.name:
        reason = f"privacy.unit = {cell.privacy.unit!r}: an app's records are protected one by one"
    elif cell.data.scale is not None:
        reason = "data.scale: an app scales its records by itself, with public numbers"
    elif not cell.model.row.evaluated:
        reason = f"model.name = {cell.model.name!r}: no module can be this model"
    elif cell.evaluation is not None:
        reason = "evaluation: the silos of an app evaluate by its own @app.evaluate()"
    if reason:
        raise InputError(f"{source}: {reason}; use fedpriv run")
    return cell
