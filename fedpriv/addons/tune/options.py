"""Commands of this add-on and their options. The implementation of a command is imported when it is called."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.cli.options import Imports, Overrides, expand_option_groups


@dataclass(frozen=True)
class TuneRequest:
    """Options of `fedpriv tune`. A tuning file may set some of them."""

    scenario: Annotated[
        Path,
        typer.Argument(
            metavar="SCENARIO", help="A scenario by name or file, or a file that names one with grids."
        ),
    ]
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=[VALUE, …]",
            help="Values to try; by default factors from 1/9 to 9 of the numbers in [algorithm]. Repeatable.",
        ),
    ] = None
    trials: Annotated[
        float | None,
        typer.Option(
            help="Number of settings of every row, at random; with --private the mean number of runs.  "
            "[default: the whole grid; 25 if no grid is given; 20 with --private]"
        ),
    ] = None
    held_out: Annotated[
        int | None, typer.Option(min=1, help="Training records to compare on, the last ones; a tenth by default.")
    ] = None
    seeds: Annotated[
        list[int] | None, typer.Option(min=0, help="Seed of the trials. Repeatable.  [default: 100]")
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(
            help="Metric by which settings are compared.  [default: test_accuracy of classes; else test_r2 if "
            "run.metrics has it, or test_loss]"
        ),
    ] = None
    fixed: Annotated[
        list[str] | None,
        typer.Option("--while-tuning", metavar="KEY=VALUE", help="A key that holds while tuning. Repeatable."),
    ] = None
    overrides: Overrides = None
    out: Annotated[Path | None, typer.Option(help="Where results go; runs/NAME-tuned by default.")] = None
    private: Annotated[
        bool,
        typer.Option("--private", help="Publish the best of a random number of runs only, and charge for it."),
    ] = False
    eta: Annotated[
        float,
        typer.Option(
            help="Shape of the distribution of the number of private runs: 0 logarithmic, "
            "1 geometric, others between and beyond."
        ),
    ] = 0.0
    poisson: Annotated[bool, typer.Option("--poisson", help="A Poisson number of private runs instead.")] = False
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seed of the settings that are tried. With --private only for tests: it is then no secret.",
        ),
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Resume a tuning that was stopped.")] = False
    workers: Annotated[int | None, typer.Option(min=1, help="Run groups of trials in so many processes.")] = None
    imports: Imports = None


@expand_option_groups
def tune(request: TuneRequest) -> None:
    """Choose settings on held-out training records, and write the scenario with them.

    The test set is not looked at. Without --private the choice reads records without noise, and no ε covers it.

    Examples:

        fedpriv tune quickstart

        fedpriv tune my.toml --grid algorithm.step=[0.1,1,10] --grid algorithm.clip=[0.5,1,2] --held-out 1000

        fedpriv tune my.toml --private --trials 10
    """
    from fedpriv.addons.tune.command import tune_scenario

    tune_scenario(request)


def register(app: Any, silo: Any, data: Any) -> None:
    """Add the command `tune` to `fedpriv`, and none to `fedpriv silo` and `fedpriv data`."""
    app.command()(tune)
