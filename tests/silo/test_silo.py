"""A silo answers what the protocol allows, with the noise it owes, and nothing else."""

import contextlib
import dataclasses
import pickle
import struct
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from scipy import stats

from fedpriv.clients.simulated import ContextStore, SimulatedFederation
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.random import KeyedNormal
from fedpriv.loss.objective import Batch, Increment, Query, Records
from fedpriv.noise.integers.gaussian import extend_missed_query_chain, extend_query_chain
from fedpriv.noise.tree import BinaryTree
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task, partition_records
from fedpriv.rounds.round import RoundState
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.silo import BoundedObjective, Silo, pack_state, unpack_state
from tests.conftest import small_tree
from tests.disordered import at_address, disordered
from tests.silo.guarded import replay

ZERO = torch.zeros(7850, dtype=torch.float64)
WITHOUT_NOISE: dict[str, Any] = {"privacy__mode": "none", "privacy__rho": None}


def cell_of(**overrides: Any) -> Cell:
    return resolve_cell(small_tree(**overrides), "test")


def silo_at(number: int = 0, **overrides: Any) -> Silo:
    """A simulated silo of the small cell."""
    return SimulatedFederation.from_cell(cell_of(**overrides)).silo(number)


def noise_of_releases(silo: Silo, exact: Silo) -> torch.Tensor:
    """What a silo added to its sums over a whole run at the origin: (T, d)."""
    state, plain, rows = silo.initial_state(), exact.initial_state(), []
    for t in range(1, silo.plan.schedule.rounds + 1):
        release, state = silo.answer(state, t, ZERO)
        truth, plain = exact.answer(plain, t, ZERO)
        rows.append(release.vector - truth.vector)
    return torch.stack(rows)


def test_silo_noise_has_the_variance_of_the_paper_and_is_independent_over_rounds_and_silos() -> None:
    """σ² = 4 S² T / ρ² per coordinate; KS at level 1e-4, and rejected at 2/3 and 3/2 of σ; rounds uncorrelated."""
    rounds = {"federation__rounds": 16}
    noise, other = (
        noise_of_releases(silo_at(number, **rounds), silo_at(number, **rounds, **WITHOUT_NOISE))
        for number in (1, 0)
    )
    clip = np.sqrt(2 * 785) + 2 * 392.5 * 0.1
    sigma = 2 * clip * np.sqrt(16) / 4.0
    values = noise.flatten().numpy() / sigma
    assert stats.kstest(values, "norm").pvalue > 1e-4
    assert stats.kstest(values * 2 / 3, "norm").pvalue < 1e-12
    assert stats.kstest(values * 3 / 2, "norm").pvalue < 1e-12
    assert abs(values.mean()) < 4 / np.sqrt(values.size)
    correlations = np.corrcoef(noise.numpy()) - np.eye(16)
    assert np.abs(correlations).max() < 5 / np.sqrt(7850)
    assert abs(np.corrcoef(noise.flatten(), other.flatten())[0, 1]) < 5 / np.sqrt(values.size)


