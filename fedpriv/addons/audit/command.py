"""`fedpriv audit`: run it, show it, exit 0 if the claim stands and 3 if it is refuted."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import Progress

from fedpriv.addons.audit.audit import Audit, audit
from fedpriv.addons.audit.families import AuditRefutedError
from fedpriv.addons.audit.options import AuditRequest
from fedpriv.cli.options import print_text
from fedpriv.core.errors import InputError
from fedpriv.core.extensions import import_files, load_add_on_parts
from fedpriv.core.figures import format_epsilon_delta, format_lower, format_upper
from fedpriv.noise.trust import find_trust
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell
from fedpriv.show.statement import check_same_algorithm, describe_power, store_audit

_LINE_SECONDS = 5.0  # seconds, where there is no terminal to draw a bar on


def audit_scenario(asked: AuditRequest) -> None:
    """Audit the first cell of a scenario."""
    import_files(asked.imports or [])
    cell = _load_cell(asked)
    if asked.store is not None:
        if cell.schedule.secret:
            raise InputError(
                "--store: a report draws the claim of an audit as a mu, and secret rounds have none; leave it out"
            )
        check_same_algorithm(asked.store, cell.canonical_data())
    with _show_progress() as progress:
        outcome = audit(cell, asked.mu, asked.trials, asked.confidence, asked.seed, progress)
    told = {**dataclasses.asdict(outcome), "stands": outcome.stands}
    if asked.store is not None:
        store_audit(asked.store, told)
    print_text(json.dumps(told) + "\n" if asked.as_json else _format_report(outcome))
    if not outcome.stands:
        raise AuditRefutedError(
            f"the claim μ = {format_upper(outcome.claimed_mu)} is refuted: {outcome.statistic} shows "
            f"at least {format_lower(outcome.mu)} with confidence {outcome.confidence:g}"
        )


def _load_cell(asked: AuditRequest) -> Cell:
    """The first cell of a scenario, or that of a plan of statistics."""
    path, overrides = Path(asked.scenario), asked.overrides or []
    for cell_of in load_add_on_parts("scenario file").values():
        if path.is_file() and (cell := cell_of(path, overrides)) is not None:
            return cast(Cell, cell)
    return load_scenario(asked.scenario, overrides).points[0].cell


def _format_family(outcome: Audit, name: str, bound: float) -> str:
    """Write a family's bound, and its claim where parts of a run have claims of their own."""
    several = outcome.alarms is None and len(set(outcome.claims.values())) > 1
    return f"{name} μ ≥ {bound:.3g}" + (f" of {outcome.claims[name]:.3g}" if several else "")


@contextmanager
def _show_progress() -> Iterator[Callable[[float], None]]:
    """Show a bar on a terminal, a line now and then elsewhere; on stderr, so that --json stays JSON."""
    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("auditing", total=1.0)
            yield lambda done: progress.update(bar, completed=done)
        return
    last = time.monotonic()

    def line(done: float) -> None:
        nonlocal last
        if time.monotonic() - last > _LINE_SECONDS:
            last = time.monotonic()
            sys.stderr.write(f"fedpriv: auditing, {100 * done:.0f} % done\n")

    sys.stderr.write("fedpriv: auditing\n")
    yield line


def _format_report(outcome: Audit) -> str:
    claimed = format_epsilon_delta(outcome.claimed_epsilon, outcome.delta)
    if outcome.alarms is None:
        claimed = f"μ = {format_upper(outcome.claimed_mu, 6)}, {claimed}"
    else:
        claimed += (
            f", a curve that allows μ = {format_upper(outcome.claimed_mu)} at {outcome.alarms:.2g} false alarms"
        )
    path = "its deployed path" if not outcome.pool else "the server's deployed path, with its simulated pool"
    size = f"{outcome.silos} silos, {outcome.rounds} rounds, {outcome.dtype}"
    lines = [
        "the claim stands" if outcome.stands else "THE CLAIM IS REFUTED",
        f"claimed  {claimed}",
        f"shown    μ ≥ {format_lower(outcome.mu)}, ε ≥ {format_lower(outcome.epsilon)}, "
        f"confidence {outcome.confidence:g}",
        f"by       {outcome.statistic}",
        f"for      {outcome.unit}, {outcome.relation} neighbours, {find_trust(outcome.trust).title}",
        "tests    " + ", ".join(_format_family(outcome, name, bound) for name, bound in outcome.families.items()),
        f"power    {describe_power(outcome.sees, outcome.trials)}",
        f"from     {outcome.trials} canaries in {outcome.seconds:.1f} s; {size}:",
        f"         the scenario, recalibrated to this mu and cut to this size by the code under audit, on {path}",
    ]
    return "\n".join(lines) + "\n"
