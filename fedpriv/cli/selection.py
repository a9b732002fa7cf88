"""`fedpriv privacy selection`: what publishing the best of several private runs costs.  Imports no torch."""

from typing import Annotated, Any

import typer

from fedpriv.cli.options import Delta, Epsilon, Json, Mu, Zcdp
from fedpriv.cli.shown import show


def selection(
    mu: Mu = None,
    zcdp: Zcdp = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
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
    from fedpriv.accounting import GaussianDP
    from fedpriv.accounting.selection import NegativeBinomial, Poisson, Selection
    from fedpriv.accounting.target import DEFAULT_DELTA, target_mu

    target, at = target_mu(mu, zcdp, epsilon, delta), DEFAULT_DELTA if delta is None else delta
    law = Poisson(trials) if poisson else NegativeBinomial(trials, eta)
    facts: dict[str, Any] = {
        "runs": law.words,
        "mu": target,
        "delta": at,
        "epsilon_of_one_run": GaussianDP(target).epsilon_of(at),
        "epsilon_of_the_choice": Selection(target, law).epsilon_of(at),
        "epsilon_of_choice_and_run": Selection(target, law, then=target).epsilon_of(at),
    }
    show(facts, as_json)
