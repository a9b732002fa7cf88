"""Commands of this add-on and their options. The implementation of a command is imported when it is called."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.cli.options import PolicyPath


def worth(
    run_or_scenario: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR|SCENARIO", help="A run's folder, or a scenario by name or file."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key. Repeatable.")
    ] = None,
    pooled: Annotated[
        bool, typer.Option("--pooled", help="Also the records of all silos in one place, without noise.")
    ] = False,
    any_learner: Annotated[
        bool, typer.Option("--any-learner", help="Also the best of the model, kernel ridge and boosted trees.")
    ] = False,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="Only fit the local models, of every seed and model. Tables and reports show them.",
        ),
    ] = False,
    personal: Annotated[
        bool,
        typer.Option(
            "--personal", help="Also personal models: local ones that are pulled towards the released one."
        ),
    ] = False,
    trust: Annotated[
        list[str] | None,
        typer.Option("--trust", help="A trust setting to compare; by default all but a curator. Repeatable."),
    ] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="A point of the grid (.1 .3 1 3 10 30). Repeatable.")
    ] = None,
    splits: Annotated[
        int | None, typer.Option(min=0, help="Drawn splits into training and test; 0: only the published one.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=2, help="Noise seeds in each split; 2 by default.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the gain against ε: .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, silo by silo.")] = False,
) -> None:
    """Is it worth joining? Compares models that each silo trains alone with those of a run.

    Nothing of the local models is released.

    With --splits, --seeds, --trust, --epsilon or --plot it runs the scenario over a grid of ε and says from which
    on joining pays. It reads the records of all silos, so it is for simulations and public data.

    Examples:

        fedpriv worth heart-hospitals --pooled

        fedpriv worth heart-hospitals --splits 20 --plot gain.svg

        fedpriv worth runs/heart-hospitals
    """
    from fedpriv.addons.worth.command import WorthRequest
    from fedpriv.addons.worth.command import print_worth as compare

    # Any of these options asks for a grid of ε, which has two seeds without `--seeds`.
    grid = None
    if trust or epsilon or splits is not None or seeds is not None or plot is not None:
        grid = (tuple(trust or ()), tuple(sorted(set(epsilon or ()))), splits, seeds or 2, plot)
    compare(run_or_scenario, overrides or [], WorthRequest(pooled, any_learner, alone, personal, grid, as_json))


def refine(
    policy: PolicyPath,
    scenario: Annotated[
        Path, typer.Option(metavar="SCENARIO", help="The run's scenario, whose model and features are used.")
    ],
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The released model (.npy), as the run's folder has it.")
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Further records that the guard never held; 10 or more of them choose the pull."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where the model goes, mode 0600.")] = None,
    alone: Annotated[
        bool,
        typer.Option("--alone", help="Only the learning curve of this silo alone, in place of --model."),
    ] = False,
) -> None:
    """Compare this silo's local model, the released one, and a personal model pulled towards it. Opens no socket.

    What it prints and writes is a function of this silo's records without noise: it is for nobody else.

    Example: fedpriv silo refine silo-0.toml --scenario run.toml --model model.npy --out refined
    Example: fedpriv silo refine silo-0.toml --scenario run.toml --alone
    """
    from fedpriv.addons.worth.refine import print_refined

    print_refined(policy, scenario, model, held_out, out, only_curve=alone)


def register(app: Any, silo: Any, data: Any) -> None:
    """Add `worth` to the commands of `fedpriv`, and `refine` to those of `fedpriv silo`."""
    app.command()(worth)
    silo.command()(refine)
