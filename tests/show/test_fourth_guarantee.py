"""A kind of guarantee that fedpriv does not have: one file, and one line of the table of participations."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

import fedpriv
from fedpriv.accounting.budget import LifetimeBudget
from fedpriv.accounting.curves import Curve, Floats, as_floats
from fedpriv.accounting.guarantees import Curved, Guarantee, weakest
from fedpriv.claims.claim import claim_figures, compute_claim
from fedpriv.claims.entries import make_event_data, read_ledger
from fedpriv.claims.ledger import stream_from_data
from fedpriv.cli.app import app
from fedpriv.core.errors import InputError
from fedpriv.participation.orders import FixedOrder, Participation, ParticipationKeys, ReleasedSums
from fedpriv.participation.registry import USER_PARTICIPATIONS
from fedpriv.show.page import write_report
from fedpriv.show.summary import privacy_lines
from fedpriv.show.table import render_tables
from fedpriv.silo.admission import PriceCurve, why_over_budget
from fedpriv.study.results import read_claims
from tests.conftest import small_tree

DELTA = 1e-5


@dataclass(frozen=True)
class Concentrated(Curved):
    """ρ-zCDP, and nothing more is known: δ(ε) ≤ e^(-(ε - ρ)²/4ρ) for ε ≥ ρ (Bun & Steinke 2016)."""

    rho: float

    kind: ClassVar[str] = "concentrated"
    alike: ClassVar[str] = kind
    note: ClassVar[str] = "Rényi divergences are bounded here, and nothing else."

    @property
    def leakage(self) -> float:
        return self.rho

    @property
    def curve(self) -> Curve:
        def curve(epsilons: Floats) -> Floats:
            bound = np.exp(-(np.maximum(0.0, epsilons - self.rho) ** 2) / (4.0 * self.rho))
            return as_floats(np.minimum(bound, np.sqrt(self.rho / 2.0)))  # Pinsker's inequality

        return curve

    def figures(self, delta: float) -> dict[str, float | None]:
        return {**super().figures(delta), "zcdp": self.rho}

    def format_clause(self, shown: Any, attained: bool) -> str:
        return f"{shown['zcdp']}-zCDP, (ε, δ) at most ({shown['epsilon']}, {shown['delta']})"


@dataclass(frozen=True)
class Whispered(FixedOrder):
    """A fixed order of which somebody proved zCDP only."""

    name: ClassVar[str] = "whispered"
    title: ClassVar[str] = "whispered order"

    @classmethod
    def from_schedule(cls, order: Participation, keys: ParticipationKeys) -> Participation:
        return cls(order.rounds, order.rounds_per_epoch)

    def guarantee(self, sums: ReleasedSums, std: float) -> Any:
        return Concentrated(0.5 * (sums.displacement(sums.sensitivity()) / std) ** 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose releases are said to have been made in a whispered order."""
    monkeypatch.setitem(USER_PARTICIPATIONS, Whispered.name, Whispered)
    run = fedpriv.run(small_tree(privacy={"relation": "replace-one", "mu": 0.2}), out=tmp_path / "run").folder
    tree = json.loads((run / "results.json").read_text())
    (cell,) = tree["cells"]
    for release in cell["releases"]:
        release["participation"]["name"] = Whispered.name
    claim = compute_claim(list(map(stream_from_data, cell["releases"])))
    cell |= {**claim_figures(claim, cell["delta"]), "participation": Whispered.title}
    cell["scenario"]["federation"]["sampling"] = Whispered.name
    del cell["scenario"]["privacy"]["mu"]
    cell["scenario"]["privacy"]["epsilon"] = cell["epsilon"]
    (run / "results.json").write_text(json.dumps(tree))
    return run


def test_a_third_party_guarantee_is_shown_in_ledger_table_report_and_terminal(folder: Path) -> None:
    (entry,) = read_ledger(folder)
    assert entry.agrees, entry.disagreement
    assert entry.claim is not None
    guarantee = entry.claim.guarantee
    assert guarantee == Concentrated(pytest.approx(0.02))
    (line,) = privacy_lines(read_claims(folder))
    assert line.startswith("Privacy: one record of a silo, replace-one neighbours, untrusted server: 0.02")
    assert "-zCDP, (ε, δ) at most" in line
    assert line in render_tables(read_claims(folder), "markdown")
    page = write_report(folder).read_text(encoding="utf-8")
    assert Concentrated.note in page
    assert "exact</th>" not in page
    facts = entry.claim.conversions(DELTA)
    assert facts["epsilon_at_most"] == guarantee.epsilon_of(DELTA)
    assert facts["unit"] == "one record of a silo"
    shown = CliRunner().invoke(app, ["privacy", "ledger", str(folder)])
    assert shown.exit_code == 0
    assert "ok" in shown.output
    assert f"ε = {guarantee.epsilon_of(entry.delta):.2f}"[:-1] in shown.output


def test_a_third_party_guarantee_has_a_price_but_no_dp_accounting_event(folder: Path) -> None:
    (entry,) = read_ledger(folder)
    with pytest.raises(InputError, match="no event for whispered order"):
        make_event_data(entry)
    small: Guarantee = Concentrated(0.01)
    price = PriceCurve(small).price_at(1e-7)
    assert price is not None
    assert price.slack == 1e-7
    assert small.epsilon_of(DELTA) <= price.epsilon_of(DELTA)
    assert why_over_budget(LifetimeBudget(10.0, 1e-6), [], price) is None
    assert "the run costs mu = " in (why_over_budget(LifetimeBudget(10.0), [], price) or "")
    assert weakest([small, Concentrated(0.02)]) == Concentrated(0.02)
