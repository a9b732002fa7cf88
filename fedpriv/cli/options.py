"""Options that commands share.  Imports no torch.

A dataclass whose fields are options is a group of them: `expand_option_groups` makes a command of a function that
takes one.

Facts and a guarantee are printed as text or as one JSON object.  Figures are rounded to the safe side: leakage and
what it is computed from up, noise that is there down.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar

import typer

from fedpriv.core.errors import InputError, sanitize_line, sanitize_lines
from fedpriv.core.figures import format_lower, format_upper, format_upper_epsilon, privacy_caveats

if TYPE_CHECKING:
    from pydantic import BaseModel

    from fedpriv.accounting.guarantees import Guarantee
    from fedpriv.claims.claim import PrivacyClaim
    from fedpriv.study.setting import AccountingSetting, MechanismCost


M = TypeVar("M", bound="BaseModel")


def expand_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give typer every field of a group as an option of its own, in the group's place among the parameters."""
    given = signature(command).parameters.values()
    flat = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for each in given
        for name, kind, default in _list_options(each)
    ]

    @wraps(command)
    def called(**values: Any) -> None:
        command(**{each.name: _collect_value(each, values) for each in given})

    called.__dict__["__signature__"] = Signature(flat)
    called.__annotations__ = {each.name: each.annotation for each in flat}
    return called


def _list_options(parameter: Parameter) -> list[tuple[str, Any, Any]]:
    """Name, annotation and default of a parameter, or of every field of a group."""
    if is_dataclass(parameter.annotation):
        return [
            (each.name, each.type, Parameter.empty if each.default is MISSING else each.default)
            for each in fields(parameter.annotation)
        ]
    return [(parameter.name, parameter.annotation, parameter.default)]


def _collect_value(parameter: Parameter, values: Mapping[str, Any]) -> Any:
    """Take a parameter from the values of all options, or make its group of them."""
    if is_dataclass(parameter.annotation):
        group: Any = parameter.annotation
        return group(**{name: values[name] for name, *_ in _list_options(parameter)})
    return values[parameter.name]


RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A folder that `fedpriv run` wrote.")]
Imports = Annotated[
    list[Path] | None,
    typer.Option("--import", metavar="FILE.py", help="Your own algorithms, models and data. Repeatable."),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key. Repeatable.")
]
SweepOverrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key; a swept key is narrowed. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
Delta = Annotated[
    float | None, typer.Option(help="δ, to be given with --epsilon; at which ε is printed.  [default: 1e-5]")
]
Rounds = Annotated[int, typer.Option(min=1, max=10**7, help="T, how many noisy running sums are released.")]
MechanismOption = Annotated[str, typer.Option("--mechanism", help="Such as independent, tree or banded.")]
MechanismKeys = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of the mechanism, such as bands=32. Repeatable."),
]


@dataclass(frozen=True)
class TargetOptions:
    """The guarantee that is asked for, in one of its three forms."""

    mu: Annotated[float | None, typer.Option(help="Gaussian DP, the ρ of the DP-μ²-FL paper.")] = None
    zcdp: Annotated[float | None, typer.Option(help="Zero-concentrated DP, μ²/2.")] = None
    epsilon: Annotated[
        float | None, typer.Option(help="ε of (ε, δ)-DP, converted exactly; give --delta with it.")
    ] = None
    delta: Delta = None

    @property
    def in_mu(self) -> float:
        """μ; InputError unless exactly one form is given."""
        from fedpriv.accounting.guarantees import target_mu

        return target_mu(self.mu, self.zcdp, self.epsilon, self.delta)

    @property
    def reporting_delta(self) -> float:
        """The δ at which ε is printed."""
        from fedpriv.accounting.guarantees import DEFAULT_DELTA

        return DEFAULT_DELTA if self.delta is None else self.delta