def test_prefetched_noise_of_a_silo_is_bounded_without_changing_its_releases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The more silos, the fewer rounds each draws ahead, round 1 alone; what it releases stays the same."""
    exact = silo_at(**WITHOUT_NOISE)
    unbounded = noise_of_releases(silo_at(), exact)
    monkeypatch.setattr("fedpriv.rounds.floats._MAX_PREFETCHED_VALUES", 2 * 3 * 7850)
    drawn: list[int] = []
    vectors = KeyedNormal.vectors

    def counted(self: KeyedNormal, size: int, owners: list[int], *rest: Any) -> Any:
        drawn.append(len(owners))
        return vectors(self, size, owners, *rest)

    monkeypatch.setattr(KeyedNormal, "vectors", counted)
    assert torch.equal(noise_of_releases(silo_at(), exact), unbounded)
    assert drawn == [1, 2, 2, 2, 1]


def test_a_silo_of_a_trusted_server_releases_its_exact_sum() -> None:
    assert torch.all(noise_of_releases(silo_at(2, algorithm__trust="trusted"), silo_at(2, **WITHOUT_NOISE)) == 0.0)


def test_server_noise_under_trust_is_the_silo_noise_divided_by_the_number_of_silos() -> None:
    """σ = 2 S √T / (ρ M) at the server against 2 S √T / ρ at each silo."""
    trusted, untrusted = (
        make_plan(cell_of(algorithm__trust=trust, federation__silos=5), load_task(cell_of()).objective).noise
        for trust in ("trusted", "untrusted")
    )
    assert trusted.std_in_mean == pytest.approx(untrusted.sources[0].std / 5)
    assert untrusted.std_in_mean == pytest.approx(untrusted.sources[0].std / np.sqrt(5))


def test_each_record_is_used_in_exactly_one_round() -> None:
    """Replacing the record of round 5 changes nothing before round 5, and every release from it on."""
    silo = silo_at(**WITHOUT_NOISE)
    features = silo.records.features.clone()
    features[4] *= -0.5
    neighbour = Silo(0, silo.plan, silo.records._replace(features=features), silo.noise)
    difference = noise_of_releases(neighbour, silo).norm(dim=1)
    assert torch.all(difference[:4] == 0.0)
    assert torch.all(difference[4:] > 0.0)


def test_no_record_is_shared_between_silos() -> None:
    order = torch.stack(partition_records(cell_of(federation__silos=30, federation__rounds=200)))
    assert order.shape == (30, 200)
    assert len(order.unique()) == order.numel()


@pytest.mark.parametrize(
    ("t", "query", "line"),
    [
        (3, ZERO, "asked for round 3 after round 1"),
        (1, ZERO, "asked for round 1 after round 1"),
        (2, ZERO[:-1], r"shape \(7849,\)"),
        (2, ZERO.float(), "type torch.float32"),
        (2, ZERO + torch.inf, "not finite"),
    ],
)
def test_a_silo_refuses_rounds_out_of_order_and_malformed_queries(t: int, query: torch.Tensor, line: str) -> None:
    silo = silo_at()
    _, state = silo.answer(silo.initial_state(), 1, ZERO)
    with pytest.raises(RunError, match=line):
        silo.answer(state, t, query)


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        ([0.9, 1.2], [0.9, 1.2]),
        ([3.0, -4.0], [0.9 * (1 + 1e-6), -1.2 * (1 + 1e-6)]),
        ([torch.nan, 1.0], [0.0, 0.0]),
        ([torch.inf, 1.0], [0.0, 0.0]),
        ([1e200, 1e200], [0.0, 0.0]),
    ],
)
def test_guarantee_a_total_is_at_most_as_long_as_its_records_can_be_together(
    total: list[float], expected: list[float]
) -> None:
    """Weights 1/2 and -1/4 at clip 2: norm 1.5, but for rounding, whatever code has computed the total."""
    computed = Increment(torch.tensor(total, dtype=torch.float64), torch.tensor(3))
    base: Any = SimpleNamespace(increment=lambda *_: computed)
    batch: Any = SimpleNamespace(weights=torch.tensor([0.5, -0.25]))
    bounded, clipped_count = BoundedObjective(base).increment(cast(Any, None), batch, 2.0)
    assert bounded.tolist() == pytest.approx(expected, rel=1e-14)
    assert clipped_count == 3


def test_a_state_is_stored_in_the_form_that_a_later_release_reads() -> None:
    """Little-endian: round, three counts and the chain's length; chain, types; vectors; all padded to 8 bytes."""
    vectors = [torch.tensor([1.5, -2.0, 3.0], dtype=dtype) for dtype in (torch.float32, torch.float64)]
    sums, silo = torch.tensor([4, -5, 6]), cast(Any, SimpleNamespace())
    silo.plan = SimpleNamespace(objective=SimpleNamespace(dimension=3))
    state = RoundState(7, (vectors[0],), (vectors[1], sums), (sums + 1,), b"chain")
    packed = struct.pack("<QIIIQ", 7, 1, 2, 1, 5) + b"chain" + bytes([0, 1, 2, 2]) + bytes(3)
    packed += struct.pack("<3f4x3d3q3q", 1.5, -2.0, 3.0, 1.5, -2.0, 3.0, 4, -5, 6, 5, -4, 7)
    assert pack_state(state) == packed
    loaded = unpack_state(packed, silo)
    assert (loaded.last_round, loaded.query_chain) == (7, b"chain")
    for kind, kinds in (("past_vectors", 1), ("accumulator", 2), ("mechanism_state", 1)):
        assert len(getattr(loaded, kind)) == kinds
        assert all(map(torch.equal, getattr(loaded, kind), getattr(state, kind)))


