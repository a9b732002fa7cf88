"""Command `fedpriv audit` and its options, whose implementation is imported when it is called."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.cli.options import Imports, Json, Overrides, expand_option_groups


@dataclass(frozen=True)
class AuditRequest:
    """Options of `fedpriv audit`."""

    scenario: Annotated[
        Path,
        typer.Argument(
            metavar="SCENARIO", help="A scenario, of which the first cell is audited, or a plan of statistics."
        ),
    ]
    imports: Imports = None
    overrides: Overrides = None
    mu: Annotated[float, typer.Option(help="The claim: the scenario is recalibrated to it.")] = 1.0
    trials: Annotated[
        int,
        typer.Option(
            help="Number of canaries. In a public order a quarter or more are in the round where they weigh most."
        ),
    ] = 16_384
    confidence: Annotated[float, typer.Option(help="Confidence of the lower bound that is shown.")] = 0.99
    seed: Annotated[int, typer.Option(help="Seed of the coins; noise has a key of the operating system.")] = 0
    store: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Keep the outcome with this run; its report shows it.")
    ] = None
    as_json: Json = False


@expand_option_groups
def audit(request: AuditRequest) -> None:
    """Try to refute the privacy claim with canaries, exit code 0 if it stands and 3 if it is refuted.

    Example: fedpriv audit scenarios/quickstart.toml --set algorithm.trust=trusted
    """
    from fedpriv.core.files import find_scenario_file

    find_scenario_file(request.scenario)
    from fedpriv.addons.audit.command import audit_scenario

    audit_scenario(request)


def register(app: Any, silo: Any, data: Any) -> None:
    """Add the command `audit` to `fedpriv`, and none to `fedpriv silo` and `fedpriv data`."""
    app.command()(audit)
