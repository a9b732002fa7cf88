"""`fedpriv silo`: a silo's guard and its ledger, for the silo's administrator.

`fedpriv certify`: the certificate of a released model, which silos sign.

`fedpriv superlink` and `fedpriv supernode`: Flower's processes, reachable only by the programs that need them.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedpriv.cli.options import Imports
from fedpriv.core.errors import InputError
from fedpriv.core.limits import with_room


class _RunByDefault(TyperGroup):
    """`fedpriv silo POLICY` means `fedpriv silo run POLICY`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    help="A silo's guard: the process that has its records and answers what its policy allows.",
    no_args_is_help=True,
    suggest_commands=False,
)
Policy = Annotated[Path, typer.Argument(metavar="POLICY", help="The silo's policy file (TOML).")]
Metrics = Annotated[
    str | None,
    typer.Option(metavar="PORT|SOCKET", help="Where this machine, and no other, asks for Prometheus figures."),
]


@app.command()
def init(
    policy: Policy,
    template: Annotated[
        bool, typer.Option("--template", help="Write a policy file to be edited, and begin nothing.")
    ] = False,
) -> None:
    """Begin the ledger of a policy's records: once, before the guard is started for the first time.

    A policy with [evaluation] has a second one, of its test records.

    Example: fedpriv silo init silo-0.toml --template
    Example: fedpriv silo init silo-0.toml
    """
    if template:
        from fedpriv.silo.policy import write_template

        write_template(policy)
        typer.echo(f"wrote {policy}: set the keys marked with # choose, then begin its ledger")
        return
    with with_room(policy):
        from fedpriv.silo.guards import begin_ledgers
        from fedpriv.silo.policy import read_policy

        begun_ledgers = begin_ledgers(read_policy(policy))
    for begun in begun_ledgers:
        typer.echo(f"began {begun.ledger}, marked in {begun.marked}; keep both as long as the records")
    typer.echo(
        f"the records' key is {begun_ledgers[0].shard_key}; keep it with them, and out of the ledger's backups"
    )


@app.command()
def run(policy: Policy, metrics: Metrics = None) -> None:
    """Run the guard until it is ended.  `fedpriv silo POLICY` is the same.

    Example: fedpriv silo run silo-0.toml
    Example: fedpriv silo run silo-0.toml --metrics 9464
    """
    with with_room(policy):
        from fedpriv.core.logs import log_as_service
        from fedpriv.silo.daemon import serve
        from fedpriv.silo.policy import read_policy

        log_as_service(silo=read_policy(policy).silo)
        serve(policy, lambda socket: typer.echo(f"answering on {socket}"), metrics)


@app.command()
def status(
    policy: Policy,
    check: Annotated[
        bool, typer.Option("--check", help="Recompute every price from its scenario, too; opens the records.")
    ] = False,
) -> None:
    """Show what was spent, by which runs, and what is left; also while the guard runs.

    Every row of the ledger is checked: what is shown is what was written.

    Example: fedpriv silo status silo-0.toml
    Example: fedpriv silo status silo-0.toml --check
    """
    with with_room(policy):
        from fedpriv.silo.guards import checked_lines, status_lines

        lines = [*status_lines(policy), *(checked_lines(policy) if check else ())]
    for line in lines:
        typer.echo(line)


@app.command()
def end(
    policy: Policy, run_id: Annotated[str, typer.Argument(metavar="RUN", help="As `status` shows it.")]
) -> None:
    """End a run that nobody will resume: its key and sums are wiped, its price stays spent.

    Example: fedpriv silo end silo-0.toml 5f0c2d
    """
    from fedpriv.silo.guards import end_run

    end_run(policy, run_id)
    typer.echo(f"ended {run_id!r}: its key and its state are wiped")


@app.command()
def key(policy: Policy) -> None:
    """Print the public key by which readers of certificates know this silo; made where there is none.

    It is the policy's identity, or a key beside the ledger, mode 0600, that never leaves this machine.

    Example: fedpriv silo key silo-0.toml
    """
    from fedpriv.cli.certify import key_line

    typer.echo(key_line(policy))


