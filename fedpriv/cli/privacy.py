"""`fedpriv privacy`: accounting without a run, and the claim of a run recomputed from what it released.

Imports no torch; a command imports the modules that it needs when it is called.
"""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli.compare import compare
from fedpriv.cli.options import (
    Delta,
    Federation,
    Json,
    MechanismName,
    Options,
    Participation,
    Rounds,
    RunDir,
    Target,
    grouped,
    validated,
)
from fedpriv.cli.shown import TOGETHER, cost_facts, guarantee_of, print_table, setting_facts, show
from fedpriv.cli.theorem import samples, theorem
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.figures import lower_figure, upper_figure

if TYPE_CHECKING:
    from fedpriv.accounting.guarantees import Guarantee
    from fedpriv.claims.claim import PrivacyClaim
    from fedpriv.claims.entries import LedgerEntry
    from fedpriv.noise.mechanism import Mechanism
    from fedpriv.study.setting import Cost, Setting


app = typer.Typer(
    help="Accounting without a run: convert guarantees, calibrate noise, compare mechanisms.",
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,
    rich_markup_mode="markdown",
)
app.command()(grouped(compare))
app.command()(theorem)
app.command()(samples)


@app.command()
def ledger(
    run_dir: RunDir,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Print what a run released, and recompute its claim from that alone; exit code 1 if they differ.

    Example:

        fedpriv privacy ledger runs/quickstart
    """
    from fedpriv.claims.claim import ELSEWHERE, STEP_ELSEWHERE
    from fedpriv.claims.entries import differing_words, read_ledger
    from fedpriv.cli.explore import print_plain

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
    from fedpriv.claims.ledger import as_data

    streams = {"releases": list(map(as_data, entry.streams))}
    tests = {"evaluations": list(map(as_data, entry.tests))} if entry.tests else {}
    return {"cell": entry.cell, **streams, **tests}


def _ledger_lines(entry: "LedgerEntry") -> list[tuple[str, ...]]:
    """Write a line for each stream; the claim is that of the worst, as records are in one stream of a step only.

    A first step is composed with the rounds, in the claim of both.  Streams of evaluations come last: their claim
    is one of test records, which are other records.
    """
    from fedpriv.claims.claim import price_words
    from fedpriv.claims.ledger import ROUNDS

    point = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in entry.point.items()) or "-"
    claimed = price_words(entry.claimed_mu, entry.claimed_epsilon)
    of_tests = "none" if entry.claimed_of_tests is None else upper_figure(entry.claimed_of_tests, 6)
    steps = [(each, "" if each.step == ROUNDS else f", {each.step}", claimed) for each in entry.streams]
    steps += [(each, ", test records", of_tests) for each in entry.tests]
    return [
        (
            str(entry.cell),
            point,
            str(entry.seed),
            entry.trust,
            f"{stream.owner}{step}",
            type(stream.mechanism).__name__,
            str(stream.schedule.rounds),
            upper_figure(max(stream.clips), 5),
            lower_figure(stream.std, 5),
            stream.relation,
            "∞" if (one := stream.guarantee) is None else price_words(one.mu, one.epsilon_of(entry.delta)),
            price,
            "ok" if entry.agrees else "DIFFERS",
        )
        for stream, step, price in steps
    ]


@app.command()
@grouped
def selection(
    target: Target,
    trials: Annotated[float, typer.Option(min=1, help="How many runs are made on average.")] = 20.0,
    eta: Annotated[
        float, typer.Option(min=0, help="Of the number of runs: 0 logarithmic, 1 geometric, between and beyond.")
    ] = 0.0,
    poisson: Annotated[bool, typer.Option("--poisson", help="A Poisson number of runs instead.")] = False,
    as_json: Json = False,
) -> None:
    """What it costs to choose the best of a random number of runs and publish only that one.

    The target is that of one run: --mu, --zcdp, or --epsilon with --delta. Theorems 2 and 6 of Papernot & Steinke
    2022, which need that the number of runs and all other runs stay secret.

    Examples:

        fedpriv privacy selection --mu 1 --trials 20

        fedpriv privacy selection --mu 0.5 --trials 5 --poisson
    """
    from fedpriv.accounting.guarantees import GaussianDP
    from fedpriv.accounting.selection import NegativeBinomial, Poisson, Selection

    mu, at = target.in_mu, target.at
    law = Poisson(trials) if poisson else NegativeBinomial(trials, eta)
    facts: dict[str, Any] = {
        "runs": law.words,
        "mu": mu,
        "delta": at,
        "epsilon_of_one_run": GaussianDP(mu).epsilon_of(at),
        "epsilon_of_the_choice": Selection(mu, law).epsilon_of(at),
        "epsilon_of_choice_and_run": Selection(mu, law, then=mu).epsilon_of(at),
    }
    show(facts, as_json)


@app.command()
@grouped
def convert(
    *,
    target: Target,
    order: Participation,
    multiplier: Annotated[
        float | None, typer.Option(help="Noise std over clip, of records that --sampling draws in secret.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="T, with --multiplier.")] = None,
    together: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Also ε of so many records together, for instance one person's. Repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn one guarantee into all others: give exactly one of --mu, --zcdp, or --epsilon with --delta.

    Or --multiplier with --sampling and --rounds: a secret participation has no mu, but one for every slack (the
    probability with which it may fail), which is what a lifetime budget is charged.

    Examples:

        fedpriv privacy convert --mu 1 --delta 1e-6

        fedpriv privacy convert --epsilon 2 --delta 1e-6

        fedpriv privacy convert --sampling allocation --rounds 60 --multiplier 0.9205 --relation zero-out

        fedpriv privacy convert --sampling poisson --rounds 60 --multiplier 2 --relation zero-out --together 3
    """
    from fedpriv.accounting.guarantees import GaussianDP

    guarantee = GaussianDP(target.in_mu) if multiplier is None else guarantee_of(order, multiplier, rounds)
    facts = order.claim(guarantee).conversions(target.at)
    for size in together or []:
        facts[f"epsilon_of_{size}_{order.unit}s{TOGETHER}"] = guarantee.epsilon_of_group(size, target.at)
    show(facts, as_json)


@app.command()
@grouped
def noise(
    *,
    rounds: Rounds,
    target: Target,
    mechanism: MechanismName = "independent",
    federation: Federation,
    options: Options = None,
    as_json: Json = False,
) -> None:
    """How much noise a mechanism needs for a target: --mu, --zcdp, or --epsilon with --delta.

    Examples:

        fedpriv privacy noise --rounds 600 --mu 4 --clip 118.1 --silos 100 --trust trusted

        fedpriv privacy noise --rounds 1000 --epochs 10 --epsilon 2 --delta 1e-6 --mechanism tree
    """
    from fedpriv.accounting.guarantees import GaussianDP

    setting, mu = federation.setting(rounds), target.in_mu
    chosen = _mechanism(setting, mechanism, options)
    cost = setting.cost(chosen, mu, target.at)
    claim = federation.claim(setting.spent(chosen, cost.std) if setting.secret else GaussianDP(mu))
    _show_cost(mechanism, setting, cost, claim, target.at, as_json)


@app.command()
@grouped
def spent(
    *,
    rounds: Rounds,
    std: Annotated[float, typer.Option(help="Std of the fresh noise vectors, as silo or server draws them.")],
    delta: Delta = None,
    mechanism: MechanismName = "independent",
    federation: Federation,
    options: Options = None,
    as_json: Json = False,
) -> None:
    """Which guarantee a given noise buys: the inverse of `noise`.

    Example:

        fedpriv privacy spent --rounds 600 --std 1446.4 --clip 118.1
    """
    setting = federation.setting(rounds)
    chosen = _mechanism(setting, mechanism, options)
    cost, claim = setting.cost_of_std(chosen, std), federation.claim(setting.spent(chosen, std))
    _show_cost(mechanism, setting, cost, claim, Target(delta=delta).at, as_json)


def _mechanism(setting: "Setting", name: str, options: list[str] | None) -> "Mechanism":
    from fedpriv.noise.registry import MechanismOptions

    return setting.mechanism(name, validated(MechanismOptions, options or []))


def _show_cost(
    mechanism: str,
    setting: "Setting",
    cost: "Cost",
    claim: "PrivacyClaim[Guarantee]",
    delta: float,
    as_json: bool,
) -> None:
    about = {"mechanism": mechanism, **setting_facts(setting, claim.unit.name)}
    show({**about, **cost_facts(cost), **claim.conversions(delta)}, as_json)
