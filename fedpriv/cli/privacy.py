"""`fedpriv privacy`: accounting without a run.  Imports no torch; what a command needs is imported when called."""

from typing import Annotated

import typer

from fedpriv.cli.compare import compare
from fedpriv.cli.ledger import ledger
from fedpriv.cli.options import (
    Batch,
    Clip,
    Decay,
    Delta,
    Epochs,
    Epsilon,
    Groups,
    Json,
    MechanismName,
    Mu,
    Options,
    Relation,
    Rounds,
    Sampling,
    Separation,
    Silos,
    Times,
    TrustName,
    UnitKind,
    UnitRecords,
    Zcdp,
    claim_of,
    claim_on,
    mechanism_options,
)
from fedpriv.cli.sampled import guarantee_of
from fedpriv.cli.selection import selection
from fedpriv.cli.shown import cost_facts, guarantee_facts, setting_facts, show
from fedpriv.cli.theorem import theorem

app = typer.Typer(
    help="Accounting without a run: convert guarantees, calibrate noise, compare mechanisms.",
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,
    rich_markup_mode="markdown",
)
app.command()(compare)
app.command()(theorem)
app.command()(ledger)
app.command()(selection)


@app.command()
def convert(
    mu: Mu = None,
    zcdp: Zcdp = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    relation: Relation = "replace-one",
    multiplier: Annotated[
        float | None, typer.Option(help="Noise std over clip, of records that --sampling draws in secret.")
    ] = None,
    sampling: Sampling = "fixed",
    rounds: Annotated[int | None, typer.Option(min=1, help="T, with --multiplier.")] = None,
    epochs: Epochs = 1,
    groups: Groups = 1,
    unit: UnitKind = "record",
    records: UnitRecords = 1,
    as_json: Json = False,
) -> None:
    """Turn one guarantee into all others: give exactly one of --mu, --zcdp, or --epsilon with --delta.

    Or --multiplier with --sampling and --rounds: a secret participation has no mu, but one for every slack (the
    probability with which it may fail), which is what a lifetime budget is charged.

    Examples:

        fedpriv privacy convert --mu 1 --delta 1e-6

        fedpriv privacy convert --epsilon 2 --delta 1e-6

        fedpriv privacy convert --sampling allocation --rounds 60 --multiplier 0.9205 --relation zero-out
    """
    from fedpriv.accounting.target import target_mu

    if multiplier is None:
        claim = claim_of(target_mu(mu, zcdp, epsilon, delta), relation, unit, records)
    else:
        claim = claim_on(
            guarantee_of(sampling, multiplier, rounds, epochs, groups, relation), relation, unit, records
        )
    show({**guarantee_facts(claim, delta)}, as_json)


@app.command()
def noise(
    rounds: Rounds,
    mu: Mu = None,
    zcdp: Zcdp = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    mechanism: MechanismName = "independent",
    decay: Decay = 1.0,
    clip: Clip = 1.0,
    batch: Batch = 1,
    silos: Silos = 1,
    trust: TrustName = "untrusted",
    relation: Relation = "replace-one",
    epochs: Epochs = 1,
    max_participations: Times = None,
    min_separation: Separation = 1,
    sampling: Sampling = "fixed",
    groups: Groups = 1,
    unit: UnitKind = "record",
    records: UnitRecords = 1,
    options: Options = None,
    as_json: Json = False,
) -> None:
    """How much noise a mechanism needs for a target: --mu, --zcdp, or --epsilon with --delta.

    Examples:

        fedpriv privacy noise --rounds 600 --mu 4 --clip 118.1 --silos 100 --trust trusted

        fedpriv privacy noise --rounds 1000 --epochs 10 --epsilon 2 --delta 1e-6 --mechanism tree
    """
    from fedpriv.accounting.target import DEFAULT_DELTA, target_mu
    from fedpriv.privacy.setting import Setting

    of_records = (relation, epochs, max_participations, min_separation, sampling, groups)
    setting = Setting(rounds, decay, clip, batch, silos, trust, *of_records)
    target = target_mu(mu, zcdp, epsilon, delta)
    chosen = setting.mechanism(mechanism, mechanism_options(options or []))
    cost = setting.cost(chosen, target, DEFAULT_DELTA if delta is None else delta)
    claim = (
        claim_on(setting.spent(chosen, cost.std), relation, unit, records)
        if setting.secret
        else claim_of(target, relation, unit, records)
    )
    show(
        {
            "mechanism": mechanism,
            **setting_facts(setting, unit),
            **cost_facts(cost),
            **guarantee_facts(claim, delta),
        },
        as_json,
    )


@app.command()
def spent(
    rounds: Rounds,
    std: Annotated[float, typer.Option(help="Std of the fresh noise vectors, as silo or server draws them.")],
    delta: Delta = None,
    mechanism: MechanismName = "independent",
    decay: Decay = 1.0,
    clip: Clip = 1.0,
    batch: Batch = 1,
    silos: Silos = 1,
    trust: TrustName = "untrusted",
    relation: Relation = "replace-one",
    epochs: Epochs = 1,
    max_participations: Times = None,
    min_separation: Separation = 1,
    sampling: Sampling = "fixed",
    groups: Groups = 1,
    unit: UnitKind = "record",
    records: UnitRecords = 1,
    options: Options = None,
    as_json: Json = False,
) -> None:
    """Which guarantee a given noise buys: the inverse of `noise`.

    Example:

        fedpriv privacy spent --rounds 600 --std 1446.4 --clip 118.1
    """
    from fedpriv.privacy.setting import Setting

    of_records = (relation, epochs, max_participations, min_separation, sampling, groups)
    setting = Setting(rounds, decay, clip, batch, silos, trust, *of_records)
    chosen = setting.mechanism(mechanism, mechanism_options(options or []))
    cost = setting.cost_of_std(chosen, std)
    claim = claim_on(setting.spent(chosen, std), relation, unit, records)
    show(
        {
            "mechanism": mechanism,
            **setting_facts(setting, unit),
            **cost_facts(cost),
            **guarantee_facts(claim, delta),
        },
        as_json,
    )
