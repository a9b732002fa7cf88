"""Print facts and a guarantee, as text or as one JSON object.  Imports no torch.

Figures are rounded to the safe side: leakage and what it is computed from up, noise that is there down.
"""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

import typer

from fedpriv.core.errors import InputError, printable, printable_lines
from fedpriv.core.figures import caveats, epsilon_figure, lower_figure, upper_figure

if TYPE_CHECKING:
    from fedpriv.accounting.guarantees import Guarantee
    from fedpriv.cli.options import Federation, Participation
    from fedpriv.study.setting import Cost, Setting


def say(text: str, stream: TextIO | None = None) -> None:
    """Write a text that may have words of a stranger's scenario, table or certificate, by default to stdout."""
    (stream or sys.stdout).write(printable_lines(text))


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Print left-aligned columns, two spaces apart; every line has a text for every column."""
    lines = [[printable(cell, len(cell)) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        say("  ".join(cells).rstrip() + "\n")


def aim(mu: float, delta: float, federation: "Federation") -> dict[str, Any]:
    """The aim of calibrations whose guarantees are curves: the ε that μ gives at δ."""
    from fedpriv.accounting.guarantees import GaussianDP

    claim, epsilon = federation.claim(GaussianDP(mu)), GaussianDP(mu).epsilon_of(delta)
    return {"delta": delta, "epsilon_at_most": epsilon, "relation": claim.relation, "unit": claim.unit.words}


def guarantee_of(order: "Participation", multiplier: float, rounds: int | None) -> "Guarantee":
    """The guarantee of `multiplier` clips of noise for records that take part in secret among `rounds` rounds."""
    from fedpriv.accounting.gaussian import relation_named
    from fedpriv.participation.secret import SecretOrder

    if rounds is None:
        raise InputError(f"multiplier = {multiplier}: say in how many --rounds records take part")
    setting = order.setting(rounds)
    if not isinstance(setting.participation, SecretOrder):
        raise InputError(
            f"sampling = {setting.sampling!r}: a multiplier says something of records that take part in secret, "
            'by "allocation", "balanced" or "poisson"; for a public order ask `fedpriv privacy spent`'
        )
    return setting.participation.promise(multiplier, relation_named(setting.relation))


def setting_facts(setting: "Setting", unit: str = "record") -> dict[str, Any]:
    """Say whom the numbers protect, and how a record, or another unit, takes part."""
    from fedpriv.noise.trust import unit_named

    whose = unit_named(unit)
    return {
        "trust": setting.trust,
        "protects": setting.protection.protection_of(whose),
        "rounds": setting.rounds,
        "participation": setting.words(whose.noun),
    }


def cost_facts(cost: "Cost") -> dict[str, Any]:
    """Noise as it is needed, and its errors; `show` rounds both up: less noise would not do."""
    return {
        "noise_std": cost.std,
        "error_rms": cost.error,
        "error_last": cost.error_last,
        "error_worst": cost.error_worst,
        "error_in_mean": cost.error_in_mean,
        "memory_vectors": cost.memory,
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


TOGETHER = "_together"
"""How the name of a figure of several units ends: no caveat of one unit's ε is about it."""


def show(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts))
        return
    print_table(
        [
            (_LABELS.get(name, name.replace("_", " ").replace("epsilon", "ε")), _text(name, value))
            for name, value in facts.items()
        ]
    )
    others = ("epsilon_rdp", "epsilon_paper")
    said = [
        name for name in facts if name.startswith("epsilon") and name not in others and not name.endswith(TOGETHER)
    ]
    epsilons = [value for name in said if isinstance(value := facts[name], float)]
    for line in caveats(max(epsilons, default=0.0), facts.get("delta", 0.0)):
        say(f"{line}\n")


def _text(name: str, value: Any) -> str:
    """Write a figure on the safe side: leakage and its terms up, noise that is there down."""
    if isinstance(value, bool):
        return "yes" if value else "no, an upper bound"
    if not isinstance(value, float):
        return str(value)
    if name.startswith("epsilon"):
        return epsilon_figure(value, 9)
    return lower_figure(value, 9) if name == "noise_multiplier" else upper_figure(value, 9)
