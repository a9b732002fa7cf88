"""Print facts and a guarantee for the accounting commands, as a table or as JSON.  Imports no torch."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from fedpriv.core.errors import InputError
from fedpriv.core.figures import caveats, epsilon_figure, lower_figure, upper_figure

if TYPE_CHECKING:
    from fedpriv.accounting.guarantees import Guarantee
    from fedpriv.rounds.claim import PrivacyClaim
    from fedpriv.rounds.setting import Cost, Setting


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Left-aligned columns, two spaces apart; every line has a text for every column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def aim(mu: float, delta: float, relation: str, unit: str, records: int) -> dict[str, Any]:
    """What several calibrations met: the ε that μ gives at δ."""
    from fedpriv.accounting.gaussian import epsilon_of, relation_named
    from fedpriv.noise.trust import unit_named

    about = {"relation": relation_named(relation), "unit": unit_named(unit, records).words}
    return {"delta": delta, "epsilon_at_most": epsilon_of(mu, delta), **about}


def guarantee_of(
    sampling: str, multiplier: float, rounds: int | None, epochs: int, groups: int, relation: str
) -> "Guarantee":
    """What `multiplier` clips of noise give records that `sampling` draws among `rounds` rounds."""
    from fedpriv.accounting.gaussian import relation_named
    from fedpriv.participation.secret import SecretOrder
    from fedpriv.rounds.setting import Setting

    if rounds is None:
        raise InputError(f"multiplier = {multiplier}: say in how many --rounds records take part")
    order = Setting(rounds, epochs=epochs, sampling=sampling, groups=groups).participation
    if not isinstance(order, SecretOrder):
        raise InputError(
            f"sampling = {sampling!r}: a multiplier says something of records that take part in secret, by "
            '"allocation" or "poisson"; for a public order ask `fedpriv privacy spent`'
        )
    return order.promise(multiplier, relation_named(relation))


def setting_facts(setting: "Setting", unit: str = "record") -> dict[str, Any]:
    """What the numbers are about: who is protected, and how a record, or another unit, takes part."""
    from fedpriv.noise.trust import unit_named

    whose = unit_named(unit)
    return {
        "trust": setting.trust,
        "protects": setting.protection.protection_of(whose),
        "rounds": setting.rounds,
        "participation": setting.words(whose.noun),
    }


def cost_facts(cost: "Cost") -> dict[str, Any]:
    """Noise as it is needed, and what it does; `show` rounds both up: less noise would not do."""
    return {
        "noise_std": cost.std,
        "error_rms": cost.error,
        "error_last": cost.error_last,
        "error_worst": cost.error_worst,
        "error_in_mean": cost.error_in_mean,
        "memory_vectors": cost.memory,
        **{f"sensitivity_{name}": value for name, value in cost.sensitivity._asdict().items()},
    }


def guarantee_facts(claim: "PrivacyClaim[Guarantee]", delta: float | None) -> dict[str, Any]:
    """What is promised, by every conversion, and to whom."""
    from fedpriv.accounting.guarantees import DEFAULT_DELTA

    at = DEFAULT_DELTA if delta is None else delta
    return {**claim.guarantee.conversions(at), "relation": claim.relation, "unit": claim.unit.words}


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


def show(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts))
        return
    print_table([(_LABELS.get(name, name.replace("_", " ")), _text(name, value)) for name, value in facts.items()])
    said = [name for name in facts if name.startswith("epsilon") and name not in ("epsilon_rdp", "epsilon_paper")]
    epsilons = [value for name in said if isinstance(value := facts[name], float)]
    for line in caveats(max(epsilons, default=0.0), facts.get("delta", 0.0)):
        typer.echo(line)


def _text(name: str, value: Any) -> str:
    """A figure on the safe side: leakage and what it is computed from up, noise that is there down."""
    if isinstance(value, bool):
        return "yes" if value else "no, an upper bound"
    if not isinstance(value, float):
        return str(value)
    if name.startswith("epsilon"):
        return epsilon_figure(value, 9)
    return lower_figure(value, 9) if name == "noise_multiplier" else upper_figure(value, 9)
