"""What a silo's administrator asks its ledger: what was spent, and to be done with a run."""

import json
import math
from pathlib import Path

from fedpriv.accounting.lifetime import Budget
from fedpriv.accounting.slack import ApproximateGDP
from fedpriv.clients.ledger import SiloLedger
from fedpriv.clients.policy import Policy, read_policy
from fedpriv.clients.prices import spent, together
from fedpriv.errors import InputError
from fedpriv.figures import counted, lower_figure, upper_figure


def status_lines(path: Path) -> list[str]:
    """Budget, what is spent and left of it, and a line a run, in the order they were opened; a policy's path.

    Names come from servers and are shown with their control characters escaped.
    """
    policy = read_policy(path)
    tests = policy.for_tests
    return _lines(policy) + ([] if tests is None else ["evaluations of test records:", *_lines(tests)])


def _lines(policy: Policy) -> list[str]:
    ledger = SiloLedger(policy.ledger, policy.marked)
    rows, allow = ledger.overview(), policy.allow
    prices = spent(ledger.charges(), allow.relation, allow.unit)
    total, left = together(prices), Budget(allow.budget, allow.slack).left(prices) or ApproximateGDP(0.0)
    lines = [
        f"silo {policy.silo}: {policy.ledger}",
        f"budget mu = {upper_figure(allow.budget, 6)}, spent "
        f"{upper_figure(math.inf if total is None else total.mu, 6)} by {counted(len(rows), 'run')}, "
        f"left for one more {lower_figure(left.mu, 6)}",
    ]
    if allow.slack or any(row.slack for row in rows):
        used = sum(row.slack for row in rows)
        lines.append(
            f"slack {upper_figure(allow.slack, 6)}, spent {upper_figure(used, 3)}, left "
            f"{lower_figure(left.slack, 3)}"
        )
    for row in rows:
        of = json.loads(row.cell)
        with_slack = f" with slack {upper_figure(row.slack, 6)}" if row.slack else ""
        state = "under way" if row.underway else "over"
        lines.append(
            f"{row.run_id!r}: mu = {upper_figure(row.mu, 6)}{with_slack}, "
            f"{counted(row.answered, 'round')} answered, {state}, "
            f"{of['algorithm']['name']} ({of['algorithm']['trust']}), scenario {of['name']!r}"
        )
    ledger.close()
    return lines


def end_run(path: Path, run_id: str) -> None:
    """Wipe key and state of a run, and of its evaluations; InputError if no ledger has one of this name."""
    policy = read_policy(path)
    ended = [_ended(each, run_id) for each in (policy, policy.for_tests) if each is not None]
    if not any(ended):
        raise InputError(f"{policy.ledger}: has no run {run_id!r}; `fedpriv silo status` lists them")


def _ended(policy: Policy, run_id: str) -> bool:
    ledger = SiloLedger(policy.ledger, policy.marked)
    with ledger.alone(), ledger.transaction():
        found = ledger.run(run_id) is not None
        if found:
            ledger.finish(run_id)
    ledger.close()
    return found
