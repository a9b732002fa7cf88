"""What a silo's administrator asks its ledger: what was spent, and to be done with a run."""

import json
import math
from pathlib import Path

from fedpriv.clients.ledger import SiloLedger
from fedpriv.clients.policy import read_policy
from fedpriv.errors import InputError


def status_lines(path: Path) -> list[str]:
    """Budget, what is spent and left of it, and a line a run, in the order they were opened; a policy's path.

    Names come from servers and are shown with their control characters escaped.
    """
    policy = read_policy(path)
    ledger = SiloLedger(policy.ledger, policy.marked)
    rows, budget = ledger.overview(), policy.allow.budget
    spent = math.hypot(*(row.mu for row in rows))
    left = math.sqrt(max(0.0, budget**2 - spent**2)) if math.isfinite(spent) else 0.0
    lines = [
        f"silo {policy.silo}: {policy.ledger}",
        f"budget mu = {budget:g}, spent {spent:.6g} by {len(rows)} runs, left for one more {left:.6g}",
    ]
    for row in rows:
        of = json.loads(row.cell)
        state = "under way" if row.underway else "over"
        lines.append(
            f"{row.run_id!r}: mu = {row.mu:.6g}, {row.answered} rounds answered, {state}, "
            f"{of['algorithm']['name']} ({of['algorithm']['trust']}), scenario {of['name']!r}"
        )
    ledger.close()
    return lines


def end_run(path: Path, run_id: str) -> None:
    """Wipe key and state of a run; InputError if the ledger has none of this name."""
    policy = read_policy(path)
    ledger = SiloLedger(policy.ledger, policy.marked)
    with ledger.alone(), ledger.transaction():
        if ledger.run(run_id) is None:
            raise InputError(f"{policy.ledger}: has no run {run_id!r}; `fedpriv silo status` lists them")
        ledger.finish(run_id)
    ledger.close()