@app.command()
def sign(
    policy: Policy,
    certificate: Annotated[Path, typer.Argument(metavar="CERTIFICATE", help="As `fedpriv certify` wrote it.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="silo-N.json beside the certificate by default.")
    ] = None,
) -> None:
    """Sign what this silo's ledger says of a certified run: its charge, all before it, what budget is left.

    The run is planned again from the ledger's scenario, with the shapes of the records. Refused for a run that
    the ledger does not have, for releases that are not the plan's, and for a charge that is not its price.

    Example: fedpriv silo sign silo-0.toml certificate.json
    """
    from fedpriv.cli.certify import sign as signed

    signed(policy, certificate, out)


@app.command()
def backup(
    policy: Policy, folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the copies go.")]
) -> None:
    """Copy a policy's ledgers, without keys, replies and the records' key; also while the guard runs.

    After each run is a good time: a backup that lacks a release costs the whole budget when it is restored.

    Example: fedpriv silo backup silo-0.toml /mnt/backup/silo-0
    """
    from fedpriv.silo.backup import back_up

    for copy in back_up(policy, folder):
        typer.echo(f"copied {copy}")


@app.command()
def restore(
    policy: Policy,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where `backup` put the copies.")],
) -> None:
    """Put copies in the place of ledgers that are gone, so that no budget is spent twice.

    If the mark says that nothing was released since, all is as before, and runs that were under way are over.
    Otherwise, and without the key that lay beside the records, the whole budget is charged: nobody knows what was
    released, or of which records.

    Example: fedpriv silo restore silo-0.toml /mnt/backup/silo-0
    """
    from fedpriv.silo.backup import restore as restored

    for line in restored(policy, folder):
        typer.echo(line)


@app.command()
def refine(
    policy: Policy,
    scenario: Annotated[
        Path, typer.Option(metavar="SCENARIO", help="The run's scenario, whose model and features are used.")
    ],
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The released model (.npy), as the run's folder has it.")
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Records like the shard that the guard never held: the pull is chosen on them."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where the model goes, mode 0600.")] = None,
    alone: Annotated[
        bool,
        typer.Option("--alone", help="Only the learning curve of this silo alone; no released model is needed."),
    ] = False,
) -> None:
    """Compare at home: this silo alone, the released model, and one's own pulled towards it. Opens no socket.

    What it prints and writes is a function of this silo's records without noise: it is for nobody else.

    Example: fedpriv silo refine silo-0.toml --scenario run.toml --model model.npy --out refined
    Example: fedpriv silo refine silo-0.toml --scenario run.toml --alone
    """
    from fedpriv.cli.refine import print_refined

    print_refined(policy, scenario, model, held_out, out, alone=alone)


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
    from fedpriv.engines.superlink_process import serve_superlink

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
    from fedpriv.engines.supernode_process import run_supernode

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
    from fedpriv.engines.certificates import certificates_below
    from fedpriv.engines.certificates import renew as sign_anew
    from fedpriv.engines.certificates import revoke as take_away

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

    Of a deployment every silo signs the draft, by `fedpriv silo sign`. With --verify the exit code is 0 only if
    all of it was signed by those whom you trust, and is what its releases give.

    Examples:

        fedpriv certify runs/quickstart --key coordinator.key --say purpose="A course"

        fedpriv certify --verify runs/quickstart/certificate.json --keys trusted-keys --model model.npy
    """
    from fedpriv.cli.certify import certify as write
    from fedpriv.cli.certify import verify as recompute
    from fedpriv.core.extensions import import_files

    import_files(imports or [])
    if (run_dir is None) == (verify is None):
        raise InputError("certify: give either RUN_DIR, to certify it, or --verify FILE")
    if verify is not None:
        recompute(verify, keys, model)
    elif run_dir is not None:
        write(run_dir, key, cell, people, say or [], signed or [])
