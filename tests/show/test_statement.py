"""What a report says in words: true for every mechanism, trust setting and kind of noise."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.claims.claim import EXACT_ASSUMPTIONS, compute_claim
from fedpriv.claims.ledger import make_release_streams, stream_from_data, stream_to_data
from fedpriv.claims.outcome import make_outcome
from fedpriv.noise.registry import MECHANISMS
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.show import statement
from fedpriv.show.statement import make_statements
from fedpriv.study.results import Results
from fedpriv.study.stored import privacy_data
from tests.conftest import small_tree

PHASED = {"name": "phased-sgd", "trust": "curator", "step": 0.001, "radius": 1.0}
REDUCED = {"name": "momentum-tree-reduced", "trust": "untrusted", "alpha": 0.5, "step": 0.1}
CLIPPED = {"name": "momentum-tree-aligned", "trust": "untrusted", "alpha": 0.5, "step": 0.1, "clip": 1.0,
           "difference_clip": 0.1, "residual_clip": 0.1}  # fmt: skip


def cell_of(trust: str = "untrusted", **changes: Any) -> Cell:
    tree = small_tree(algorithm__trust=trust)
    return resolve_cell({**tree, **changes}, "test")


def said(cell: Cell, kind: str) -> statement.Statement:
    releases = make_release_streams(make_plan(cell, load_task(cell).objective), cell.schedule.rounds)
    record = privacy_data(cell, releases, "release" if kind == "release" else "simulation")
    (found,) = make_statements(Results("n", "", "deployment", True, {}, [0], None, [record], {}, None))
    return found


def test_every_mechanism_of_the_ledger_has_words() -> None:
    """Five of eight were shown as the name of a class."""
    assert all(kind.words.startswith(("Gaussian noise", "independent Gaussian")) for kind in MECHANISMS.values())
    assert len({kind.words for kind in MECHANISMS.values()}) == len(MECHANISMS) == 13


@pytest.mark.parametrize(
    ("trust", "who"),
    [
        ("untrusted", "Every silo drew its noise"),
        ("secure-aggregation", "Every silo"),
        ("trusted", "The server drew"),
    ],
)
def test_a_release_says_who_drew_the_noise(trust: str, who: str) -> None:
    """Under a trusted server no silo draws: "by each silo" was a false sentence about privacy."""
    noise = said(cell_of(trust), "release").noise
    assert noise.startswith(who)
    assert ("silo drew" in noise) == (trust != "trusted")


def test_several_releases_of_the_same_records_say_what_they_cost_together() -> None:
    """Three runs of μ = 4 on a silo's records are 6.93: "μ = 4" alone overstates what is protected."""
    cell = cell_of("trusted")
    releases = make_release_streams(make_plan(cell, load_task(cell).objective), 8)
    for kind, count in (("release", 3), ("release", 1), ("simulation", 3)):
        record = privacy_data(cell, releases, "release" if kind == "release" else "simulation")
        (found,) = make_statements(Results("n", "", "deployment", True, {}, [0], None, [record] * count, {}, None))
        assert ("these 3 runs" in found.noise) == (kind == "release" and count == 3)
        assert ("μ = 6.929" in found.noise) == (kind == "release" and count == 3)


def test_releases_under_two_trust_settings_add_up() -> None:
    """They are two statements about one record."""
    cells = [cell_of("trusted"), cell_of("untrusted")]
    records = [
        privacy_data(cell, make_release_streams(make_plan(cell, load_task(cell).objective), 8), "release")
        for cell in cells
    ]
    found = make_statements(Results("n", "", "deployment", True, {}, [0], None, records, {}, None))
    assert [("these 2 runs" in each.noise, "μ = 5.657" in each.noise) for each in found] == [(True, True)] * 2


