"""Options that commands share, and the printing of accounting facts.

A dataclass whose fields are options is a group of options.  Facts are named numbers and texts, such as those of a
guarantee, and are printed as a table or as one JSON object.
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
    """Make a command of a function's parameters, with each group of options replaced by its fields.

    A group is a parameter whose annotation is a dataclass.  For a function f(target: TargetOptions) the command
    has the options mu, zcdp, epsilon and delta, and calls f with the TargetOptions of their values.
    """
    parameters = signature(command).parameters.values()
    flat_parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for parameter in parameters
        for name, kind, default in _list_options(parameter)
    ]

    @wraps(command)
    def run_command(**values: Any) -> None:
        command(**{parameter.name: _collect_value(parameter, values) for parameter in parameters})

    # Typer reads the options from the signature and the annotations.
    run_command.__dict__["__signature__"] = Signature(flat_parameters)
    run_command.__annotations__ = {parameter.name: parameter.annotation for parameter in flat_parameters}
    return run_command


def _list_options(parameter: Parameter) -> list[tuple[str, Any, Any]]:
    """List name, annotation and default of a parameter, or of each field of a group."""
    if is_dataclass(parameter.annotation):
        return [
            (
                group_field.name,
                group_field.type,
                Parameter.empty if group_field.default is MISSING else group_field.default,
            )
            for group_field in fields(parameter.annotation)
        ]
    return [(parameter.name, parameter.annotation, parameter.default)]


def _collect_value(parameter: Parameter, values: Mapping[str, Any]) -> Any:
    """Take a parameter's value from the values of all options, or make its group from them."""
    if is_dataclass(parameter.annotation):
        group: Any = parameter.annotation
        return group(**{name: values[name] for name, *_ in _list_options(parameter)})
    return values[parameter.name]


RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A folder that `fedpriv run` wrote.")]
Imports = Annotated[
    list[Path] | None,
    typer.Option(
        "--import", metavar="FILE.py", help="File with your own algorithms, models and data. Repeatable."
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key. Repeatable.")
]
SweepOverrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key; a swept key is narrowed. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Delta = Annotated[
    float | None,
    typer.Option(help="δ of --epsilon, and δ at which ε is printed.  [default: 1e-5, without --epsilon]"),
]
Rounds = Annotated[int, typer.Option(min=1, max=10**7, help="Number T of noisy running sums that are released.")]
MechanismOption = Annotated[
    str, typer.Option("--mechanism", help="Mechanism of the noise, such as independent, tree or banded.")
]
MechanismKeys = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Option of the mechanism, such as bands=32. Repeatable."),
]


@dataclass(frozen=True)
class TargetOptions:
    """Target guarantee, in one of its three forms."""

    mu: Annotated[float | None, typer.Option(help="μ of Gaussian DP, which the DP-μ²-FL paper calls ρ.")] = None
    zcdp: Annotated[float | None, typer.Option(help="ρ of zero-concentrated DP, μ²/2.")] = None
    epsilon: Annotated[
        float | None, typer.Option(help="ε of (ε, δ)-DP, which is converted exactly; give --delta with it.")
    ] = None
    delta: Delta = None

    @property
    def in_mu(self) -> float:
        """Target as μ of Gaussian DP.

        Raises:
            InputError: None or several of the forms are given, ε is given without a δ, or a number is out of
                range.
        """
        from fedpriv.accounting.guarantees import target_mu

        return target_mu(self.mu, self.zcdp, self.epsilon, self.delta)

    @property
    def reporting_delta(self) -> float:
        """δ at which ε is printed."""
        from fedpriv.accounting.guarantees import DEFAULT_DELTA

        return DEFAULT_DELTA if self.delta is None else self.delta


