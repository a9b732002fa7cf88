"""Commands of this add-on and their options. The implementation of a command is imported when it is called.

`fedpriv federation` shows the coordinator's silos and runs through the SuperLink's control socket, and stops runs.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli.options import MetricsAddress
from fedpriv.core.errors import InputError, refuse

if TYPE_CHECKING:
    from fedpriv.addons.services.flower_private.control import ControlClient
    from fedpriv.addons.services.flower_private.presence import FederationRun, FederationSilo


federation = typer.Typer(
    help="The coordinator's view of its silos and runs.", no_args_is_help=True, suggest_commands=False
)
SuperLink = Annotated[
    str, typer.Option("--superlink", metavar="unix:SOCKET", help="The SuperLink's control socket.")
]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
_SOCKET = "unix:/run/fedpriv/control.sock"


@federation.command()
def status(superlink: SuperLink = _SOCKET, as_json: Json = False) -> None:
    """Show every silo: connected or since when not, version, clock. Exit code 1 if one is not connected.

    Example: fedpriv federation status --superlink unix:/run/fedpriv/control.sock
    """
    from fedpriv.addons.services.flower_private.presence import list_silos

    silos = list_silos(_make_control(superlink))
    _print_entries(
        silos,
        "no key of a SuperNode is registered: the SuperLink was started with --insecure or --simulation",
        as_json,
    )
    if not all(silo.connected for silo in silos):
        raise typer.Exit(1)


@federation.command()
def runs(superlink: SuperLink = _SOCKET, as_json: Json = False) -> None:
    """Show the last hundred runs: state, start, rounds done, and whether a `fedpriv run` follows them.

    Example: fedpriv federation runs --json
    """
    from fedpriv.addons.services.flower_private.presence import list_runs

    _print_entries(
        list_runs(_make_control(superlink)), "no run was started since the SuperLink began its records", as_json
    )


@federation.command()
def stop(
    run: Annotated[str, typer.Argument(metavar="RUN", help="As `runs` shows it.")], superlink: SuperLink = _SOCKET
) -> None:
    """End a run, such as one whose `fedpriv run` was killed. What silos released stays charged; it can be resumed.

    Example: fedpriv federation stop 8204916734401
    """
    if not (run.isascii() and run.isdigit() and len(run) <= 20 and int(run) < 2**64):
        raise InputError(f"{run!r} is no run; `fedpriv federation runs` lists them")
    _make_control(superlink).stop_run(int(run))
    typer.echo(f"stopped run {run}; its `fedpriv run` command with --resume goes on with it")


def _make_control(superlink: str) -> "ControlClient":
    from fedpriv.addons.services.flower_private.control import ControlClient

    if not superlink.startswith("unix:"):
        from fedpriv.engines.table import Connection  # imports torch

        Connection(superlink)  # refuses an invalid address
    return ControlClient(superlink)


def _print_entries(entries: "Sequence[FederationSilo | FederationRun]", empty_text: str, as_json: bool) -> None:
    typer.echo(
        json.dumps([asdict(entry) for entry in entries], indent=2)
        if as_json
        else "\n".join([entry.format_line() for entry in entries] or [empty_text])
    )


def superlink(
    control: Annotated[
        Path, typer.Option(metavar="SOCKET", help="Where its owner (and root) starts runs: a Unix socket.")
    ],
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="With ca.crt, server.pem, server.key and nodes/silo-N.pub."),
    ] = None,
    host: Annotated[str, typer.Option(help="Where SuperNodes connect.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where SuperNodes connect.")] = 8000,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Any SuperNode may connect, and without --keys without TLS: for one machine."
        ),
    ] = False,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keeps the list of runs over restarts; made, mode 0600.")
    ] = None,
    simulation: Annotated[
        bool, typer.Option("--simulation", help="No SuperNodes: for Flower's Ray engine.")
    ] = False,
    metrics: MetricsAddress = None,
) -> None:
    """Run Flower's SuperLink, where the server runs, until ended. SuperNodes reach no API of it but the Fleet API.

    Example: fedpriv superlink --control /run/fedpriv/control.sock --keys deploy/run/superlink --host 0.0.0.0
    """
    from fedpriv.addons.services.superlink_process import serve_superlink

    serve_superlink(
        control,
        keys,
        host=host,
        port=port,
        simulation=simulation,
        insecure=insecure,
        runs_path=state,
        metrics_address=metrics,
    )


def supernode(
    superlink: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The SuperLink, as its certificate names it.")
    ],
    silo: Annotated[int, typer.Option(min=0, metavar="N", help="The silo's number.")],
    guard: Annotated[Path, typer.Option(metavar="SOCKET", help="Where the silo's guard answers.")],
    keys: Annotated[Path | None, typer.Option(metavar="FOLDER", help="With ca.crt and node.key.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS and no key: on your own machine only.")
    ] = False,
    health: Annotated[
        Path | None, typer.Option(metavar="SOCKET", help="Where it says how it is, as a guard does; else nowhere.")
    ] = None,
    apps: Annotated[
        bool, typer.Option("--apps", help="Run the apps that the SuperLink sends, as Flower's own SuperNode does.")
    ] = False,
    metrics: MetricsAddress = None,
) -> None:
    """Run a silo's SuperNode, which carries queries to the guard and releases back, until ended.

    A SuperLink that is away is waited for, with a line a minute. With --apps, for apps that are not fedpriv's own,
    code that the SuperLink sends is run, and never without.

    Example: fedpriv supernode --superlink fl.example.org:8000 --silo 0 --guard /run/fedpriv/guard.sock --keys node
    """
    from fedpriv.addons.services.supernode_process import run_supernode

    run_supernode(
        superlink, silo, guard, keys, insecure=insecure, health_path=health, metrics_address=metrics, apps=apps
    )


def certificates(
    places: Annotated[list[Path], typer.Argument(metavar="FOLDER|FILE...", help="Whose certificates to show.")],
    renew: Annotated[
        Path | None,
        typer.Option(metavar="AUTHORITY", help="Folder with ca.key and ca.crt: sign FOLDER/server.pem anew."),
    ] = None,
    revoke: Annotated[
        int | None, typer.Option(metavar="SILO", min=0, help="Take this silo's key out of FOLDER/nodes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show certificates and when they end. Exit code 1 if one ends within 30 days. Renew a SuperLink's.

    Or revoke a silo's key. A SuperLink that runs heeds a renewal or a revocation within seconds, without a
    restart, and the silos have to do nothing.

    Example: fedpriv certificates deploy/run/superlink
    Example: fedpriv certificates deploy/run/superlink --renew deploy/run/authority
    Example: fedpriv certificates deploy/run/superlink --revoke 1
    """
    from fedpriv.addons.services import certificates as certified

    if revoke is not None:
        refuse(
            {
                "--revoke: expected one FOLDER, the SuperLink's --keys, and no --renew": (
                    renew is not None or len(places) != 1
                )
            }
        )
        typer.echo(
            f"silo {revoke}: the key {certified.revoke_key(places[0], revoke)} is revoked; "
            f"a SuperLink that runs with {places[0]} turns it away within seconds, without a restart"
        )
        return
    if renew is not None:
        for place in places:
            certified.renew_certificate(place, renew)
    rows = list(certified.find_certificates(places))
    typer.echo(
        json.dumps(
            [
                {
                    "file": str(certificate.path),
                    "subject": certificate.content.subject.rfc4514_string(),
                    "end": certificate.content.not_valid_after_utc.isoformat(),
                    "days_left": certificate.remaining_time.days,
                    "expires_soon": certificate.expires_soon,
                }
                for certificate in rows
            ],
            indent=2,
        )
        if as_json
        else "\n".join(certificate.format_line() for certificate in rows)
    )
    if any(certificate.expires_soon for certificate in rows):
        raise typer.Exit(1)


def register(app: Any, silo: Any, data: Any) -> None:
    """Add the commands to those of `fedpriv`."""
    for command in (superlink, supernode, certificates):
        app.command()(command)
    app.add_typer(federation, name="federation")
