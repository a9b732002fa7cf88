"""The servers of Reddi et al. 2021 against their formulas by coordinates, and the clip of Andrew et al."""

import math

import pytest
import torch

from fedpriv.loss.views import MAX_ADAPTIVE_CLIP, MIN_ADAPTIVE_CLIP, joint_clip
from fedpriv.papers.fedavg import FedAdagrad, FedAdam, FedYogi, QuantileClipping
from fedpriv.papers.sgd import ProjectedSGD
from tests.papers.builders import draw_normals, drive, plain_round, vectors

ETA, B1, B2, TAU = 0.3, 0.8, 0.95, 0.05


def second(rule: str, before: float, square: float) -> float:
    if rule == "adagrad":
        return before + square
    if rule == "adam":
        return B2 * before + (1 - B2) * square
    return before - (1 - B2) * square * (1 if before > square else -1 if before < square else 0)


@pytest.mark.parametrize("rule", ["adagrad", "yogi", "adam"])
def test_adaptive_servers_match_the_formulas_of_reddi_et_al_by_coordinate(rule: str) -> None:
    adaptive = {"yogi": FedYogi(ETA, B1, TAU, B2), "adam": FedAdam(ETA, B1, TAU, B2)}
    server = FedAdagrad(ETA, B1, TAU) if rule == "adagrad" else adaptive[rule]
    released = draw_normals(1, 20, 3)
    states = drive(server, vectors(1.0, -2.0, 0.0), released)
    x, m, v = [1.0, -2.0, 0.0], [0.0] * 3, [TAU**2] * 3
    for vector, state in zip(released, states, strict=False):
        assert server.query(state).tolist() == pytest.approx(x, rel=1e-12)
        for i, g in enumerate(vector.tolist()):
            m[i] = B1 * m[i] + (1 - B1) * g
            v[i] = second(rule, v[i], g * g)
            x[i] -= ETA * m[i] / (math.sqrt(v[i]) + TAU)
    assert server.output(states[-1]).tolist() == pytest.approx(x, rel=1e-12)


def test_the_adaptive_clip_converges_to_the_median_of_the_norms() -> None:
    """Norms 0.01 … 1.00, without noise: the clip ends at the median, and the inner server gets clip · mean."""
    norms, weight = torch.arange(1, 101, dtype=torch.float64) / 100, 0.3
    server = QuantileClipping(ProjectedSGD(0.0, math.inf), weight, 0.5, 0.2)
    state = server.start(vectors(0.0, 8.0))
    for t in range(1, 400):
        limit = server.query(state)[-1]
        bits = torch.where(norms <= limit, weight / 2, -weight / 2)
        clipped = norms * torch.minimum(1 / limit, 1 / norms)
        state = server.update(state, torch.stack([clipped.mean(), bits.mean()]), plain_round(t))
    assert 0.48 <= float(state.clip) <= 0.52
    assert server.output(state).shape == (1,)
    moved = QuantileClipping(ProjectedSGD(1.0, math.inf), weight, 0.5, 0.2)
    *_, state = drive(moved, vectors(0.0, 8.0), [vectors(0.25, 0.0)])
    assert moved.output(state).tolist() == [-2.0]


def test_the_adaptive_clip_never_falls_below_its_minimum() -> None:
    server = QuantileClipping(ProjectedSGD(1.0, math.inf), 0.01, 0.5, 10.0)
    *_, state = drive(server, vectors(0.0, 1.0), [vectors(0.0, 1e6)])
    assert float(state.clip) == MIN_ADAPTIVE_CLIP


def test_the_first_adaptive_clip_is_the_one_by_which_clients_divide() -> None:
    """Clients clamp C_1 = 1e13 to 2^40, and the server multiplied what they sent by 1e13."""
    server = QuantileClipping(ProjectedSGD(1.0, math.inf), 0.1, 0.5, 0.2)
    state = server.start(vectors(0.0, 1e13))
    assert float(server.query(state)[-1]) == MAX_ADAPTIVE_CLIP
    assert server.output(server.update(state, vectors(2.0**-40, 0.0), plain_round(1))).tolist() == [-1.0]


@pytest.mark.parametrize(("cohort", "noise_on_moves"), [(100, 1.00504), (20, 1.15470)])
def test_noise_on_updates_and_count_is_split_as_andrew_et_al_print_it(cohort: int, noise_on_moves: float) -> None:
    """With ρ = z_Δ/σ_b and σ_b = B/20, one release of clip κ at z = 1 is z_Δ^-2 + (2σ_b)^-2 = z^-2 (their 2.2)."""
    count_noise = cohort / 20
    weight = noise_on_moves / count_noise
    assert joint_clip(weight) == pytest.approx(noise_on_moves, abs=1e-5)  # noise z κ on a vector of clip 1
    assert noise_on_moves**-2 + (2 * count_noise) ** -2 == pytest.approx(1.0, abs=1e-5)