def test_a_silo_stops_after_the_last_round() -> None:
    silo = silo_at(federation__rounds=2)
    *_, (_, _, state) = replay(silo, [ZERO] * 2)
    with pytest.raises(RunError, match="round 3 after round 2 of 2"):
        silo.answer(state, 3, ZERO)


def test_round_state_survives_storage_in_a_flower_context_and_pickling() -> None:
    silo, records = silo_at(), RecordDict()
    assert ContextStore(records).load(silo).last_round == 0
    for _, _, state in replay(silo, [torch.randn(7850, dtype=torch.float64) for _ in range(3)]):
        ContextStore(records).save(state)
        moved = pickle.loads(pickle.dumps(records))
        assert type(moved["fedpriv-silo"]) is ConfigRecord
        for stored in (ContextStore(records).load(silo), ContextStore(moved).load(silo)):
            assert stored.last_round == state.last_round
            assert torch.equal(stored.accumulator[0], state.accumulator[0])
            assert all(map(torch.equal, stored.past_vectors, state.past_vectors))
            assert len(stored.past_vectors) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", [1, 3])
def test_release_bits_do_not_depend_on_the_memory_alignment_of_queries_and_records(dtype: str, batch: int) -> None:
    """Guarantee: the same values in the same shapes give the same bits in every process of one machine.

    Queries, records and states lie at every address that a message can put them at, on a processor whose products
    follow it; without `aligned` this is red, with and without disordered products.
    """
    rounds = {"federation__samples": 24, "federation__rounds": 12 // batch}
    silo = silo_at(federation__silos=2, federation__batch=batch, run__dtype=dtype, **rounds)
    generator = torch.Generator().manual_seed(1)
    queries = 0.1 * torch.randn((3, 7850), generator=generator).to(silo.records.features.dtype)

    def releases(offset: int) -> list[torch.Tensor]:
        moved = dataclasses.replace(silo, records=Records(*(at_address(c, offset) for c in silo.records)))
        state, vectors = moved.initial_state(), []
        for t, query in enumerate(queries, start=1):
            release, state = moved.answer(state, t, at_address(query, offset))
            state = state._replace(past_vectors=tuple(at_address(past, offset) for past in state.past_vectors))
            vectors.append(release.vector)
        return vectors

    for disorder in (contextlib.nullcontext(), disordered()):
        with disorder:
            first, *others = (releases(offset) for offset in (0, 1, 5))
        for other in others:
            assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("anchor_batches", [1, 3])
def test_guarantee_weights_of_a_rounds_records_add_up_to_one(anchor_batches: int) -> None:
    """However many batches a round reads: 3 in an anchor's, with a weight each that would charge a third."""
    algorithm = {
        "name": "goldstein-single-pass", "trust": "untrusted", "anchor_batches": anchor_batches, "smoothing": 0.4,
        "radius": 0.02, "period": 4, "anchor_clip": 5.0, "clip": 1.0, "window": 3, "step": 0.01, "output": "last",
    }  # fmt: skip
    privacy, federation = {"relation": "zero-out", "mu": 1.0}, {"silos": 3, "rounds": 11, "batch": 2}
    silo = silo_at(1, algorithm=algorithm, federation=federation, privacy=privacy)
    weights = [silo._read_batch(silo.plan.rounds[t - 1]).weights for t in range(1, 12)]
    assert max(map(len, weights)) == 2 * anchor_batches
    assert [float(each.sum()) for each in weights] == pytest.approx([1.0] * 11, rel=1e-12)


def skipping_silo(**overrides: Any) -> Silo:
    """A silo that may miss rounds, with noise that hangs together over rounds."""
    silo = silo_at(**overrides)
    return dataclasses.replace(
        silo, plan=dataclasses.replace(silo.plan, mechanism=BinaryTree()), may_miss_rounds=True
    )


def queries() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(7850, generator=generator, dtype=torch.float64) * 1e-3 for _ in range(8)]


