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
    Json,
    MechanismName,
    Mu,
    Options,
    Relation,
    Rounds,
    Separation,
    Silos,
    Times,
    TrustName,
    Zcdp,
    claim_of,
    mechanism_options,
)
from fedpriv.cli.shown import cost_facts, setting_facts, show
from fedpriv.cli.theorem import theorem

app = typer.Typer(
    help="Accounting without a run: convert guarantees, calibrate noise, compare mechanisms.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)
app.command()(compare)
app.command()(theorem)
app.command()(ledger)


@app.command()
def convert(
    mu: Mu = None,
    zcdp: Zcdp = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    relation: Relation = "replace-one",
    as_json: Json = False,
) -> None:
    """Turn one guarantee into all others: give exactly one of --mu, --zcdp, or --epsilon with --delta.

    Examples:

        fedpriv privacy convert --mu 1 --delta 1e-6

        fedpriv privacy convert --epsilon 2 --delta 1e-6
    """
    from fedpriv.accounting.target import target_mu

    claim = claim_of(target_mu(mu, zcdp, epsilon, delta), relation)
    show({}, claim, delta, as_json)


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
    options: Options = None,
    as_json: Json = False,
) -> None:
    """How much noise a mechanism needs for a target: --mu, --zcdp, or --epsilon with --delta.

    Examples:

        fedpriv privacy noise --rounds 600 --mu 4 --clip 118.1 --silos 100 --trust trusted

        fedpriv privacy noise --rounds 1000 --epochs 10 --epsilon 2 --delta 1e-6 --mechanism tree
    """
    from fedpriv.accounting.target import target_mu
    from fedpriv.privacy.setting import Setting

    setting = Setting(
        rounds, decay, clip, batch, silos, trust, relation, epochs, max_participations, min_separation
    )
    claim = claim_of(target_mu(mu, zcdp, epsilon, delta), relation)
    cost = setting.cost(setting.mechanism(mechanism, mechanism_options(options or [])), claim.guarantee.mu)
    show({"mechanism": mechanism, **setting_facts(setting), **cost_facts(cost)}, claim, delta, as_json)


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
    options: Options = None,
    as_json: Json = False,
) -> None:
    """Which guarantee a given noise buys: the inverse of `noise`.

    Example:

        fedpriv privacy spent --rounds 600 --std 1446.4 --clip 118.1
    """
    from fedpriv.privacy.setting import Setting

    setting = Setting(
        rounds, decay, clip, batch, silos, trust, relation, epochs, max_participations, min_separation
    )
    chosen = setting.mechanism(mechanism, mechanism_options(options or []))
    mu = setting.mu_spent(chosen, std)
    cost = setting.cost(chosen, mu)
    show(
        {"mechanism": mechanism, **setting_facts(setting), **cost_facts(cost)},
        claim_of(mu, relation),
        delta,
        as_json,
    )
