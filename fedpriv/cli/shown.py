"""What the accounting commands print: facts and a guarantee, as text or as one JSON object.  Imports no torch."""

import json
from typing import TYPE_CHECKING, Any

import typer

from fedpriv.cli.sampled import sampled_facts
from fedpriv.cli.text import print_table
from fedpriv.figures import caveats, epsilon_figure, lower_figure, upper_figure

if TYPE_CHECKING:
    from fedpriv.accounting.guarantees import Guarantee
    from fedpriv.privacy.claim import PrivacyClaim
    from fedpriv.privacy.cost import Cost
    from fedpriv.privacy.setting import Setting


def setting_facts(setting: "Setting", unit: str = "record") -> dict[str, Any]:
    """What the numbers are about: who is protected, and how a record, or another unit, takes part."""
    from fedpriv.privacy.unit import unit_named

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
    from fedpriv.accounting import GaussianDP
    from fedpriv.accounting.target import DEFAULT_DELTA

    at = DEFAULT_DELTA if delta is None else delta
    guarantee, about = claim.guarantee, {"relation": claim.relation, "unit": claim.unit.words}
    if not isinstance(guarantee, GaussianDP):
        return {**sampled_facts(guarantee, at), **about}
    pair = guarantee.epsilon_delta(at)
    return {
        "mu": guarantee.mu,
        "zcdp": guarantee.zcdp,
        "delta": pair.delta,
        "epsilon": pair.exact,
        "epsilon_rdp": pair.rdp,
        "epsilon_paper": pair.paper,
        **about,
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
