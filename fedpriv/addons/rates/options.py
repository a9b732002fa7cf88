"""Commands of this add-on and their options. Heavy modules are imported when a command is called."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.addons.rates.theorem import theorem
from fedpriv.cli.options import Json
from fedpriv.cli.privacy import app as privacy_app


@privacy_app.command()
def rates(
    paper: Annotated[
        str,
        typer.Argument(metavar="PAPER", help="reshef-levy, tran-cutkosky, kornowski or choquette-choo."),
    ],
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file: .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Print a paper's rates as lines with fitted exponents, by formulas and accounting alone.

    Examples:

        fedpriv privacy rates reshef-levy

        fedpriv privacy rates tran-cutkosky --plot momentum.png
    """
    from fedpriv.addons.rates.rates import print_rates

    print_rates(paper, plot, as_json)


@privacy_app.command()
def samples(
    target: Annotated[float, typer.Option(help="β: of the Goldstein measure, in units of a gradient.")],
    radius: Annotated[float, typer.Option(help="2α: the radius of the measure, in units of a parameter.")],
    epsilon: Annotated[list[float], typer.Option(help="ε of the run. Repeatable.")],
    dimension: Annotated[list[int], typer.Option(help="Parameters. Repeatable.")],
    delta: Annotated[float, typer.Option(help="δ of the run.")] = 1e-5,
    lipschitz: Annotated[float, typer.Option(help="L: of every record's loss.")] = 1.0,
    gap: Annotated[float, typer.Option(help="Φ: what the loss can fall by from the start.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Print the records that Goldstein stationarity needs: Table 1 of Kornowski, Liu & Talwar.

    Results as printed are without constants and logarithms; the explicit bounds have all of them, with exact
    smoothing, replace-one and a trusted server.

    Example:

        fedpriv privacy samples --target 0.3 --radius 0.5 --epsilon 1 --dimension 8 --dimension 7850
    """
    from fedpriv.addons.rates.samples import SamplesRequest, print_samples

    print_samples(SamplesRequest(target, radius, epsilon, dimension, delta, lipschitz, gap), as_json)


privacy_app.command()(theorem)


def register(_app: Any, _silo: Any, _data: Any) -> None:
    """Add nothing more: importing this module has added the commands to `fedpriv privacy`."""
