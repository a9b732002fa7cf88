"""The phased method: its schedule, its steps, and the contraction its privacy rests on, by brute force."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.core.errors import InputError
from fedpriv.loss.estimators import Round
from fedpriv.noise.diagonal import IndependentGaussian, PhaseEnds
from fedpriv.noise.series import Workload
from fedpriv.noise.tree import BinaryTree
from fedpriv.papers.phased import PhasedSGD
from fedpriv.participation.orders import Phases

PHASES = Phases((3, 2, 1))
MECHANISM = PhaseEnds(PHASES, largest_step=0.5, smoothness=4.0, lipschitz=2.0)


def workload(phases: Phases = PHASES, clip: float = 2.0, decay: float = 0.0) -> Workload:
    return Workload(phases, decay, np.full(phases.rounds, clip))


def test_every_phase_ends_with_a_round_without_a_batch() -> None:
    assert [PHASES.batch_index(t) for t in range(1, 10)] == [0, 1, 2, None, 3, 4, None, 5, None]
    assert [PHASES.phase(t) for t in range(1, 10)] == [1, 1, 1, 1, 2, 2, 2, 3, 3]
    assert (PHASES.rounds, PHASES.rounds_per_epoch, PHASES.single_pass) == (9, 6, True)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_batch_is_used_exactly_once_and_in_order(lengths: list[int]) -> None:
    phases = Phases(tuple(lengths))
    rounds_per_epoch = [place for t in range(1, phases.rounds + 1) if (place := phases.batch_index(t)) is not None]
    assert rounds_per_epoch == list(range(phases.rounds_per_epoch))


@pytest.mark.parametrize("t", [0, 10])
def test_a_round_number_outside_the_phases_is_refused(t: int) -> None:
    with pytest.raises(ValueError, match="is not one of 1 … 9"):
        PHASES.batch_index(t)


@pytest.mark.parametrize("lengths", [(), (3, 0)])
def test_a_phase_of_no_rounds_is_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="lengths"):
        Phases(lengths)


def test_phased_noise_is_added_only_in_the_empty_rounds() -> None:
    state = MECHANISM.start()
    for t in range(1, 10):
        fresh = torch.full((2, 3), float(t))
        noise, state = MECHANISM.noise(state, t, fresh)
        assert torch.equal(noise, fresh if t in (4, 7, 9) else torch.zeros(2, 3))
        assert len(state) == MECHANISM.memory_vectors(workload()) == 0
    assert MECHANISM.variance(workload()).tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 1]


def test_the_phased_sensitivity_is_one_clip_norm_as_an_upper_bound_by_contraction() -> None:
    certified = MECHANISM.certified(workload(clip=2.5))
    assert (certified.value, certified.exact) == (2.5, False)
    assert "contraction" in certified.reason
    growing = Workload(PHASES, 0.0, np.linspace(2.0, 3.0, 9))
    assert MECHANISM.certified(growing).value == 3.0


def test_the_phased_method_refuses_a_clip_norm_below_the_lipschitz_constant() -> None:
    with pytest.raises(InputError, match="clipping never bites"):
        MECHANISM.certified(workload(clip=1.99))


def test_the_phased_method_refuses_a_loss_without_lipschitz_or_smoothness_constant() -> None:
    with pytest.raises(InputError, match="clipping never bites"):
        replace(MECHANISM, lipschitz=math.inf).certified(workload())
    with pytest.raises(InputError, match="2 / smoothness"):
        replace(MECHANISM, smoothness=math.inf).certified(workload())
    with pytest.raises(InputError, match="clipping never bites"):
        replace(MECHANISM, lipschitz=math.nan).certified(workload())


def test_the_phased_method_refuses_steps_above_two_over_smoothness() -> None:
    with pytest.raises(InputError, match=r"up to 2 / smoothness = 0\.5"):
        replace(MECHANISM, largest_step=0.51).certified(workload())
    with pytest.raises(InputError, match="step = inf: the phased method is private only for finite steps up to"):
        replace(MECHANISM, largest_step=math.inf, smoothness=0.0).certified(workload())


def test_the_phased_method_refuses_running_sums_and_schedules_of_other_phases() -> None:
    with pytest.raises(InputError, match="decay = 0"):
        MECHANISM.certified(workload(decay=1.0))
    with pytest.raises(InputError, match="own phases"):
        MECHANISM.certified(workload(Phases((3, 3))))


def test_other_mechanisms_account_for_phases_as_for_a_single_pass() -> None:
    """Per-round releases of the same schedule: empty rounds never make a record cheaper."""
    assert IndependentGaussian().sensitivity(workload()) == pytest.approx(2.0)
    assert BinaryTree(decay=1.0).sensitivity(workload(decay=1.0)) == pytest.approx(2.0 * math.sqrt(4))


def descend(
    optimizer: PhasedSGD,
    features: torch.Tensor,
    targets: torch.Tensor,
    active: torch.Tensor,
    noise: torch.Tensor,
) -> list[torch.Tensor]:
    """Phase starts for logistic losses; features (places, batch, d), records with `active` 0 zeroed out."""
    phases, starts = optimizer.phases, []
    state = optimizer.start(torch.zeros(features.shape[-1], dtype=torch.float64))
    for t in range(1, phases.rounds + 1):
        place = phases.batch_index(t)
        if place is None:
            released = noise[t - 1]
        else:
            margins = targets[place] * (features[place] @ optimizer.query(state))
            pull = -targets[place] * torch.sigmoid(-margins) * active[place]
            released = (pull[:, None] * features[place]).mean(0)
        before = optimizer.output(state)
        state = optimizer.update(state, released, Round(t, (1.0,), 0.0, 2.0, 1.0))
        if place is None:
            starts.append(optimizer.output(state))
        else:
            assert optimizer.output(state) is before
    return starts


@given(seed=st.integers(0, 10**6), radius=st.sampled_from([0.3, 1e9]))
@settings(max_examples=40)
def test_one_record_moves_a_phase_end_by_at_most_step_times_clip_norm_over_batch(seed: int, radius: float) -> None:
    """‖z‖ ≤ 2: 2-Lipschitz and 1-smooth logistic losses, the largest step allowed, 2/smoothness."""
    torch.manual_seed(seed)
    phases, batch, dimension, clip, smoothness = Phases((6, 3)), 3, 4, 2.0, 1.0
    optimizer = PhasedSGD(phases, step=4.0 * 2.0 / smoothness, radius=radius)
    features = torch.randn(phases.rounds_per_epoch, batch, dimension, dtype=torch.float64)
    features *= clip / torch.linalg.vector_norm(features, dim=-1, keepdim=True)
    targets = torch.randint(0, 2, (phases.rounds_per_epoch, batch)) * 2.0 - 1.0
    noise = 0.1 * torch.randn(phases.rounds, dimension, dtype=torch.float64)
    active = torch.ones(phases.rounds_per_epoch, batch, dtype=torch.float64)
    starts = descend(optimizer, features, targets, active, noise)
    for place in range(6):
        without = active.clone()
        without[place, 0] = 0.0
        moved = torch.linalg.vector_norm(descend(optimizer, features, targets, without, noise)[0] - starts[0])
        assert float(moved) <= optimizer.step / 4 * clip / batch * (1 + 1e-9)
        assert place == 5 or float(moved) > 0.0


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40)
def test_one_record_moves_a_least_squares_phase_by_at_most_step_times_lipschitz_over_batch(seed: int) -> None:
    """Squares are Lipschitz in the ball alone: iterates are projected, so every gradient is taken inside of it."""
    generator, phases, batch, dimension, radius, bound = (
        np.random.default_rng(seed),
        Phases((6, 3)),
        3,
        4,
        0.7,
        0.5,
    )
    features = generator.standard_normal((9, batch, dimension))
    features /= np.linalg.norm(features, axis=-1, keepdims=True)  # ‖z‖ = 1: smoothness 1, Lipschitz radius + bound
    labels = generator.uniform(-bound, bound, (9, batch))
    optimizer = PhasedSGD(phases, step=4.0 * 2.0, radius=radius)

    def first_end(without: int | None) -> torch.Tensor:
        state = optimizer.start(torch.zeros(dimension, dtype=torch.float64))
        for t in range(1, 8):
            place = phases.batch_index(t)
            released = torch.zeros(dimension, dtype=torch.float64)
            if place is not None:
                z, y = torch.from_numpy(features[place]), torch.from_numpy(labels[place])
                gradients = (z @ optimizer.query(state) - y)[:, None] * z
                gradients[0] *= place != without
                released = gradients.sum(0) / batch
            state = optimizer.update(state, released, Round(t, (1.0,), 0.0, 2.0, 1.0))
        return optimizer.output(state)

    for place in range(6):
        moved = float(torch.linalg.vector_norm(first_end(place) - first_end(None)))
        assert moved <= 2.0 * (radius + bound) / batch * (1 + 1e-9)


def test_linear_losses_nearly_attain_the_movement_bound_of_a_phase() -> None:
    """One record's constant gradient in the first of 100 rounds moves 99 of the 100 averaged iterates fully."""
    phases = Phases((100,))
    optimizer = PhasedSGD(phases, step=1.0, radius=1e9)
    state = optimizer.start(torch.zeros(1, dtype=torch.float64))
    for t in range(1, 102):
        released = torch.full((1,), 2.0 if t == 1 else 0.0, dtype=torch.float64)
        state = optimizer.update(state, released, Round(t, (1.0,), 0.0, 2.0, 1.0))
    assert float(optimizer.output(state)) == pytest.approx(-0.25 * 2.0 * 0.99)