@dataclass(frozen=True)
class ParticipationOptions:
    """Who is protected against which neighbours, and when records take part."""

    relation: Annotated[
        str, typer.Option(help="Neighbouring data sets: replace-one (a record is exchanged) or zero-out.")
    ] = "replace-one"
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the records.")] = 1
    sampling: Annotated[
        str,
        typer.Option(
            help="fixed: the same order every epoch; allocation, balanced or poisson: drawn by silos in secret."
        ),
    ] = "fixed"
    groups: Annotated[
        int, typer.Option(min=1, help="Public groups of records, for secret sampling with correlated noise.")
    ] = 1
    unit: Annotated[
        str, typer.Option(help="Whose contribution is clipped and protected: record, user or client.")
    ] = "record"
    records: Annotated[int, typer.Option(min=1, help="The most records of one user or client in a round.")] = 1

    def make_setting(self, rounds: int) -> "AccountingSetting":
        from fedpriv.study.setting import AccountingSetting

        return AccountingSetting(
            rounds, **{key: value for key, value in vars(self).items() if key not in ("unit", "records")}
        )

    def make_claim(self, guarantee: "Guarantee") -> "PrivacyClaim[Guarantee]":
        """`guarantee` of the unit, under the relation."""
        from fedpriv.accounting.gaussian import relation_named
        from fedpriv.claims.claim import PrivacyClaim
        from fedpriv.noise.trust import make_unit

        return PrivacyClaim(guarantee, relation_named(self.relation), make_unit(self.unit, self.records))


@dataclass(frozen=True)
class FederationOptions(ParticipationOptions):
    """Equal silos too, and the sums that they release: a `Setting` without its rounds."""

    decay: Annotated[
        float, typer.Option(help="What a running sum keeps per round: 1 prefix sums, 0 none, 1 - α momentum.")
    ] = 1.0
    clip: Annotated[float, typer.Option(help="Norm to which every record's increment is clipped.")] = 1.0
    batch: Annotated[
        int, typer.Option(min=1, help="Records of one silo in one round; releases are their mean.")
    ] = 1
    silos: Annotated[
        int, typer.Option(min=1, help="M; the server takes the mean of equally many records each.")
    ] = 1
    trust: Annotated[
        str,
        typer.Option(
            help="untrusted: each silo adds noise; trusted: the server does; "
            "secure-aggregation: each silo a share."
        ),
    ] = "untrusted"
    max_participations: Annotated[
        int | None, typer.Option(min=1, help="Instead of --epochs: a record takes part at most so often…")
    ] = None
    min_separation: Annotated[int, typer.Option(min=1, help="… in any rounds at least so far apart.")] = 1


@dataclass(frozen=True)
class DisplayOptions:
    """Where a run is shown while it goes."""

    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table; errors only.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Progress as JSON lines on stdout instead of the table.")
    ] = False
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the report's page on this machine while the run goes.")
    ] = False
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write curves for TensorBoard too (extra: tensorboard).")
    ] = None
    mlflow: Annotated[
        str | None, typer.Option(metavar="URI", help="Log to this MLflow tracking URI too (extra: mlflow).")
    ] = None


PolicyPath = Annotated[Path, typer.Argument(metavar="POLICY", help="The silo's policy file (TOML).")]
MetricsAddress = Annotated[
    str | None,
    typer.Option(metavar="PORT|SOCKET", help="Where this machine, and no other, asks for Prometheus figures."),
]