@dataclass(frozen=True)
class ParticipationOptions:
    """Unit and neighbours of the protection, and participation of records."""

    relation: Annotated[
        str,
        typer.Option(
            help="Neighbouring data sets: replace-one (a unit is exchanged) or zero-out (it is taken away)."
        ),
    ] = "replace-one"
    epochs: Annotated[int, typer.Option(min=1, help="Number of passes over the records.")] = 1
    sampling: Annotated[
        str,
        typer.Option(
            help="Participation: fixed (the same order every epoch), or drawn by silos in secret (allocation, "
            "balanced or poisson)."
        ),
    ] = "fixed"
    groups: Annotated[
        int,
        typer.Option(min=1, help="Number of public groups of records, for secret sampling with correlated noise."),
    ] = 1
    unit: Annotated[
        str, typer.Option(help="Unit that is clipped and protected as a whole: record, user or client.")
    ] = "record"
    records: Annotated[
        int, typer.Option(min=1, help="Largest number of records of one user or client in a round.")
    ] = 1

    def make_setting(self, rounds: int) -> "AccountingSetting":
        from fedpriv.study.setting import AccountingSetting

        return AccountingSetting(
            rounds, **{key: value for key, value in vars(self).items() if key not in ("unit", "records")}
        )

    def make_claim(self, guarantee: "Guarantee") -> "PrivacyClaim[Guarantee]":
        """Make the claim of a guarantee for the unit, under the relation."""
        from fedpriv.accounting.gaussian import relation_named
        from fedpriv.claims.claim import PrivacyClaim
        from fedpriv.noise.trust import make_unit

        return PrivacyClaim(guarantee, relation_named(self.relation), make_unit(self.unit, self.records))


@dataclass(frozen=True)
class FederationOptions(ParticipationOptions):
    """Participation of records, equal silos, and the running sums that they release."""

    decay: Annotated[
        float,
        typer.Option(
            help="Factor on the running sum in every round: 1 for prefix sums, 1 - α for momentum, 0 for "
            "the sum of one round."
        ),
    ] = 1.0
    clip: Annotated[float, typer.Option(help="Norm to which every unit's increment is clipped.")] = 1.0
    batch: Annotated[
        int, typer.Option(min=1, help="Number of units of one silo in one round; releases are of their mean.")
    ] = 1
    silos: Annotated[
        int,
        typer.Option(
            min=1, help="Number M of silos, with equally many records each; the server takes their mean."
        ),
    ] = 1
    trust: Annotated[
        str,
        typer.Option(
            help="Trust: untrusted (each silo adds all its noise), secure-aggregation (each adds a share of the "
            "noise), trusted (the server adds the noise) or curator (one party is server and silos)."
        ),
    ] = "untrusted"
    max_participations: Annotated[
        int | None,
        typer.Option(min=1, help="Largest number of rounds in which a record takes part, instead of --epochs."),
    ] = None
    min_separation: Annotated[
        int,
        typer.Option(
            min=1, help="With --max-participations: least distance of two rounds in which a record takes part."
        ),
    ] = 1


@dataclass(frozen=True)
class DisplayOptions:
    """Displays of a run's progress and results."""

    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print the folder of the results, and neither progress nor table.")
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print progress as JSON lines on stdout instead of the table.")
    ] = False
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the report's page on this machine during the run.")
    ] = False
    tensorboard: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write curves for TensorBoard too (extra: tensorboard).")
    ] = None
    mlflow: Annotated[
        str | None, typer.Option(metavar="URI", help="Log to this MLflow tracking URI too (extra: mlflow).")
    ] = None
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Log to Weights & Biases too (extra: wandb).")
    ] = None


PolicyPath = Annotated[Path, typer.Argument(metavar="POLICY", help="The silo's policy file (TOML).")]
MetricsAddress = Annotated[
    str | None,
    typer.Option(
        metavar="PORT|SOCKET", help="Port of this machine, or socket, at which Prometheus can read figures."
    ),
]


