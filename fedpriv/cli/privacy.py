"""`fedpriv privacy`: accounting without a run.  Imports no torch; what a command needs is imported when called."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli.ledger import ledger
from fedpriv.cli.text import print_table
from fedpriv.cli.theorem import theorem
from fedpriv.errors import InputError

if TYPE_CHECKING:
    from fedpriv.accounting import GaussianDP
    from fedpriv.mechanisms.registry import MechanismOptions
    from fedpriv.privacy.claim import PrivacyClaim
    from fedpriv.privacy.cost import Cost
    from fedpriv.privacy.setting import Setting

app = typer.Typer(
    help="Accounting without a run: convert guarantees, calibrate noise, compare mechanisms.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)
app.command()(theorem)
app.command()(ledger)

Mu = Annotated[float | None, typer.Option(help="Gaussian DP, the ρ of the DP-μ²-FL paper.")]
Zcdp = Annotated[float | None, typer.Option(help="Zero-concentrated DP, μ²/2.")]
Epsilon = Annotated[float | None, typer.Option(help="ε of (ε, δ)-DP, converted exactly; needs --delta.")]
Delta = Annotated[float | None, typer.Option(help="δ, at which ε is given and printed.  [default: 1e-5]")]
Relation = Annotated[
    str, typer.Option(help="Neighbouring data sets: replace-one (a record is exchanged) or zero-out.")
]
Rounds = Annotated[int, typer.Option(min=1, help="T, how many noisy running sums are released.")]
Decay = Annotated[
    float, typer.Option(help="What a running sum keeps per round: 1 prefix sums, 0 none, 1 - α momentum.")
]
Clip = Annotated[float, typer.Option(help="Norm to which every record's increment is clipped.")]
Batch = Annotated[int, typer.Option(min=1, help="Records of one silo in one round; releases are their mean.")]
Silos = Annotated[int, typer.Option(min=1, help="M; the server takes the mean of equally many records each.")]
TrustName = Annotated[
    str,
    typer.Option(
        help="untrusted: each silo adds noise; trusted: the server does; secure-aggregation: each silo a share."
    ),
]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the records, in the same order every time.")]
Times = Annotated[
    int | None,
    typer.Option(
        "--max-participations", "--times", min=1, help="Instead of --epochs: a record takes part at most so often…"
    ),
]
Separation = Annotated[
    int, typer.Option("--min-separation", "--separation", min=1, help="… in any rounds at least so far apart.")
]
MechanismName = Annotated[str, typer.Option("--mechanism", help="Such as independent, tree or banded.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of the mechanism, such as bands=32. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


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

    claim = _claim(target_mu(mu, zcdp, epsilon, delta), relation)
    _print({}, claim, delta, as_json)


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
    claim = _claim(target_mu(mu, zcdp, epsilon, delta), relation)
    cost = setting.cost(setting.mechanism(mechanism, _options(options or [])), claim.guarantee.mu)
    _print({"mechanism": mechanism, **_setting(setting), **_cost(cost)}, claim, delta, as_json)


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
    chosen = setting.mechanism(mechanism, _options(options or []))
    mu = setting.mu_spent(chosen, std)
    cost = setting.cost(chosen, mu)
    _print({"mechanism": mechanism, **_setting(setting), **_cost(cost)}, _claim(mu, relation), delta, as_json)


@app.command()
def compare(
    rounds: Rounds,
    mu: Mu = None,
    zcdp: Zcdp = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    decay: Decay = 1.0,
    clip: Clip = 1.0,
    batch: Batch = 1,
    silos: Silos = 1,
    trust: TrustName = "untrusted",
    relation: Relation = "replace-one",
    epochs: Epochs = 1,
    max_participations: Times = None,
    min_separation: Separation = 1,
    as_json: Json = False,
) -> None:
    """Print noise, error and memory of every mechanism at the same guarantee, so that you can choose one.

    Errors are standard deviations per coordinate of the noise in a released running sum: root mean square over
    the rounds, in the last round, and (rms) in the mean over silos.  Memory counts vectors of the model's size;
    "square root" would store all T of them and shows what more bands can still buy.

    Examples:

        fedpriv privacy compare --rounds 1000 --mu 1

        fedpriv privacy compare --rounds 2000 --epochs 20 --decay 0.9 --epsilon 2 --delta 1e-6 --silos 10
    """
    from fedpriv.accounting.target import target_mu
    from fedpriv.privacy.setting import Setting

    setting = Setting(
        rounds, decay, clip, batch, silos, trust, relation, epochs, max_participations, min_separation
    )
    claim = _claim(target_mu(mu, zcdp, epsilon, delta), relation)
    costs = setting.compare(claim.guarantee.mu)
    if as_json:
        rows = [{"mechanism": name, **_cost(cost)} for name, cost in costs.items()]
        _print({**_setting(setting), "mechanisms": rows}, claim, delta, as_json=True)
        return
    header = ("mechanism", "noise std", "rms error", "last round", "in the mean", "memory", "sensitivity")
    lines = [
        (
            name,
            *(f"{value:.5g}" for value in (cost.std, cost.error, cost.error_last, cost.error_in_mean)),
            str(cost.memory),
            ("" if cost.sensitivity.exact else "≤ ") + f"{cost.sensitivity.value:.5g}",
        )
        for name, cost in costs.items()
    ]
    print_table([header, *lines])
    typer.echo()
    _print(_setting(setting), claim, delta, as_json=False)


def _options(assignments: list[str]) -> "MechanismOptions":
    from pydantic import ValidationError

    from fedpriv.mechanisms.registry import MechanismOptions
    from fedpriv.scenario.messages import explain
    from fedpriv.scenario.tree import parsed_assignment

    try:
        return MechanismOptions.model_validate(dict(map(parsed_assignment, assignments)))
    except ValidationError as error:
        raise InputError(f"--set {explain(error, MechanismOptions)}") from None


def _claim(mu: float, relation: str) -> "PrivacyClaim[GaussianDP]":
    from fedpriv.accounting import GaussianDP
    from fedpriv.accounting.relation import relation_named
    from fedpriv.privacy.claim import PrivacyClaim

    return PrivacyClaim(GaussianDP(mu), relation_named(relation))


def _setting(setting: "Setting") -> dict[str, Any]:
    """What the numbers are about: who is protected, and how a record takes part."""
    if setting.max_participations is not None:
        participation = f"at most {setting.max_participations} rounds, at least {setting.min_separation} apart"
    elif setting.epochs > 1:
        participation = f"{setting.epochs} epochs in a fixed order"
    else:
        participation = "single pass"
    return {
        "trust": setting.trust,
        "protects": setting.protection.protects,
        "rounds": setting.rounds,
        "participation": participation,
    }


def _cost(cost: "Cost") -> dict[str, Any]:
    return {
        "noise_std": cost.std,
        "error_rms": cost.error,
        "error_last": cost.error_last,
        "error_worst": cost.error_worst,
        "error_in_mean": cost.error_in_mean,
        "memory_vectors": cost.memory,
        **{f"sensitivity_{name}": value for name, value in cost.sensitivity._asdict().items()},
    }


def _guarantee(claim: "PrivacyClaim[GaussianDP]", delta: float | None) -> dict[str, Any]:
    from fedpriv.accounting.target import DEFAULT_DELTA

    pair = claim.guarantee.epsilon_delta(DEFAULT_DELTA if delta is None else delta)
    return {
        "mu": claim.guarantee.mu,
        "zcdp": claim.guarantee.zcdp,
        "delta": pair.delta,
        "epsilon": pair.exact,
        "epsilon_rdp": pair.rdp,
        "epsilon_paper": pair.paper,
        "relation": claim.relation,
        "unit": claim.unit,
    }


_LABELS = {
    "noise_std": "noise std",
    "error_rms": "error, rms over rounds",
    "error_last": "error, last round",
    "error_worst": "error, worst round",
    "error_in_mean": "error, rms, in the mean over silos",
    "memory_vectors": "memory, vectors",
    "sensitivity_value": "sensitivity",
    "sensitivity_exact": "sensitivity is exact",
    "sensitivity_reason": "because",
    "mu": "mu (Gaussian DP)",
    "zcdp": "zcdp (mu²/2)",
    "epsilon": "epsilon, exact",
    "epsilon_rdp": "epsilon, Rényi DP",
    "epsilon_paper": "epsilon, papers' formula",
}


def _print(facts: dict[str, Any], claim: "PrivacyClaim[GaussianDP]", delta: float | None, as_json: bool) -> None:
    everything = {**facts, **_guarantee(claim, delta)}
    if as_json:
        typer.echo(json.dumps(everything))
        return
    print_table([(_LABELS.get(name, name), _text(value)) for name, value in everything.items()])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no, an upper bound"
    return f"{value:.9g}" if isinstance(value, float) else str(value)
