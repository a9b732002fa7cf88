"""What a report says in words: true for every mechanism, trust setting and kind of noise."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.claims.claim import EXACT_ASSUMPTIONS, compute_claim
from fedpriv.claims.ledger import stream_from_data, stream_to_data
from fedpriv.claims.outcome import make_outcome
from fedpriv.noise.registry import MECHANISMS
from fedpriv.noise.trust import RECORD, Unit, make_unit
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.show.statement import Statement, make_statements
from fedpriv.study.stored import privacy_data
from tests.conftest import small_tree
from tests.show.builders import results_of_records, streams_of

PHASED = {"name": "phased-sgd", "trust": "curator", "step": 0.001, "radius": 1.0}
REDUCED = {"name": "momentum-tree-reduced", "trust": "untrusted", "alpha": 0.5, "step": 0.1}
CLIPPED = {**REDUCED, "name": "momentum-tree-aligned", "clip": 1.0, "difference_clip": 0.1, "residual_clip": 0.1}
TRUSTS = ["untrusted", "trusted", "secure-aggregation"]


def cell_of(trust: str = "untrusted", **changes: Any) -> Cell:
    return resolve_cell({**small_tree(algorithm__trust=trust), **changes}, "test")


def zero_out(algorithm: dict[str, Any]) -> Cell:
    return cell_of(algorithm=algorithm, privacy={"relation": "zero-out", "mu": 1.0})


def statement_of(cell: Cell, noise: Any = "simulation", count: int = 1) -> Statement:
    """What is said of `count` runs of a cell, with noise of a simulation or of a release."""
    record = privacy_data(cell, streams_of(cell), noise)
    (statement,) = make_statements(results_of_records(*[record] * count))
    return statement


def test_every_mechanism_has_its_own_description_in_words() -> None:
    """Five of eight were shown as the name of a class."""
    assert all(kind.words.startswith(("Gaussian noise", "independent Gaussian")) for kind in MECHANISMS.values())
    assert len({kind.words for kind in MECHANISMS.values()}) == len(MECHANISMS) == 13


def test_guarantee_runs_are_composed_for_the_unit_that_each_of_them_protects() -> None:
    """Before: "a record" had the composed μ of all clients' runs, and a record's μ may be twice a client's."""
    cell = zero_out({"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 1.0})

    def record_of(unit: Unit) -> dict[str, Any]:
        streams = [dataclasses.replace(stream, unit=unit) for stream in streams_of(cell)]
        return privacy_data(cell, streams, "release")

    records = [record_of(make_unit("client", 2)), record_of(make_unit("client", 4)), record_of(RECORD)]
    of_two, of_four, of_records = (statement.noise for statement in make_statements(results_of_records(*records)))
    assert of_two == of_four
    assert (
        "A client that takes part in all of these 2 runs has together only the protection of μ = 1.415," in of_two
    )
    assert "all of these" not in of_records


@pytest.mark.parametrize(
    ("trust", "who"),
    list(zip(TRUSTS, ("Every silo drew its noise", "The server drew", "Every silo"), strict=True)),
)
def test_a_release_says_who_drew_the_noise(trust: str, who: str) -> None:
    """Under a trusted server no silo draws: "by each silo" was a false sentence about privacy."""
    noise = statement_of(cell_of(trust), "release").noise
    assert noise.startswith(who)
    assert ("silo drew" in noise) == (trust != "trusted")


def test_several_real_releases_of_the_same_records_state_their_composed_mu() -> None:
    """Three runs of μ = 4 on a silo's records are 6.93: "μ = 4" alone overstates what is protected."""
    for kind, count in (("release", 3), ("release", 1), ("simulation", 3)):
        noise = statement_of(cell_of("trusted"), kind, count).noise
        for part in ("these 3 runs", "μ = 6.929"):
            assert (part in noise) == (kind == "release" and count == 3)


def test_releases_under_two_trust_settings_are_composed_in_both_statements() -> None:
    """They are two statements about one record."""
    cells = [cell_of("trusted"), cell_of("untrusted")]
    statements = make_statements(
        results_of_records(*(privacy_data(cell, streams_of(cell), "release") for cell in cells))
    )
    parts = "these 2 runs", "μ = 5.657"
    assert [[part in statement.noise for part in parts] for statement in statements] == [[True, True]] * 2


def test_a_simulation_says_that_it_protects_nobody() -> None:
    assert "This was a simulation" in statement_of(cell_of("trusted")).noise


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (cell_of(), "assume nothing about the loss or the model"),
        (zero_out(CLIPPED), "assume nothing about the loss"),
        (zero_out(REDUCED), "on the loss's smoothness"),
        (zero_out(PHASED), "convex, smooth"),
    ],
    ids=["clips", "clipped differences", "smoothness", "contraction"],
)
def test_the_statement_lists_the_assumptions_on_the_loss_that_the_algorithm_needs(cell: Cell, words: str) -> None:
    (line,) = statement_of(cell).loss_assumptions
    assert words in line


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
def test_the_stated_mu_and_relation_come_from_the_releases_and_not_from_the_scenario(relation: str) -> None:
    """Half of the noise under the other relation: what was asked for must not be what is stated."""
    cell = cell_of(privacy={"relation": relation, "rho": 2.0})
    other = "zero-out" if relation == "replace-one" else "replace-one"
    changed = [dataclasses.replace(stream, std=stream.std / 2, relation=other) for stream in streams_of(cell)]
    stated = privacy_data(cell, changed)
    factor = 2.0 if relation == "zero-out" else 0.5
    assert stated["mu"] == pytest.approx(2.0 * 2.0 * factor)
    assert stated["zcdp"] == pytest.approx((4.0 * factor) ** 2 / 2)
    assert stated["relation"] == other
    assert stated["releases"] == [stream_to_data(stream) for stream in changed]