def parse_settings(model: type[M], assignments: Sequence[str], defaults: Mapping[str, Any] | None = None) -> M:
    """Make an object of a pydantic model from the KEY=VALUE texts of the option --set.

    A value is TOML, as in a scenario file, and counts as a text if it is no TOML.

    Args:
        model: Type of the object.
        assignments: Texts KEY=VALUE, with keys of the model.
        defaults: Values that take the place of the model's own defaults, by key, or None.

    Raises:
        InputError: A text has no key or no equals sign, or the model refuses a key or a value.
    """
    from pydantic import ValidationError

    from fedpriv.scenario.messages import format_validation_error
    from fedpriv.scenario.published import parse_assignment

    try:
        return model.model_validate({**(defaults or {}), **dict(map(parse_assignment, assignments))})
    except ValidationError as error:
        raise InputError(f"--set {format_validation_error(error, model)}") from None


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Write a sanitized text to a stream, by default to stdout.

    The text may contain parts of a scenario, table or certificate of unknown origin.
    """
    (stream or sys.stdout).write(sanitize_lines(text))


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Print a table with left-aligned columns, two spaces apart.

    Args:
        lines: Texts of each line, one for each column.
    """
    lines = [[sanitize_line(cell, len(cell)) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print_text("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")


def target_facts(mu: float, delta: float, federation: "FederationOptions") -> dict[str, Any]:
    """Return the facts of a target, as (ε, δ), for noise whose own guarantee has no μ.

    ε is the one that μ-Gaussian DP gives at δ.
    """
    from fedpriv.accounting.guarantees import GaussianDP

    claim, epsilon = federation.make_claim(GaussianDP(mu)), GaussianDP(mu).epsilon_of(delta)
    return {"delta": delta, "epsilon_at_most": epsilon, "relation": claim.relation, "unit": claim.unit.description}


def guarantee_of_multiplier(order: "ParticipationOptions", multiplier: float, rounds: int | None) -> "Guarantee":
    """Compute the guarantee of a noise multiplier for records that take part in secret.

    Args:
        order: Options of the participation and the neighbouring relation.
        multiplier: Noise multiplier, the standard deviation of a round's noise over the clip norm.
        rounds: Number of rounds, or None if the user gave none.

    Raises:
        InputError: The number of rounds is missing, the participation is not secret, or an option cannot be used.
    """
    from fedpriv.accounting.gaussian import relation_named
    from fedpriv.participation.secret import SecretOrder

    if rounds is None:
        raise InputError(f"multiplier = {multiplier}: give the number of rounds, too (--rounds)")
    setting = order.make_setting(rounds)
    if not isinstance(setting.participation, SecretOrder):
        raise InputError(
            f"sampling = {setting.sampling!r}: a multiplier has a guarantee if records take part in secret, by "
            '"allocation", "balanced" or "poisson"; for a public order use `fedpriv privacy spent`'
        )
    return setting.participation.guarantee_for_noise(multiplier, relation_named(setting.relation))


def setting_facts(setting: "AccountingSetting", unit: str = "record") -> dict[str, Any]:
    """Return the facts of a setting: trust, protection, rounds, and the unit's participation."""
    from fedpriv.noise.trust import make_unit

    protected_unit = make_unit(unit)
    return {
        "trust": setting.trust,
        "protects": setting.trust_setting.protection_of(protected_unit),
        "rounds": setting.rounds,
        "participation": setting.describe_participation(protected_unit.noun),
    }


def cost_facts(cost: "MechanismCost") -> dict[str, Any]:
    """Return the noise of a mechanism, with its errors, memory and sensitivity."""
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
"""Suffix of the name of an ε of several units."""


def print_facts(facts: dict[str, Any], as_json: bool) -> None:
    """Print facts as one JSON object, or as a table with explanations below it.

    The explanations say how well an attacker can guess, if a μ above 0 and the unit of protection are among the
    facts, and warn of an ε or δ that protects little, but not of an ε by another formula or of several units.

    Args:
        facts: Values by name, with numbers unrounded.
        as_json: Whether to print JSON.
    """
    if as_json:
        typer.echo(json.dumps(facts))
        return
    print_table(
        [
            (_LABELS.get(name, name.replace("_", " ").replace("epsilon", "ε")), _format_fact(name, value))
            for name, value in facts.items()
        ]
    )
    epsilons = [
        value
        for name, value in facts.items()
        if name.startswith("epsilon")
        and not (name in ("epsilon_rdp", "epsilon_paper") or name.endswith(GROUP_SUFFIX))
        and isinstance(value, float)
    ]
    from fedpriv.claims.claim import describe_guess  # slow to import, and JSON needs none
    from fedpriv.noise.trust import UNITS

    guess = [describe_guess(facts["unit"], [facts["mu"]])] if facts.get("mu") and "unit" in facts else []
    noun = next((unit.noun for unit in UNITS.values() if f"one {unit.noun}" in facts.get("unit", "")), "record")
    caveats = privacy_caveats(max(epsilons, default=0.0), facts.get("delta", 0.0), unit=noun)
    print_text("".join(f"{line}\n" for line in (*guess, *caveats)))


def _format_fact(name: str, value: Any) -> str:
    """Format the value of a fact with this name.

    A noise multiplier is rounded down, and any other float up, to nine significant digits.  A truth value says
    whether a sensitivity is exact.
    """
    if isinstance(value, bool):
        return "yes" if value else "no, an upper bound"
    if not isinstance(value, float):
        return str(value)
    if name.startswith("epsilon"):
        return format_upper_epsilon(value, 9)
    return format_lower(value, 9) if name == "noise_multiplier" else format_upper(value, 9)
