"""What a run claims, recomputed from its recorded releases, is never above what was asked for."""

import itertools
import math

import numpy as np
import pytest

from fedpriv.accounting.gaussian import epsilon_of, mu_of
from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.accounting.poisson import PoissonGaussian, calibrate
from fedpriv.claims.claim import compute_claim
from fedpriv.claims.ledger import make_release_streams
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from tests.conftest import small_tree
from tests.parts import in_parts

PHASED = {"name": "phased-sgd", "trust": "curator", "clip": 1.0, "step": 1e-6, "radius": 1.0}


def claimed(trust: str, key: str, target: float, silos: int, batch: int) -> GaussianDP:
    """The guarantee that the ledger of a run gives."""
    given = {f"privacy__{name}": None for name in ("rho", "mu", "zcdp", "epsilon")} | {f"privacy__{key}": target}
    changes = {"federation__silos": silos, "federation__batch": batch, "algorithm__trust": trust, **given}
    tree = small_tree(**changes)
    if trust == "curator":
        tree["algorithm"] = {**PHASED, "clip": "lipschitz"}
    cell = resolve_cell(tree, "test")
    claim = compute_claim(make_release_streams(make_plan(cell, load_task(cell).objective), cell.schedule.rounds))
    assert claim is not None
    assert isinstance(claim.guarantee, GaussianDP)
    return claim.guarantee


@pytest.mark.parametrize("targets", in_parts([60, 300], [60]))
@pytest.mark.parametrize(
    ("trust", "key"),
    [
        *itertools.product(("untrusted", "trusted", "secure-aggregation"), ("rho", "zcdp", "epsilon")),
        *itertools.product(("curator",), ("mu", "zcdp", "epsilon")),
    ],
)
def test_no_claim_is_above_its_target(trust: str, key: str, targets: int) -> None:
    """So many targets a key and trust, from 1e-3 to 1e3, with silos and batches of awkward sizes.

    A fault at 1 % of them is met with probability 95 %.
    """
    draw = np.random.default_rng(8)
    for target in np.exp(draw.uniform(math.log(1e-3), math.log(1e3), targets)).tolist():
        silos, batch = int(draw.integers(2, 9)), int(draw.integers(1, 12))
        guarantee = claimed(trust, key, target, silos, batch)
        mu, epsilon = guarantee.mu, guarantee.epsilon_of(1e-5)
        reached = {"rho": mu, "mu": mu, "zcdp": guarantee.zcdp, "epsilon": epsilon}[key]
        assert target * (1.0 - 1e-9) < reached <= target


@pytest.mark.slow
def test_noise_multiplier_of_a_poisson_sampled_run_is_never_below_the_calibrated_one() -> None:
    """Poisson sampling: the multiplier that the ledger reads off is not below the one that was found to do."""
    draw = np.random.default_rng(80)
    for silos, batch in draw.integers(2, 40, (60, 2)).tolist():
        for trust in ("untrusted", "trusted"):
            rounds = {"silos": silos, "rounds": 8, "batch": batch, "epochs": 2, "sampling": "poisson"}
            algorithm = {"name": "dp-sgd", "trust": trust, "clip": float(draw.uniform(0.1, 9.0)), "step": 1.0}
            privacy = {"relation": "zero-out", "epsilon": 1.0}
            cell = resolve_cell(small_tree(federation=rounds, privacy=privacy, algorithm=algorithm), "test")
            found = calibrate(epsilon_of(mu_of(1.0, 1e-5), 1e-5), 1e-5, 0.25, 8)
            for stream in make_release_streams(make_plan(cell, load_task(cell).objective), 8):
                assert isinstance(stream.guarantee, PoissonGaussian)
                assert found.noise_multiplier <= stream.guarantee.noise_multiplier < 1.001 * found.noise_multiplier