def test_rho_is_stated_only_for_the_algorithm_whose_paper_calls_mu_rho() -> None:
    """`rho` in results.json of any other algorithm reads as zCDP."""
    sgd = {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1}
    for cell, rho in (
        (cell_of(), 4.0),
        (cell_of(algorithm=sgd, privacy={"relation": "zero-out", "mu": 4.0}), None),
    ):
        stated = privacy_data(cell, streams_of(cell))
        assert stated["mu"] == pytest.approx(4.0)
        assert stated["rho"] == (rho and pytest.approx(rho))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("trust", "mode"), [*((trust, "gaussian") for trust in TRUSTS), ("untrusted", "none"), ("trusted", "none")]
)
def test_the_bytes_sent_per_coordinate_match_the_width_of_a_message(trust: str, mode: str, dtype: str) -> None:
    """Masked words take 8 bytes a coordinate, whatever the model is computed in."""
    privacy = {"relation": "replace-one", **({"mode": "none"} if mode == "none" else {"rho": 4.0})}
    cell = cell_of(trust, run={"dtype": dtype}, privacy=privacy)

    def bytes_a_coordinate(*, for_release: bool) -> float:
        plan = make_plan(cell, load_task(cell).objective, for_release=for_release)
        return make_outcome(plan, 8, np.zeros(7850), {}, None, 0.0).bytes_sent / (8 * 7850)

    of_float = 4 if dtype == "float32" else 8
    assert bytes_a_coordinate(for_release=False) == (of_float if trust == "untrusted" or mode == "none" else 8)
    if mode == "gaussian":
        widths = {"untrusted": of_float, "trusted": 8, "secure-aggregation": 6}
        assert bytes_a_coordinate(for_release=True) == widths[trust]


@pytest.mark.parametrize("trust", TRUSTS)
def test_an_integer_release_states_its_exactness_and_a_float_release_assumes_real_arithmetic(trust: str) -> None:
    """Claim, results and statement; floating point claims nothing but real numbers."""
    cell = cell_of(trust)
    for released, words in ((True, EXACT_ASSUMPTIONS), (False, "in real arithmetic")):
        streams = streams_of(cell, for_release=released)
        record = privacy_data(cell, streams)
        assert record["holds"] == words
        (statement,) = make_statements(results_of_records(record))
        assert (EXACT_ASSUMPTIONS in " ".join(statement.assumptions)) == released
        claim = compute_claim(streams)
        assert claim is not None
        assert claim.exact == released
        assert isinstance(claim.guarantee, GaussianDP)
        assert 4.0 * (1 - 1e-9) < claim.guarantee.mu <= 4.0
        assert [stream_from_data(stream_to_data(stream)) for stream in streams] == list(streams)
        if released:
            assert max(stream.slack for stream in streams) < 2.0**-60


def test_table_ranges_declared_public_by_a_scenario_are_listed_as_an_assumption() -> None:
    """Before, no page of a run said by whose word they are public, nor what they tell if they were read."""
    record = privacy_data(cell_of(), streams_of(cell_of()), "simulation")
    results = results_of_records(record)
    (plain,) = make_statements(results)
    assert not [text for text in plain.assumptions if "data.table.public" in text]
    cell = dict(results.cells[0])
    table = {"data": {"name": "patients.csv", "table": {"public": True}}}
    (declared,) = make_statements(dataclasses.replace(results, cells=[{**cell, "scenario": table}]))
    (sentence,) = [text for text in declared.assumptions if "data.table.public" in text]
    assert "if they were read off the records, they tell of them whatever the noise" in sentence
