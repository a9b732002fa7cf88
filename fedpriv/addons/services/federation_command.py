"""`fedpriv federation`: the coordinator's view of silos and runs, through the SuperLink's control socket."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedpriv.addons.services.federation import RunSeen, SiloSeen
    from fedpriv.addons.services.flower_private.control import Control

app = typer.Typer(
    help="The coordinator's view of its silos and runs.", no_args_is_help=True, suggest_commands=False
)
SuperLink = Annotated[
    str, typer.Option("--superlink", metavar="unix:SOCKET", help="The SuperLink's control socket.")
]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
_SOCKET = "unix:/run/fedpriv/control.sock"


@app.command()
def status(superlink: SuperLink = _SOCKET, as_json: Json = False) -> None:
    """Show every silo: connected or since when not, version, clock. Exit code 1 if one is not connected.

    Example: fedpriv federation status --superlink unix:/run/fedpriv/control.sock
    """
    from fedpriv.addons.services.federation import silos_of

    silos = silos_of(_control(superlink))
    _show(silos, "no key of a SuperNode is registered: the SuperLink was started with --insecure", as_json)
    if not all(silo.connected for silo in silos):
        raise typer.Exit(1)


@app.command()
def runs(superlink: SuperLink = _SOCKET, as_json: Json = False) -> None:
    """Show the last hundred runs: state, start, rounds done, and whether a `fedpriv run` still follows them.

    Example: fedpriv federation runs --json
    """
    from fedpriv.addons.services.federation import runs_of

    _show(runs_of(_control(superlink)), "no run was started since the SuperLink began its records", as_json)


@app.command()
def stop(
    run: Annotated[str, typer.Argument(metavar="RUN", help="As `runs` shows it.")], superlink: SuperLink = _SOCKET
) -> None:
    """End a run, such as one whose `fedpriv run` was killed. What silos released stays charged; it can be resumed.

    Example: fedpriv federation stop 8204916734401
    """
    from fedpriv.core.errors import InputError

    if not (run.isascii() and run.isdigit() and int(run) < 2**64):
        raise InputError(f"{run!r} is no run; `fedpriv federation runs` lists them")
    _control(superlink).stop_run(int(run))
    typer.echo(f"stopped run {run}; its `fedpriv run` command with --resume goes on with it")


def _control(superlink: str) -> "Control":
    from fedpriv.addons.services.flower_private.control import Control
    from fedpriv.engines.table import Connection

    Connection(superlink)  # which refuses what is no address
    return Control(superlink)


def _show(seen: "Sequence[SiloSeen | RunSeen]", none: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in seen], indent=2))
        return
    for line in [each.line() for each in seen] or [none]:
        typer.echo(line)
