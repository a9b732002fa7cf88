"""Command `fedpriv audit`, which exits with 0 if the claim stands and with 3 if it does not.

A claim does not stand if a bound refutes it, or if records are not read as it assumes.
"""

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

_LINE_SECONDS = 5.0  # between two lines of progress without a terminal


def audit_scenario(request: AuditRequest) -> None:
    """Audit the first cell of a scenario, print the report, and store it on request.

    The outcome is printed and stored even if a lower bound refutes the claim.

    Raises:
        InputError: If the scenario or an option is not valid, the cell cannot be audited, or an outcome is to be
            stored that has secret rounds, or in a folder without a run of this algorithm and model.
        AuditRefutedError: If the claim is refuted, or, before any outcome, records are not read as it assumes.
    """
    import_files(request.imports or [])
    cell = _load_cell(request)
    if request.store is not None:
        if cell.schedule.secret:
            raise InputError(
                "--store: a report draws the claim of an audit as a mu, and secret rounds have none; leave it out"
            )
        check_same_algorithm(request.store, cell.canonical_data())
    with _show_progress() as progress:
        outcome = audit(cell, request.mu, request.trials, request.confidence, request.seed, progress)
    fields = {**dataclasses.asdict(outcome), "stands": outcome.stands}
    if request.store is not None:
        store_audit(request.store, fields)
    print_text(json.dumps(fields) + "\n" if request.as_json else _format_report(outcome))
    if not outcome.stands:
        raise AuditRefutedError(
            f"the claim{'' if outcome.alarms is None else 'ed curve, which at this rate of false alarms allows'} "
            f"μ = {format_upper(outcome.claimed_mu)} is refuted: {outcome.statistic} shows "
            f"at least {format_lower(outcome.mu)} with confidence {outcome.confidence:g}"
        )


def _load_cell(request: AuditRequest) -> Cell:
    """Load the first cell of a scenario, or the cell of a plan of statistics."""
    path, overrides = Path(request.scenario), request.overrides or []
    for load_cell in load_add_on_parts("scenario file").values():
        if path.is_file() and (cell := load_cell(path, overrides)) is not None:
            return cast(Cell, cell)
    return load_scenario(request.scenario, overrides).points[0].cell


def _format_family(outcome: Audit, name: str, bound: float) -> str:
    """Format a family's bound, with its claim if the claims differ and the outcome is not that of a curve."""
    has_own_claims = outcome.alarms is None and len(set(outcome.claims.values())) > 1
    return f"{name} μ ≥ {format_lower(bound, 3)}" + (
        f" of {format_upper(outcome.claims[name], 3)}" if has_own_claims else ""
    )


@contextmanager
def _show_progress() -> Iterator[Callable[[float], None]]:
    """Show progress on stderr, as a bar on a terminal that can draw one and in lines elsewhere.

    Yields:
        Function to call with the share of the work that is finished, approximately, from 0 to 1.
    """
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("auditing", total=1.0)
            yield lambda share: progress.update(bar, completed=share)
        return
    last_time = time.monotonic()

    def write_line(share: float) -> None:
        nonlocal last_time
        if time.monotonic() - last_time > _LINE_SECONDS:
            last_time = time.monotonic()
            sys.stderr.write(f"fedpriv: auditing, {100 * share:.0f} % done\n")

    sys.stderr.write("fedpriv: auditing\n")
    yield write_line


def _format_report(outcome: Audit) -> str:
    """Format the outcome as lines: the claim, the bound, the tests and the loss of noise they detect."""
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