def parse_settings(model: type[M], assignments: Sequence[str], defaults: Mapping[str, Any] | None = None) -> M:
    """Make a model of KEY=VALUE assignments over its `defaults`; InputError names the key that it refuses."""
    from pydantic import ValidationError

    from fedpriv.scenario.messages import format_validation_error
    from fedpriv.scenario.published import parse_assignment

    try:
        return model.model_validate({**(defaults or {}), **dict(map(parse_assignment, assignments))})
    except ValidationError as error:
        raise InputError(f"--set {format_validation_error(error, model)}") from None


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Write a text that may have words of a stranger's scenario, table or certificate, by default to stdout."""
    (stream or sys.stdout).write(sanitize_lines(text))


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Print left-aligned columns, two spaces apart; every line has a text for every column."""
    lines = [[sanitize_line(cell, len(cell)) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print_text("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")


def target_facts(mu: float, delta: float, federation: "FederationOptions") -> dict[str, Any]:
    """The aim of calibrations whose guarantees are curves: the ε that μ gives at δ."""
    from fedpriv.accounting.guarantees import GaussianDP

    claim, epsilon = federation.make_claim(GaussianDP(mu)), GaussianDP(mu).epsilon_of(delta)
    return {"delta": delta, "epsilon_at_most": epsilon, "relation": claim.relation, "unit": claim.unit.description}


def guarantee_of_multiplier(order: "ParticipationOptions", multiplier: float, rounds: int | None) -> "Guarantee":
    """The guarantee of `multiplier` clips of noise for records that take part in secret among `rounds` rounds."""
    from fedpriv.accounting.gaussian import relation_named
    from fedpriv.participation.secret import SecretOrder

    if rounds is None:
        raise InputError(f"multiplier = {multiplier}: say in how many --rounds records take part")
    setting = order.make_setting(rounds)
    if not isinstance(setting.participation, SecretOrder):
        raise InputError(
            f"sampling = {setting.sampling!r}: a multiplier says something of records that take part in secret, "
            'by "allocation", "balanced" or "poisson"; for a public order ask `fedpriv privacy spent`'
        )
    return setting.participation.guarantee_for_noise(multiplier, relation_named(setting.relation))


def setting_facts(setting: "AccountingSetting", unit: str = "record") -> dict[str, Any]:
    """Say whom the numbers protect, and how a record, or another unit, takes part."""
    from fedpriv.noise.trust import make_unit

    whose = make_unit(unit)
    return {
        "trust": setting.trust,
        "protects": setting.trust_setting.protection_of(whose),
        "rounds": setting.rounds,
        "participation": setting.describe_participation(whose.noun),
    }


def cost_facts(cost: "MechanismCost") -> dict[str, Any]:
    """Noise as it is needed, and its errors; `show` rounds both up: less noise would not do."""
    return {
        "noise_std": cost.std,
        "error_rms": cost.error_rms,
        "error_last": cost.error_last,
        "error_worst": cost.error_worst,
        "error_in_mean": cost.error_in_mean,
        "memory_vectors": cost.memory_vectors,
        **{f"sensitivity_{name}": value for name, value in cost.sensitivity._asdict().items()},
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
    "noise_multiplier": "noise multiplier",
    "delta": "δ",
    "epsilon_at_most": "ε, at most",
    "mu": "μ (Gaussian DP)",
    "zcdp": "zCDP (μ²/2)",
    "epsilon": "ε, exact",
    "epsilon_rdp": "ε, Rényi DP",
    "epsilon_paper": "ε, papers' formula",
}


GROUP_SUFFIX = "_together"
"""How the name of a figure of several units ends: no caveat of one unit's ε is about it."""


def print_facts(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts))
        return
    print_table(
        [
            (_LABELS.get(name, name.replace("_", " ").replace("epsilon", "ε")), _format_fact(name, value))
            for name, value in facts.items()
        ]
    )
    others = ("epsilon_rdp", "epsilon_paper")
    epsilons = [
        value
        for name, value in facts.items()
        if name.startswith("epsilon")
        and not (name in others or name.endswith(GROUP_SUFFIX))
        and isinstance(value, float)
    ]
    for line in privacy_caveats(max(epsilons, default=0.0), facts.get("delta", 0.0)):
        print_text(f"{line}\n")


def _format_fact(name: str, value: Any) -> str:
    """Write a figure on the safe side: leakage and its terms up, noise that is there down."""
    if isinstance(value, bool):
        return "yes" if value else "no, an upper bound"
    if not isinstance(value, float):
        return str(value)
    if name.startswith("epsilon"):
        return format_upper_epsilon(value, 9)
    return format_lower(value, 9) if name == "noise_multiplier" else format_upper(value, 9)
