"""Options of this add-on's commands, whose code is imported when a command is called."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.cli.options import Imports, PolicyPath
from fedpriv.core.errors import InputError


def key(policy: PolicyPath) -> None:
    """Print the public key by which readers of certificates know this silo, and make it if it is missing.

    Its private half stays on this machine: the policy's identity, or a file beside the ledger, mode 0600.

    Example: fedpriv silo key silo-0.toml
    """
    from fedpriv.addons.certificate.attest import key_line

    typer.echo(key_line(policy))


def sign(
    policy: PolicyPath,
    certificate: Annotated[Path, typer.Argument(metavar="CERTIFICATE", help="As `fedpriv certify` wrote it.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="silo-N.json beside the certificate by default.")
    ] = None,
) -> None:
    """Sign a ledger's facts on a certified run: its charge, earlier charges, remaining budget.

    The run is planned again from the ledger's scenario, with the shapes of the records. Refused for a run that
    the ledger does not have, for releases that are not the plan's, and for a charge that is not its price.

    Example: fedpriv silo sign silo-0.toml certificate.json
    """
    from fedpriv.addons.certificate.command import sign as signed

    signed(policy, certificate, out)


def certify(
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="RUN_DIR", help="The folder that `fedpriv run` wrote.")
    ] = None,
    key: Annotated[
        Path, typer.Option(metavar="FILE", help="The coordinator's Ed25519 key; made where there is none.")
    ] = Path("coordinator.key"),
    cell: Annotated[
        int | None, typer.Option(help="Which cell's model is released, where there are several.")
    ] = None,
    people: Annotated[
        Path | None, typer.Option(metavar="TOML", help="What only people know: purpose, retention, …")
    ] = None,
    say: Annotated[list[str] | None, typer.Option(metavar="KEY=TEXT", help="One such fact. Repeatable.")] = None,
    signed: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="What `fedpriv silo sign` wrote. Repeatable.")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Recompute this certificate, without the data.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --verify: whom you trust, lines of NAME KEY.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --verify: the model that you got.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Certify a released model: its claim, releases and budgets in one signed JSON, and pages made of it.

    Every silo of a deployment signs the draft, by `fedpriv silo sign`. With --verify the exit code is 0 only if
    the coordinator and a deployment's silos, whom you trust, signed it, and its privacy figures fit its releases.

    Examples:

        fedpriv certify runs/quickstart --key coordinator.key --say purpose="A course"

        fedpriv certify --verify runs/quickstart/certificate.json --keys trusted-keys --model model.npy
    """
    from fedpriv.addons.certificate import command
    from fedpriv.core.extensions import import_files

    import_files(imports or [])
    if (run_dir is None) == (verify is None):
        raise InputError("certify: give either RUN_DIR, to certify it, or --verify FILE")
    if verify is not None:
        command.verify(verify, keys, model)
    elif run_dir is not None:
        command.certify(run_dir, key, cell, people, say or [], signed or [])


def register(app: Any, silo: Any, data: Any) -> None:
    """Add `certify` to the commands of `fedpriv`, and `key` and `sign` to those of `fedpriv silo`."""
    app.command()(certify)
    silo.command()(key)
    silo.command()(sign)
