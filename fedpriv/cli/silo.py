"""`fedpriv silo`: a silo's guard and its ledger, by whoever administers the silo."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


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
        from fedpriv.clients.template import write_template

        write_template(policy)
        typer.echo(f"wrote {policy}: set the keys marked with # choose, then begin its ledger")
        return
    from fedpriv.clients.guards import begin_ledgers
    from fedpriv.clients.policy import read_policy

    for begun in begin_ledgers(read_policy(policy)):
        typer.echo(f"began {begun.ledger}, marked in {begun.marked}; keep both as long as the records")


@app.command()
def run(policy: Policy) -> None:
    """Run the guard until it is ended.  `fedpriv silo POLICY` is the same.

    Example: fedpriv silo run silo-0.toml
    """
    from fedpriv.clients.daemon import serve

    serve(policy, ready=lambda socket: typer.echo(f"answering on {socket}"))


@app.command()
def status(policy: Policy) -> None:
    """Show what was spent, by which runs, and what is left; also while the guard runs.

    Example: fedpriv silo status silo-0.toml
    """
    from fedpriv.clients.status import status_lines

    for line in status_lines(policy):
        typer.echo(line)


@app.command()
def end(
    policy: Policy, run_id: Annotated[str, typer.Argument(metavar="RUN", help="As `status` shows it.")]
) -> None:
    """End a run that nobody will resume: its key and sums are wiped, its price stays spent.

    Example: fedpriv silo end silo-0.toml 5f0c2d
    """
    from fedpriv.clients.status import end_run

    end_run(policy, run_id)
    typer.echo(f"ended {run_id!r}: its key and its state are wiped")
