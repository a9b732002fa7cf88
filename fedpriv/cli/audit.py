"""`fedpriv audit`: run it, show it, exit 0 if the claim stands and 3 if it is refuted."""

import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fedpriv.auditing.audit import MOST_ROUNDS, Audit, AuditRefutedError, audit
from fedpriv.scenario import load_scenario
from fedpriv.trust import trust_named


def audit_scenario(
    path: Path, overrides: list[str], mu: float, trials: int, confidence: float, seed: int, *, as_json: bool
) -> None:
    """Audit the first cell of a scenario."""
    point = load_scenario(path, overrides).points[0]
    console = Console(stderr=True)
    with Progress(console=console, disable=as_json or not console.is_terminal) as progress:
        bar = progress.add_task("canaries", total=trials * min(point.cell.schedule.rounds, MOST_ROUNDS))
        outcome = audit(point.cell, mu, trials, confidence, seed, lambda done: progress.advance(bar, done))
    if as_json:
        sys.stdout.write(json.dumps({**dataclasses.asdict(outcome), "stands": outcome.stands}) + "\n")
    else:
        sys.stdout.write(_report(outcome))
    if not outcome.stands:
        raise AuditRefutedError(
            f"the claim mu = {outcome.claimed_mu:g} is refuted: {outcome.statistic} shows "
            f"at least {outcome.mu:.3f} with confidence {outcome.confidence:g}"
        )


def _report(outcome: Audit) -> str:
    claimed = f"mu = {outcome.claimed_mu:g}, epsilon = {outcome.claimed_epsilon:.4g} at delta = {outcome.delta:g}"
    size = f"{outcome.silos} silos, {outcome.rounds} rounds"
    lines = [
        "the claim stands" if outcome.stands else "THE CLAIM IS REFUTED",
        f"claimed  {claimed}",
        f"shown    mu ≥ {outcome.mu:.4g}, epsilon ≥ {outcome.epsilon:.4g}, confidence {outcome.confidence:g}",
        f"by       {outcome.statistic}",
        f"for      one record of a silo, {outcome.relation} neighbours, {trust_named(outcome.trust).title}",
        f"from     {outcome.trials} canaries in {outcome.seconds:.1f} s; {size}:",
        "         the scenario, recalibrated to this mu and cut to this size by the code under audit",
    ]
    return "\n".join(lines) + "\n"
