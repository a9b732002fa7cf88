"""Commands `fedpriv silo …`: a silo's guard and its ledger, for the silo's administrator.

The guard is the process that has the silo's records and answers what the silo's policy allows.  The ledger stores
the charge of each run to the records' privacy budget, and digests of the run's queries and replies.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedpriv.cli.options import MetricsAddress, PolicyPath
from fedpriv.core.errors import refuse
from fedpriv.core.limits import report_low_memory


class _DefaultRunGroup(TyperGroup):
    """Group of commands in which `fedpriv silo POLICY` means `fedpriv silo run POLICY`.

    A policy file with the name of a command needs the long form.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_DefaultRunGroup,
    help="Run and administer a silo's guard, which has the records and answers what its policy allows.",
    no_args_is_help=True,
    suggest_commands=False,
)


@app.command()
def init(
    policy: PolicyPath,
    template: Annotated[bool, typer.Option("--template", help="Only write a policy file to be edited.")] = False,
    spent_mu: Annotated[
        float | None,
        typer.Option("--spent", metavar="MU", help="Budget of these records that was spent elsewhere before."),
    ] = None,
    spent_slack: Annotated[float, typer.Option(metavar="DELTA", help="With --spent: its slack.")] = 0.0,
    said_by: Annotated[
        str, typer.Option(metavar="TEXT", help="With --spent: who says so, and how it is known.")
    ] = "",
) -> None:
    """Begin the ledger of a policy's records, before the guard is started for the first time.

    A policy with [evaluation] has a second ledger, of its test records. --spent charges what other programs
    released of the training records, and the ledger keeps who said so. --spent-slack is the slack of this charge,
    the probability with which its MU may fail.

    Example: fedpriv silo init silo-0.toml --template
    Example: fedpriv silo init silo-0.toml
    Example: fedpriv silo init silo-0.toml --spent 0.5 --said-by "J. Doe, from the report on the model of 2025"
    """
    if template:
        from fedpriv.silo.policy import write_template

        write_template(policy)
        typer.echo(f"wrote {policy}: set the keys marked with # choose, then begin its ledger")
        return
    refuse({"--spent-slack, --said-by: give --spent, too": spent_mu is None and bool(spent_slack or said_by)})
    with report_low_memory(policy):
        from fedpriv.silo.guards import begin_ledgers
        from fedpriv.silo.policy import read_policy

        begun_ledgers = begin_ledgers(
            read_policy(policy), None if spent_mu is None else (spent_mu, spent_slack, said_by)
        )
    for new_ledger in begun_ledgers:
        typer.echo(
            f"began {new_ledger.ledger}, marked in {new_ledger.mark_path}; keep both as long as the records"
        )
    typer.echo(
        f"the records' key is {begun_ledgers[0].shard_key}; keep it with them, and out of the ledger's backups"
    )


@app.command()
def run(policy: PolicyPath, metrics: MetricsAddress = None) -> None:
    """Run the guard until it is ended.  `fedpriv silo POLICY` is short for it.

    Example: fedpriv silo run silo-0.toml
    Example: fedpriv silo run silo-0.toml --metrics 9464
    """
    with report_low_memory(policy):
        from fedpriv.core.logs import configure_service_logging
        from fedpriv.silo.daemon import serve_guard
        from fedpriv.silo.policy import read_policy

        configure_service_logging(silo=read_policy(policy).silo)
        serve_guard(policy, lambda socket: typer.echo(f"answering on {socket}"), metrics)


@app.command()
def status(
    policy: PolicyPath,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Also recompute the prices of runs from their scenarios, for which the records are opened.",
        ),
    ] = False,
) -> None:
    """Show the spent budget by run, and the remaining budget, also while the guard runs.

    Example: fedpriv silo status silo-0.toml
    Example: fedpriv silo status silo-0.toml --check
    """
    with report_low_memory(policy):
        from fedpriv.silo.guards import format_price_check, format_status

        typer.echo("\n".join([*format_status(policy), *(format_price_check(policy) if check else ())]))


@app.command()
def end(
    policy: PolicyPath,
    run_id: Annotated[
        str, typer.Argument(metavar="RUN", help="Name of the run, as `fedpriv silo status` shows it.")
    ],
) -> None:
    """End a run that will not be resumed. Its key and state are wiped, and its price stays spent.

    Example: fedpriv silo end silo-0.toml 5f0c2d
    """
    from fedpriv.silo.guards import end_run

    end_run(policy, run_id)
    typer.echo(f"ended {run_id!r}: its key and its state are wiped")


@app.command()
def backup(
    policy: PolicyPath, folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the copies.")]
) -> None:
    """Copy a policy's ledgers, without keys, replies and the records' key, also while the guard runs.

    Make one after each run: a backup that lacks a release costs the whole budget when it is restored.

    Example: fedpriv silo backup silo-0.toml /mnt/backup/silo-0
    """
    from fedpriv.silo.backup import back_up_ledgers

    for copy in back_up_ledgers(policy, folder):
        typer.echo(f"copied {copy}")


@app.command()
def restore(
    policy: PolicyPath,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of the copies, as given to `fedpriv silo backup`.")
    ],
) -> None:
    """Put copies in the place of ledgers that are gone, so that no budget is spent twice.

    Runs that were under way are over. If the mark says that nothing was released since the backup, the budget is
    as before. Otherwise, and without the key that lay beside the records, the whole budget is charged, because
    nobody knows what was released, or of which records. An older copy of the mark hides releases: never
    put one back.

    Example: fedpriv silo restore silo-0.toml /mnt/backup/silo-0
    """
    from fedpriv.silo.backup import restore_ledgers as restored

    for line in restored(policy, folder):
        typer.echo(line)
