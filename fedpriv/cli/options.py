"""Options that commands share, and what the accounting commands read from theirs.  Imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpriv.core.errors import InputError

if TYPE_CHECKING:
    from fedpriv.accounting.guarantees import Guarantee
    from fedpriv.noise.registry import MechanismOptions
    from fedpriv.rounds.claim import PrivacyClaim


Imports = Annotated[
    list[Path] | None,
    typer.Option("--import", metavar="FILE.py", help="Your own algorithms, models and data. Repeatable."),
]
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
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the records.")]
Sampling = Annotated[
    str,
    typer.Option(help="fixed: the same order every epoch; allocation or poisson: drawn by the silos in secret."),
]
Groups = Annotated[
    int, typer.Option(min=1, help="Public groups of records, for secret sampling with correlated noise.")
]
UnitKind = Annotated[
    str, typer.Option("--unit", help="Whose contribution is clipped and protected: record, user or client.")
]
UnitRecords = Annotated[
    int, typer.Option("--records", min=1, help="The most records of one user or client in a round.")
]
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


def mechanism_options(assignments: list[str]) -> "MechanismOptions":
    from pydantic import ValidationError

    from fedpriv.noise.registry import MechanismOptions
    from fedpriv.scenario.messages import explain
    from fedpriv.scenario.published import parsed_assignment

    try:
        return MechanismOptions.model_validate(dict(map(parsed_assignment, assignments)))
    except ValidationError as error:
        raise InputError(f"--set {explain(error, MechanismOptions)}") from None


def claim_of(mu: float, relation: str, unit: str, records: int) -> "PrivacyClaim[Guarantee]":
    from fedpriv.accounting.guarantees import GaussianDP

    return claim_on(GaussianDP(mu), relation, unit, records)


def claim_on(guarantee: "Guarantee", relation: str, unit: str, records: int) -> "PrivacyClaim[Guarantee]":
    from fedpriv.accounting.gaussian import relation_named
    from fedpriv.noise.trust import unit_named
    from fedpriv.rounds.claim import PrivacyClaim

    return PrivacyClaim(guarantee, relation_named(relation), unit_named(unit, records))
