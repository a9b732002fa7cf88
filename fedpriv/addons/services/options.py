"""Commands of this add-on: their options.  What a command does is imported when it is called."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.addons.services.federation_command import app as federation_app
from fedpriv.cli.options import Metrics
from fedpriv.core.errors import InputError


def superlink(
    control: Annotated[
        Path, typer.Option(metavar="SOCKET", help="Where its owner, and nobody else, starts runs: a Unix socket.")
    ],
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="With ca.crt, server.pem, server.key and nodes/silo-N.pub."),
    ] = None,
    host: Annotated[str, typer.Option(help="Where SuperNodes connect.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where SuperNodes connect.")] = 8000,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS, and any SuperNode may connect: on your own machine only.")
    ] = False,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keeps the list of runs over restarts; made, mode 0600.")
    ] = None,
    simulation: Annotated[
        bool, typer.Option("--simulation", help="No SuperNodes: for Flower's Ray engine.")
    ] = False,
    metrics: Metrics = None,
) -> None:
    """Run Flower's SuperLink, where the server runs, until ended; SuperNodes reach nothing of it but messages.

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
        kept=state,
        metrics=metrics,
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
    metrics: Metrics = None,
) -> None:
    """Run a silo's SuperNode, which carries queries to the guard and releases back, until ended.

    A SuperLink that is away is waited for, with a line a minute. No code that the SuperLink sends is run, but with
    --apps, which is for apps that are not fedpriv's own.

    Example: fedpriv supernode --superlink fl.example.org:8000 --silo 0 --guard /run/fedpriv/guard.sock --keys node
    """
    from fedpriv.addons.services.supernode_process import run_supernode

    run_supernode(superlink, silo, guard, keys, insecure=insecure, health=health, metrics=metrics, apps=apps)


def certificates(
    places: Annotated[list[Path], typer.Argument(metavar="FOLDER|FILE...", help="Whose certificates to show.")],
    renew: Annotated[
        Path | None,
        typer.Option(metavar="AUTHORITY", help="Folder with ca.key and ca.crt: sign FOLDER/server.pem anew."),
    ] = None,
    revoke: Annotated[
        int | None, typer.Option(metavar="SILO", min=0, help="Take this silo's key out of FOLDER/nodes.")
    ] = None,
) -> None:
    """Show certificates and when they end; exit code 1 if one ends within 30 days. Renew a SuperLink's.

    Revoke a silo's key. A SuperLink that runs heeds either within seconds, and other sites do nothing.

    Example: fedpriv certificates deploy/run/superlink
    Example: fedpriv certificates deploy/run/superlink --renew deploy/run/authority
    Example: fedpriv certificates deploy/run/superlink --revoke 1
    """
    from fedpriv.addons.services.certificates import certificates_below
    from fedpriv.addons.services.certificates import renew as sign_anew
    from fedpriv.addons.services.certificates import revoke as take_away

    if revoke is not None:
        if renew is not None or len(places) != 1:
            raise InputError("--revoke: expected one FOLDER, the SuperLink's --keys, and no --renew")
        typer.echo(
            f"silo {revoke}: the key {take_away(places[0], revoke)} is revoked; a SuperLink that runs with "
            f"{places[0]} turns it away within seconds, without a restart"
        )
        return
    if renew is not None:
        for place in places:
            sign_anew(place, renew)
    found = list(certificates_below(places))
    for certificate in found:
        typer.echo(certificate.line())
    if any(certificate.ends_soon for certificate in found):
        raise typer.Exit(1)


def register(app: Any, silo: Any, data: Any) -> None:
    """Add the commands to those of `fedpriv`, `fedpriv silo` and `fedpriv data`."""
    app.command()(superlink)
    app.command()(supernode)
    app.command()(certificates)
    app.add_typer(federation_app, name="federation")
