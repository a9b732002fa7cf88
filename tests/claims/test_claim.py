"""A claim carries its relation and its unit, and prints both conversions by name."""

import subprocess
import sys

import pytest

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting import renyi as zcdp
from fedpriv.accounting.gaussian import RELATIONS, relation_named
from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.claims.claim import PrivacyClaim
from fedpriv.core.errors import InputError


def test_a_claim_says_for_whom_and_by_which_route() -> None:
    line = PrivacyClaim(GaussianDP(1.0), "replace-one").format_sentence("line", 1e-5)
    assert line == (
        "one record of a silo, replace-one neighbours: μ-GDP with μ at most 1 (zCDP 0.5); (ε, δ) at most (4.378, "
        "1e-05), (5.299, 1e-05) by the paper's formula, rounded up"
    )
    assert "exactly" in PrivacyClaim(GaussianDP(1.0), "replace-one", attained=True).format_sentence("line", 1e-5)


def test_all_routes_are_the_library_functions() -> None:
    found = GaussianDP(0.7).conversions(1e-6)
    assert found["epsilon"] == gdp.epsilon_of(0.7, 1e-6)
    assert found["epsilon_paper"] == zcdp.paper_epsilon(0.7, 1e-6)
    assert found["epsilon"] < found["epsilon_rdp"] < found["epsilon_paper"]


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
