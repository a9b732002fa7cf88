"""`fedpriv superlink` and `fedpriv supernode`: Flower's processes, reached by nobody who need not."""

from pathlib import Path
from typing import Annotated

import typer


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
    simulation: Annotated[
        bool, typer.Option("--simulation", help="No SuperNodes: for Flower's Ray engine.")
    ] = False,
) -> None:
    """Run Flower's SuperLink, where the server runs, until ended; SuperNodes reach nothing of it but messages.

    Example: fedpriv superlink --control /run/fedpriv/control.sock --keys deploy/run/superlink --host 0.0.0.0
    """
    from fedpriv.engines.superlink_process import serve_superlink

    serve_superlink(control, keys, host=host, port=port, simulation=simulation, insecure=insecure)


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
) -> None:
    """Run a silo's SuperNode, which carries queries to the guard and releases back, until ended.

    Example: fedpriv supernode --superlink fl.example.org:8000 --silo 0 --guard /run/fedpriv/guard.sock --keys node
    """
    from fedpriv.engines.supernode_process import become_supernode

    become_supernode(superlink, silo, guard, keys, insecure=insecure)
