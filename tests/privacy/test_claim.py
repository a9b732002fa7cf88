"""A claim carries its relation and its unit, and prints both conversions by name."""

import subprocess
import sys

import pytest

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting import renyi as zcdp
from fedpriv.accounting.gaussian import RELATIONS, relation_named
from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.core.errors import InputError
from fedpriv.rounds.ledger import PrivacyClaim


def test_a_claim_says_for_whom_and_by_which_route() -> None:
    line = PrivacyClaim(GaussianDP(1.0), "replace-one").statement(1e-5)
    assert "\n" not in line
    for part in (
        "1-GDP",
        "0.5-zCDP",
        "ε = 4.37718 at δ = 1e-05 by the exact conversion",
        "5.29853 by the papers",
        "1e-05",
        "replace-one",
    ):
        assert part in line
    assert "one record of a silo" in line


def test_both_routes_are_the_library_functions() -> None:
    pair = GaussianDP(0.7).epsilon_delta(1e-6)
    assert pair.exact == gdp.epsilon_of(0.7, 1e-6)
    assert pair.paper == zcdp.paper_epsilon(0.7, 1e-6)
    assert pair.exact < pair.rdp < pair.paper


def test_an_unknown_relation_is_refused() -> None:
    with pytest.raises(InputError, match="relation = 'add-one'"):
        relation_named("add-one")
    assert [relation_named(name) for name in RELATIONS] == ["replace-one", "zero-out"]


@pytest.mark.parametrize("mu", [-1.0, float("nan"), float("inf")])
def test_a_guarantee_needs_a_finite_mu(mu: float) -> None:
    with pytest.raises(InputError, match="mu ="):
        GaussianDP(mu)


def test_accounting_and_the_algebra_start_without_torch() -> None:
    code = "import sys, fedpriv.accounting.budget, fedpriv.noise.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
