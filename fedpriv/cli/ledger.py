"""`fedpriv privacy ledger`: the claim of a run, recomputed from what it released."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli.text import print_table
from fedpriv.errors import InputError, RunError
from fedpriv.figures import lower_figure, upper_figure

if TYPE_CHECKING:
    from fedpriv.privacy.entries import LedgerEntry
    from fedpriv.privacy.ledger import ReleaseStream


def ledger(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A folder that `fedpriv run` wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Print what a run released, and recompute its claim from that alone; exit code 1 if they differ.

    Example:

        fedpriv privacy ledger runs/quickstart
    """
    from fedpriv.cli.tables import print_plain
    from fedpriv.privacy.elsewhere import ELSEWHERE, STEP_ELSEWHERE
    from fedpriv.privacy.entries import differing_words, read_ledger

    entries = read_ledger(run_dir)
    if not entries:
        raise InputError(
            f"{run_dir}: no finished cell whose claim could be compared yet; wait for one, or go on with --resume"
        )
    if as_json:
        typer.echo(json.dumps([_as_data(e) for e in entries]))
    else:
        header = ("cell", "point", "seed", "trust", "released by", "mechanism", "rounds", "clip", "noise std")
        lines: list[tuple[str, ...]] = [(*header, "relation", "μ", "claimed", "")]
        lines += [line for entry in entries for line in _ledger_lines(entry)]
        print_table(lines)
        if any(stream.owner == ELSEWHERE for entry in entries for stream in entry.streams):
            print_plain(STEP_ELSEWHERE)
    if wrong := [entry.cell for entry in entries if not entry.agrees]:
        raise RunError(f"{run_dir}: {differing_words(wrong)}")


def _as_data(entry: "LedgerEntry") -> dict[str, Any]:
    from fedpriv.privacy.ledger import as_data

    streams = {"releases": list(map(as_data, entry.streams))}
    tests = {"evaluations": list(map(as_data, entry.tests))} if entry.tests else {}
    return {"cell": entry.cell, **streams, **tests}


def _ledger_lines(entry: "LedgerEntry") -> list[tuple[str, ...]]:
    """One line a stream; the claim is that of the worst stream, since records are in one stream of a step only.

    A first step is composed with the rounds, in the claim of both.  Streams of evaluations come last: their claim
    is one of test records, which are other records.
    """
    point = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in entry.point.items()) or "-"
    claimed = _price(entry.claimed_mu, entry.claimed_epsilon)
    of_tests = "none" if entry.claimed_of_tests is None else upper_figure(entry.claimed_of_tests, 6)
    streams = [(stream, _released_by(stream), claimed) for stream in entry.streams]
    streams += [(stream, f"{stream.owner}, test records", of_tests) for stream in entry.tests]
    return [
        (
            str(entry.cell),
            point,
            str(entry.seed),
            entry.trust,
            owner,
            type(stream.mechanism).__name__,
            str(stream.schedule.rounds),
            upper_figure(max(stream.clips), 5),
            lower_figure(stream.std, 5),
            stream.relation,
            _stream_price(stream, entry.delta),
            price,
            "ok" if entry.agrees else "DIFFERS",
        )
        for stream, owner, price in streams
    ]


def _released_by(stream: "ReleaseStream") -> str:
    from fedpriv.privacy.ledger import ROUNDS

    return stream.owner if stream.step == ROUNDS else f"{stream.owner}, {stream.step}"


def _stream_price(stream: "ReleaseStream", delta: float) -> str:
    from fedpriv.accounting import GaussianDP

    guarantee = stream.guarantee
    if guarantee is None:
        return "∞"
    return _price(guarantee.mu if isinstance(guarantee, GaussianDP) else None, guarantee.epsilon_of(delta))


def _price(mu: float | None, epsilon: float | None) -> str:
    """μ, or ε (at the cell's δ) where there is no μ."""
    if mu is not None:
        return upper_figure(mu, 6)
    return "none" if epsilon is None else f"ε = {upper_figure(epsilon, 6)}"
