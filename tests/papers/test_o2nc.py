"""O2NC against a literal transcription, and its facts under any releases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.core.replicates import stack, stack_signature
from fedpriv.papers.kornowski import O2NC, PublicChoices
from tests.papers.builders import draw_normals, drive, plain_round, vectors


@given(seed=st.integers(0, 10**6), window=st.integers(1, 6), rounds=st.integers(6, 30), size=st.integers(1, 4))
@settings(max_examples=40)
def test_o2nc_matches_a_literal_transcription_of_the_papers_algorithm(
    seed: int, window: int, rounds: int, size: int
) -> None:
    radius, step = 0.3, 0.2
    generator = np.random.default_rng(seed)
    releases = generator.standard_normal((rounds, size))
    choices = PublicChoices((seed,), rounds, window)
    like = torch.zeros(size, dtype=torch.float64)

    x, move, queries = np.ones(size), np.zeros(size), []
    for t in range(1, rounds + 1):
        s = float(choices.position(t, like))
        z = x + s * move
        x = x + move
        queries.append(z)
        move = move - step * releases[t - 1]
        move = move * min(1.0, radius / float(np.linalg.norm(move)))
    means = [np.mean(queries[k * window : (k + 1) * window], axis=0) for k in range(rounds // window)]

    optimizer = O2NC(step, radius, choices)
    states = drive(optimizer, torch.ones(size, dtype=torch.float64), torch.from_numpy(releases))
    for state, query in zip(states, queries, strict=False):
        np.testing.assert_allclose(optimizer.query(state).numpy(), query, atol=1e-12)
    np.testing.assert_allclose(states[-1].iterate.numpy(), x, atol=1e-12)
    last = max(k for k in range(1, len(means) + 1) if bool(choices.publishes(k, like)))
    np.testing.assert_allclose(optimizer.output(states[-1]).numpy(), means[last - 1], atol=1e-12)


@given(seed=st.integers(0, 10**6), window=st.integers(1, 8), radius=st.floats(0.01, 5.0))
@settings(max_examples=40)
def test_o2nc_moves_queries_and_windows_are_bounded_under_any_noise(seed: int, window: int, radius: float) -> None:
    rounds, start = 5 * window, torch.ones(3, dtype=torch.float64)
    optimizer = O2NC(1.0, radius, PublicChoices((seed,), rounds, window))
    states = drive(optimizer, start, 100.0 * draw_normals(seed, rounds, 3))
    queries = torch.stack([state.query_point for state in states[:rounds]])
    assert torch.equal(queries[0], start)
    assert all(float(state.move.norm()) <= radius * (1 + 1e-12) for state in states)
    assert float((queries[1:] - queries[:-1]).norm(dim=1).max()) <= 2 * radius * (1 + 1e-12)
    torch.testing.assert_close(states[-1].iterate, start + torch.stack([s.move for s in states[:-1]]).sum(0))
    reach = ((window + 1) / 2 - 1 / window) * radius if window > 1 else 0.0
    for members in queries.view(5, window, 3):
        assert float((members - members.mean(0)).norm(dim=1).max()) <= reach * (1 + 1e-9) + 1e-12


def test_o2nc_with_zero_gradients_stays_at_its_start() -> None:
    start = vectors(0.3, -2.0)
    states = drive(O2NC(1.0, 0.5, PublicChoices((1,), 9, 3)), start, torch.zeros((9, 2), dtype=torch.float64))
    assert torch.equal(states[-1].iterate, start)
    torch.testing.assert_close(states[-1].published, start)


def test_the_regret_constant_of_o2nc_is_five_halves_and_attained() -> None:
    """Start at Δ = 1, compare with u = -1, gradients 1: regret 5 = 2.5 D G1 √M at M = 4; the paper prints 1.5."""
    optimizer, one = O2NC(1.0 / math.sqrt(4), 1.0, PublicChoices((0,), 4, 4)), vectors(1.0)
    state = optimizer.start(vectors(0.0))._replace(move=one)
    regret = 0.0
    for t in range(1, 5):
        regret += float(state.move) + 1.0
        state = optimizer.update(state, one, plain_round(t))
    assert regret == pytest.approx(5.0)


def test_the_published_window_of_o2nc_is_uniform_at_every_stopping_time() -> None:
    """The last window that is published, over many seeds, after 2, 3 and 4 windows."""
    like, seeds = torch.zeros(1, dtype=torch.float64), 4000
    counts = np.zeros((5, 5))
    for seed in range(seeds):
        choices, chosen = PublicChoices((seed,), 8, 2), 0
        for window in range(1, 5):
            chosen = window if bool(choices.publishes(window, like)) else chosen
            counts[window, chosen] += 1
    for windows in (2, 3, 4):
        deviation = counts[windows, 1 : windows + 1] - seeds / windows
        assert np.all(np.abs(deviation) < 5 * math.sqrt(seeds / windows))


def test_o2nc_publishes_its_first_window_also_for_a_draw_that_float32_rounds_to_1() -> None:
    for seeds in ((0,), (0, 1)):
        choices = PublicChoices(seeds, 4, 2)
        vars(choices)["_window_draws"] = np.full((len(seeds), 2), 1.0 - 2.0**-30)
        assert bool(choices.publishes(1, torch.zeros(len(seeds), 3)).all())
        assert not bool(choices.publishes(2, torch.zeros(len(seeds), 3)).any())


def test_o2nc_can_publish_the_mean_of_its_last_window() -> None:
    optimizer = O2NC(0.1, 0.4, PublicChoices((0,), 9, 3, publishes_last=True))
    states = drive(optimizer, vectors(1.0, 1.0), draw_normals(1, 9, 2))
    for end in (3, 6, 9):
        queries = torch.stack([state.query_point for state in states[end - 3 : end]])
        torch.testing.assert_close(optimizer.output(states[end]), queries.mean(0))


def test_stacked_replicates_with_different_seeds_move_as_single_runs() -> None:
    rounds = 12
    alone = [O2NC(0.1 * (1 + seed), 0.4, PublicChoices((seed,), rounds, 3)) for seed in range(3)]
    assert len({stack_signature(optimizer) for optimizer in alone}) == 1
    together, releases = stack(alone, torch.float64, torch.device("cpu")), draw_normals(5, rounds, 3, 2)
    stacked = drive(together, torch.ones((3, 2), dtype=torch.float64), releases)
    for place, optimizer in enumerate(alone):
        single = drive(optimizer, vectors(1.0, 1.0), releases[:, place])
        for ours, theirs in zip(stacked, single, strict=True):
            torch.testing.assert_close(ours.query_point[place], theirs.query_point, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(ours.published[place], theirs.published, rtol=1e-12, atol=1e-12)


def test_the_public_random_positions_do_not_depend_on_the_number_of_rounds() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    short, long = PublicChoices((3,), 10, 2), PublicChoices((3,), 100, 2)
    assert [short.position(t, like) for t in range(1, 11)] == [long.position(t, like) for t in range(1, 11)]
    assert PublicChoices((4,), 10, 2).position(1, like) != short.position(1, like)