def test_phased_sgd_with_noise_matches_a_calculation_by_hand() -> None:
    """η = 4: step 1 in phase 1, 1/4 in phase 2, whose iterates start at the noisy average."""
    optimizer = PhasedSGD(Phases((2, 1)), step=4.0, radius=100.0)
    state = optimizer.start(torch.zeros(1, dtype=torch.float64))
    queries = []
    for t, released in enumerate([3.0, 5.0, 0.5, 8.0, 2.0], start=1):
        queries.append(float(optimizer.query(state)))
        state = optimizer.update(state, torch.tensor([released]), Round(t, (1.0,), 0.0, 2.0, 1.0))
    # averages of the queries (0, -3) and (-2); starts -1.5 - 0.5 and -2 - 2/4
    assert queries == [0.0, -3.0, -8.0, -2.0, -4.0]
    assert float(optimizer.output(state)) == -2.5


def test_phased_sgd_keeps_its_published_iterates_in_the_ball() -> None:
    optimizer = PhasedSGD(Phases((1,)), step=4.0, radius=0.5)
    state = optimizer.start(torch.zeros(2))
    for t in (1, 2):
        state = optimizer.update(state, torch.tensor([30.0, 40.0]), Round(t, (1.0,), 0.0, 50.0, 1.0))
        assert float(optimizer.query(state).norm()) == pytest.approx(0.5)