def test_a_simulation_says_that_it_protects_nobody() -> None:
    assert "This was a simulation" in said(cell_of("trusted"), "simulation").noise


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (cell_of(), "assume nothing about the loss or the model"),
        (cell_of(algorithm=CLIPPED, privacy={"relation": "zero-out", "mu": 1.0}), "assume nothing about the loss"),
        (cell_of(algorithm=REDUCED, privacy={"relation": "zero-out", "mu": 1.0}), "on the loss's smoothness"),
        (
            cell_of(algorithm=PHASED, privacy={"relation": "zero-out", "mu": 1.0}),
            "convex, smooth",
        ),
    ],
    ids=["clips", "clipped differences", "smoothness", "contraction"],
)
def test_what_the_figures_take_for_granted_about_the_loss(cell: Cell, words: str) -> None:
    (line,) = said(cell, "simulation").loss_assumptions
    assert words in line


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
def test_figures_and_relation_are_those_of_the_releases(relation: str) -> None:
    """Half of the noise under the other relation: what was asked for must not be what is stated."""
    cell = cell_of(privacy={"relation": relation, "rho": 2.0})
    releases = make_release_streams(make_plan(cell, load_task(cell).objective), 8)
    other = "zero-out" if relation == "replace-one" else "replace-one"
    changed = [dataclasses.replace(stream, std=stream.std / 2, relation=other) for stream in releases]
    stated = privacy_data(cell, changed)
    factor = 2.0 if relation == "zero-out" else 0.5
    assert stated["mu"] == pytest.approx(2.0 * 2.0 * factor)
    assert stated["zcdp"] == pytest.approx((4.0 * factor) ** 2 / 2)
    assert stated["relation"] == other
    assert stated["releases"] == [stream_to_data(stream) for stream in changed]


def test_rho_is_written_where_the_paper_calls_mu_so() -> None:
    """`rho` in results.json of any other algorithm reads as zCDP."""
    sgd = {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1}
    for cell, rho in (
        (cell_of(), 4.0),
        (cell_of(algorithm=sgd, privacy={"relation": "zero-out", "mu": 4.0}), None),
    ):
        stated = privacy_data(cell, make_release_streams(make_plan(cell, load_task(cell).objective), 8))
        assert stated["mu"] == pytest.approx(4.0)
        assert stated["rho"] == (rho and pytest.approx(rho))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
@pytest.mark.parametrize("private", [True, False])
def test_bytes_sent_are_those_of_a_message(trust: str, dtype: str, private: bool) -> None:
    """Masked words take 8 bytes a coordinate, whatever the model is computed in."""
    changes: dict[str, Any] = {"run": {"dtype": dtype}}
    if not private:
        if trust == "secure-aggregation":
            return  # refused: there is nothing to round to
        changes["privacy"] = {"relation": "replace-one", "mode": "none"}
    cell = cell_of(trust, **changes)
    plan = make_plan(cell, load_task(cell).objective)
    finished = make_outcome(plan, 8, np.zeros(7850), {}, None, 0.0)
    width = 4 if dtype == "float32" and (trust == "untrusted" or not private) else 8
    assert finished.bytes_sent == 8 * 7850 * width
    if private:
        exact = make_plan(cell, load_task(cell).objective, for_release=True)
        width = {"untrusted": 4 if dtype == "float32" else 8, "trusted": 8, "secure-aggregation": 6}[trust]
        assert make_outcome(exact, 8, np.zeros(7850), {}, None, 0.0).bytes_sent == 8 * 7850 * width


@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
def test_an_exact_release_says_up_to_what_it_holds(trust: str) -> None:
    """Claim, results and statement; floating point claims nothing but real numbers."""
    cell = cell_of(trust)
    for released, words in ((True, EXACT_ASSUMPTIONS), (False, "in real arithmetic")):
        streams = make_release_streams(make_plan(cell, load_task(cell).objective, for_release=released), 8)
        record = privacy_data(cell, streams)
        assert record["holds"] == words
        (found,) = make_statements(Results("n", "", "deployment", True, {}, [0], None, [record], {}, None))
        assert (EXACT_ASSUMPTIONS in " ".join(found.assumptions)) == released
        claim = compute_claim(streams)
        assert claim is not None
        assert claim.exact == released
        assert isinstance(claim.guarantee, GaussianDP)
        assert 4.0 * (1 - 1e-9) < claim.guarantee.mu <= 4.0
        assert [stream_from_data(stream_to_data(stream)) for stream in streams] == list(streams)
        if released:
            assert max(stream.slack for stream in streams) < 2.0**-60
