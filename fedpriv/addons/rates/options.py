"""Command of this add-on and its options. The implementation is imported when it is called."""

from pathlib import Path
from typing import Annotated, Any

import typer

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


def register(_app: Any, _silo: Any, _data: Any) -> None:
    """Add nothing more: importing this module has added the command to `fedpriv privacy`."""