def releases(silo: Silo, rounds: Iterable[int] = range(1, 9)) -> dict[int, torch.Tensor]:
    state, released = silo.initial_state(), {}
    for t in rounds:
        release, state = silo.answer(state, t, queries()[t - 1])
        released[t] = release.vector
    return released


@pytest.mark.parametrize("rounds", [[1, 2, 5, 6, 8], [3, 4], [1, 8]])
def test_skipping_rounds_does_not_change_the_noise_of_later_rounds(rounds: list[int]) -> None:
    """Two runs over the same rounds that differ in μ only differ by multiples of the same noise rows."""
    silos = [skipping_silo(privacy__rho=rho) for rho in (1.0, 2.0)]
    (loud, quiet), (loud_part, quiet_part) = map(releases, silos), (releases(silo, rounds) for silo in silos)
    for t in rounds:
        assert torch.allclose(loud_part[t] - quiet_part[t], loud[t] - quiet[t], rtol=1e-9, atol=1e-12)


def test_the_increment_after_missed_rounds_starts_from_the_last_answered_query() -> None:
    """Without noise and clip, after rounds 1, 2 and 5 the sum is α_5 g_5(x_5) + what rounds 1 and 2 left."""
    silo = skipping_silo(**WITHOUT_NOISE, algorithm__clip=1e9)
    released = releases(silo, [1, 2, 5])
    weights = {t: float(silo.plan.estimator.round(t).coefficients[0]) for t in (2, 5)}
    batch = silo._read_batch(silo.plan.rounds[4]).records
    assert batch is not None
    weights_of_records = torch.full((len(batch.labels),), 1.0 / len(batch.labels), dtype=torch.float64)
    now, before = (
        silo.plan.objective.increment(Query((queries()[t - 1],)), Batch(batch, weights_of_records), 1e9).total
        for t in (5, 2)
    )
    assert torch.allclose(released[5] - released[2], weights[5] * now - weights[2] * before, rtol=1e-9, atol=1e-12)


def test_skipped_rounds_are_refused_unless_allowed_and_past_rounds_are_always_refused() -> None:
    strict, silo = silo_at(), skipping_silo()
    _, state = silo.answer(silo.initial_state(), 3, queries()[2])
    for asked, after, t in ((strict, strict.initial_state(), 2), *((silo, state, t) for t in (1, 2, 3, 9))):
        with pytest.raises(RunError, match="rounds come in order"):
            asked.answer(after, t, queries()[0])


def test_algorithms_that_cannot_skip_rounds_refuse_to_go_on_without_a_silo() -> None:
    cell = cell_of(
        algorithm={"name": "momentum-tree-reduced", "trust": "untrusted", "alpha": 0.2, "step": 0.005},
        privacy={"relation": "replace-one", "mu": 1.0},
        federation={"silos": 3, "rounds": 8, "epochs": 2},
        deployment={"missing": "continue"},
    )
    with pytest.raises(InputError, match="momentum-tree-reduced cannot go on without a silo"):
        make_plan(cell, load_task(cell).objective)


def test_a_missed_round_changes_the_query_digest_that_keys_the_noise() -> None:
    """Otherwise a silo that is put back and asked round 2 after all would have one chain for two histories."""
    plan = make_plan(cell_of(), load_task(cell_of()).objective, for_release=True)
    records = Records(torch.zeros(20, 785, dtype=torch.float64), torch.zeros(20, dtype=torch.int64))
    silo = Silo.for_release(0, plan, records, bytes(32), b"", may_miss_rounds=True)
    _, first = silo.answer(silo.initial_state(), 1, ZERO)
    _, gap = silo.answer(first, 3, ZERO)
    query, missed = ZERO.numpy().tobytes(), extend_missed_query_chain(first.query_chain)
    assert gap.query_chain == extend_query_chain(missed, query)
    assert gap.query_chain != extend_query_chain(first.query_chain, query)
