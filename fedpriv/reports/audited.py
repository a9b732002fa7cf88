"""An audit's outcome, stored with the run that it is about."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError
from fedpriv.files import write_json
from fedpriv.sweep.results import read_results

_FILE = "audit.json"
_SAME = ("algorithm", "model")


@dataclass(frozen=True)
class StoredAudit:
    """What a report shows of an audit; see `fedpriv.auditing.audit.Audit`."""

    claimed_mu: float
    mu: float
    epsilon: float
    claimed_epsilon: float
    delta: float
    statistic: str
    confidence: float
    trials: int
    rounds: int
    silos: int
    trust: str
    stands: bool
    date: str


def check_audited(folder: Path, scenario: Mapping[str, Any]) -> None:
    """InputError if the folder holds no run, or none of this scenario's algorithm, settings, trust and model."""
    cells = read_results(folder).cells
    if not any(all(cell["scenario"].get(key) == scenario.get(key) for key in _SAME) for cell in cells):
        raise InputError(f"--store {folder}: no cell there has the algorithm, trust and model that are audited")


def store_audit(folder: Path, outcome: Mapping[str, Any]) -> None:
    """Write RUN_DIR/audit.json for the report."""
    kept = {name: outcome[name] for name in StoredAudit.__dataclass_fields__ if name in outcome}
    write_json(folder / _FILE, {**kept, "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")})


def stored_audit(folder: Path) -> StoredAudit | None:
    """The audit of a run; None if none was stored, InputError if its file is damaged."""
    path = folder / _FILE
    if not path.exists():
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return StoredAudit(**{name: tree[name] for name in StoredAudit.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not an audit of fedpriv ({type(error).__name__}: {error})") from None
