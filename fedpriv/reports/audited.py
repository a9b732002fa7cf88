"""An audit's outcome, stored with the run that it is about."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    sees: Mapping[str, float] = field(default_factory=dict)
    """Which share of the noise would be refuted with probability 95 %, by family; earlier versions do not say."""

    @property
    def power(self) -> str:
        """What it would see, in one sentence; nothing where it does not say."""
        return power_words(self.sees, self.trials) if self.sees else ""


def power_words(sees: Mapping[str, float], trials: int) -> str:
    """How little noise an audit of so many trials would see, in one sentence; shares are rounded down."""
    seen = {name: math.floor(100.0 * share + 1e-9) / 100.0 for name, share in sees.items()}
    named = ", ".join(f"σ × {share:.2f} ({name})" for name, share in seen.items() if share > 0.0)
    if not named:
        return f"with {trials:,} trials no loss of noise would be seen at this mu: take more, or another mu"
    return (
        f"with {trials:,} trials this audit would see {named}: noise of that size, or less, is refuted in 95 of "
        "100 audits, and a smaller loss can be missed"
    )


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
        return StoredAudit(**{name: tree[name] for name in StoredAudit.__dataclass_fields__ if name in tree})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not an audit of fedpriv ({type(error).__name__}: {error})") from None
