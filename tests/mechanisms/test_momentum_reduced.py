"""The mechanisms of momentum-tree-reduced: node sets, counts, variances and streams against literal versions."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from fedpriv.errors import InputError
from fedpriv.mechanisms import AlignedDifferences, Separated, SlidingDifferences, Workload
from fedpriv.mechanisms.differences import DifferenceTrees, calibrated, sized_by_the_paper
from fedpriv.mechanisms.sensitivity.windows import cover, used_ends
from fedpriv.participation.fixed_order import Schedule
from tests.oracle_momentum import (
    GOLDEN_STDS,
    Interval,
    Vector,
    compose,
    difference_nodes,
    energies,
    gradient_nodes,
    level,
    noise_of,
    prefix_nodes,
)

KINDS = [SlidingDifferences, AlignedDifferences]
SIZES = [(4, 16), (5, 23), (7, 64), (3, 20), (2, 9), (8, 9), (16, 70), (6, 5), (5, 5), (5, 10), (1, 7)]


def trees(kind: type[DifferenceTrees], places: int, keep: float = 0.75) -> DifferenceTrees:
    return kind(
        places,
        mixing=0.3,
        difference=1.0,
        residual=0.1,
        movement=0.1,
        keep=keep,
        std_early=GOLDEN_STDS.early,
        std_late=GOLDEN_STDS.late,
        std_difference=GOLDEN_STDS.difference,
        std_residual=GOLDEN_STDS.residual,
    )


def workload(rounds: int, places: int, keep: float = 0.75) -> Workload:
    return Workload(Schedule(rounds, places), keep, np.ones(rounds))


def test_the_cover_is_compose() -> None:
    for first in range(1, 40):
        for last in range(first - 1, 70):
            assert [(end - (1 << k) + 1, end) for k, end in cover(first, last)] == compose(first, last)


def test_the_nodes_counted_are_those_the_reconstruction_touches() -> None:
    def intervals(rounds: int, places: int, earliest: int) -> set[Interval]:
        levels = range(rounds.bit_length())
        return {
            (end - (1 << k) + 1, end) for k in levels for end in used_ends(rounds, places, k, earliest).tolist()
        }

    for rounds in range(1, 40):
        for places in range(1, 12):
            assert intervals(rounds, places, 1) == gradient_nodes(rounds, places)
            assert intervals(rounds, places, 2 * places) == difference_nodes(rounds, places)
    assert len(gradient_nodes(13, 5)) == 19
    assert difference_nodes(13, 5) == {(6, 6), (7, 8), (8, 8), (9, 10), (9, 12), (11, 11), (13, 13)}


def test_golden_energies_of_the_four_groups() -> None:
    found = SlidingDifferences(5, 0.3, 1.0, 1.0, 0.1, keep=0.75).energies(workload(13, 5))
    golden = [
        [4.056884765625, 4.44140625, 5.125, 4.5625, 2.740478515625],
        [1.5625, 1, 1, 0.177978515625, 0.31640625],
        [2.5625, 1.5625, 3, 0.740478515625, 1.31640625],
        [0, 4.17755037546158, 16.3736915588379, 25.5653228759766, 48.91015625],
    ]
    for group, expected in zip(found, golden, strict=True):
        assert group == pytest.approx(expected, rel=1e-13)


def test_golden_mu_of_every_record() -> None:
    """h = ℓ = 2 and η = 0.1 at α = 0.25, with the golden standard deviations."""
    mechanism = trees(SlidingDifferences, 5)
    mechanism = dataclasses.replace(mechanism, difference=0.1 * 5, residual=0.1)
    groups = zip(mechanism.energies(workload(13, 5)), mechanism.stds, strict=True)
    mu = 2.0 * np.sqrt(sum(energy / std**2 for energy, std in groups))
    assert mu == pytest.approx([117.787215, 108.734396, 130.586062, 101.973866, 100.23632], rel=1e-8)
    assert 2.0 * mechanism.sensitivity(workload(13, 5)) == pytest.approx(130.586062, rel=1e-8)


@pytest.mark.parametrize(("places", "rounds"), SIZES)
def test_energies_are_those_of_a_loop_over_nodes_and_records(places: int, rounds: int) -> None:
    mechanism = dataclasses.replace(trees(SlidingDifferences, places), difference=3.0, residual=0.5)
    found = mechanism.energies(Workload(Schedule(rounds, places), 0.75, np.full(rounds, 2.0)))
    nodes = gradient_nodes(rounds, places)
    early = {node for node in nodes if node[1] <= 2 * places}
    expected = [
        4.0 * energies(early, places, 0.75),
        4.0 * energies(nodes - early, places, 0.75),
        9.0 * energies(difference_nodes(rounds, places), places, 0.75),
        0.25 * energies(prefix_nodes(rounds), places, 0.75, lambda t: (t - 1) % places),
    ]
    for group, by_loop in zip(found, expected, strict=True):
        assert group == pytest.approx(by_loop, rel=1e-12)


@pytest.mark.parametrize(("places", "rounds"), SIZES)
def test_energies_of_the_aligned_trees(places: int, rounds: int) -> None:
    """Every epoch has a tree over its own places."""
    found = trees(AlignedDifferences, places).energies(workload(rounds, places))
    by_epoch = []
    for start in range(0, rounds, places):
        within = min(places, rounds - start)
        own = energies(prefix_nodes(within), places, 0.75)
        by_epoch.append(np.where(np.arange(places) < within, own, 0.0))
    assert found.early == pytest.approx(by_epoch[0], rel=1e-12)
    assert found.late == pytest.approx(sum(by_epoch[1:], np.zeros(places)), rel=1e-12)
    assert found.difference == pytest.approx(found.late, rel=1e-12)
    assert found.residual == pytest.approx(
        0.01 * energies(prefix_nodes(rounds), places, 0.75, lambda t: (t - 1) % places), rel=1e-12
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("places", "rounds"), SIZES)
def test_variances_are_the_sums_of_squared_coefficients(
    kind: type[DifferenceTrees], places: int, rounds: int
) -> None:
    """Unit impulses as fresh vectors show every coefficient; the state never has more vectors than announced."""
    mechanism = trees(kind, places)
    count = sum(mechanism.draws(t) or 0 for t in range(1, rounds + 1))
    state, drawn, squares, longest = mechanism.start(), 0, [], 0
    impulses = torch.eye(count, dtype=torch.float64)
    for t in range(1, rounds + 1):
        now = mechanism.draws(t) or 0
        row, state = mechanism.noise(state, t, impulses[drawn : drawn + now])
        drawn += now
        squares.append(float(row @ row))
        longest = max(longest, len(state))
    flat = dataclasses.replace(mechanism, std_residual=mechanism.std_residual if places > 1 else 0.0)
    assert flat.variance(workload(rounds, places)) == pytest.approx(squares, rel=1e-12)
    assert longest == mechanism.memory_vectors(workload(rounds, places))


def test_golden_variances() -> None:
    variance = 0.25**2 * trees(SlidingDifferences, 5).variance(workload(13, 5))
    golden = {1: 0.0002125, 7: 0.000378650671243668, 10: 0.000325807335630059, 13: 0.000318237682698055}
    assert {t: variance[t - 1] for t in golden} == pytest.approx(golden, rel=1e-12)


def numbered(tree: int, level: int, index: int) -> Vector:
    return np.random.default_rng([7, tree, level, index]).standard_normal(3)


def literal_noise(rounds: int, places: int, mixing: float, keep: float, aligned: bool) -> list[Vector]:
    """The noise of each release by its definition, every window and prefix composed anew."""
    std_early, std_late, std_difference, std_residual = GOLDEN_STDS

    def total(tree: int, first: int, last: int, offset: int = 0) -> Vector:
        found = np.zeros(3)
        for y, z in compose(first, last):
            end = z + offset
            std = std_difference if tree == 2 else std_early if end <= (1 + (not aligned)) * places else std_late
            node = numbered(tree, level((y, z)), end) if aligned else noise_of(numbered, tree, (y, z))
            found += keep ** (last - z) * std * node
        return found

    def sliding(t: int) -> Vector:
        whole, rest = divmod(t, places)
        found = keep ** (whole * places) * total(1, 1, rest)
        mixed = [0.0]
        for i in range(1, whole + 1):
            mixed.append((1 - mixing) * mixed[-1] + keep ** (places * (i - 1)))
        if whole:
            found = found + mixed[whole] * total(1, rest + 1, rest + places)
        for i in range(1, whole):
            at = (t - i * places + 1, t - (i - 1) * places)
            found = found + mixed[i] * ((1 - mixing) * total(2, *at) + mixing * total(1, *at))
        return found

    def estimate(epoch: int, place: int) -> Vector:
        """Q_{q,p}"""
        own = total(1, 1, place, epoch * places)
        if epoch == 0:
            return own
        return (1 - mixing) * (estimate(epoch - 1, place) + total(2, 1, place, epoch * places)) + mixing * own

    def by_epochs(t: int) -> Vector:
        epoch, place = (t - 1) // places, (t - 1) % places + 1
        found = estimate(epoch, place)
        for k in range(epoch):
            found = found + keep ** (place + (epoch - 1 - k) * places) * estimate(k, places)
        return found

    def residual(t: int) -> Vector:
        added = [keep ** (t - z) * noise_of(numbered, 3, (y, z)) for y, z in compose(1, t)]
        return std_residual * np.sum(added, axis=0) if places > 1 else np.zeros(3)

    return [(by_epochs(t) if aligned else sliding(t)) + residual(t) for t in range(1, rounds + 1)]


@pytest.mark.parametrize(("places", "rounds"), SIZES)
def test_the_stream_is_the_literal_reconstruction(places: int, rounds: int) -> None:
    mechanism = trees(SlidingDifferences, places)
    assert isinstance(mechanism, SlidingDifferences)
    numbers, state = {"gradient": 1, "difference": 2, "residual": 3}, mechanism.start()
    for t, expected in enumerate(literal_noise(rounds, places, 0.3, 0.75, aligned=False), start=1):
        nodes = [numbered(numbers[tree], k, (t >> k) - 1) for tree, k in mechanism.fresh_nodes(t)]
        row, state = mechanism.noise(state, t, torch.from_numpy(np.array(nodes)))
        np.testing.assert_allclose(row.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(("places", "rounds"), SIZES)
def test_the_aligned_stream_is_its_definition(places: int, rounds: int) -> None:
    mechanism, state = trees(AlignedDifferences, places), ()
    for t, expected in enumerate(literal_noise(rounds, places, 0.3, 0.75, aligned=True), start=1):
        place = (t - 1) % places + 1
        own, whole = (place & -place).bit_length() - 1, (t & -t).bit_length() - 1
        nodes = [numbered(3, whole, (t >> whole) - 1)] if places > 1 else []
        nodes += [numbered(tree, own, t) for tree in ((1,) if t <= places else (1, 2))]
        row, state = mechanism.noise(state, t, torch.from_numpy(np.array(nodes)))
        np.testing.assert_allclose(row.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_replicates_with_other_deviations_stream_together(kind: type[DifferenceTrees]) -> None:
    one, other = trees(kind, 5), dataclasses.replace(trees(kind, 5), std_early=1.0, std_late=2.0)
    column = {
        name: torch.tensor([[getattr(one, name)], [getattr(other, name)]], dtype=torch.float64)
        for name in ("std_early", "std_late")
    }
    both = dataclasses.replace(one, **column)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    states = [kind.start(one) for _ in range(3)]
    for t in range(1, 24):
        fresh = torch.randn(one.draws(t) or 0, 2, 4, generator=generator, dtype=torch.float64)
        together, states[0] = both.noise(states[0], t, fresh)
        first, states[1] = one.noise(states[1], t, fresh[:, 0])
        second, states[2] = other.noise(states[2], t, fresh[:, 1])
        torch.testing.assert_close(together, torch.stack([first, second]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", ["best", "equal"])
@pytest.mark.parametrize(("places", "rounds"), [(5, 23), (50, 500), (8, 9), (1, 7), (7, 7)])
def test_calibration_costs_at_most_the_clip(
    kind: type[DifferenceTrees], shares: str, places: int, rounds: int
) -> None:
    """With shares λ that sum to 1 the parts add up to at most 1: μ ≤ 1/σ."""
    work = Workload(Schedule(rounds, places), 0.75, np.full(rounds, 2.0))
    found = calibrated(trees(kind, places), work, "best" if shares == "best" else "equal")
    assert 1.0 <= found.sensitivity(work) <= 2.0 * (1.0 + 1e-12)
    assert (found.std_residual == 0.0) == (places == 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_shares_have_the_least_noise(kind: type[DifferenceTrees]) -> None:
    """At the size where the shares just add up, μ = 1/σ, no other split has a smaller mean variance."""
    work = workload(500, 50, keep=1.0 - 1 / 50)
    best = calibrated(trees(kind, 50, keep=1.0 - 1 / 50), work, "best")
    worst = np.array([float(group.max()) for group in best.energies(work)])
    split = worst / np.square(best.stds)
    assert np.sum(split) == pytest.approx(1.0)
    for factor in ([1.1, 1, 1, 1], [1, 1.1, 1, 1], [1, 1, 1.1, 1], [1, 1, 1, 1.1], [0.9, 1, 1, 1.2]):
        changed = split * factor / np.sum(split * factor)
        stds = np.sqrt(worst / changed)
        other = dataclasses.replace(
            best, std_early=stds[0], std_late=stds[1], std_difference=stds[2], std_residual=stds[3]
        )
        assert other.mean_variance(work) > best.mean_variance(work)


@pytest.mark.parametrize(("places", "epochs"), [(8, 20), (50, 10), (64, 7), (101, 9)])
def test_the_papers_size_is_enough(places: int, epochs: int) -> None:
    """Its ρ = 2/σ² is what it is sized for; exact counting of the same noise gives less."""
    alpha, rounds = 1.0 / places, places * epochs
    step = 1.0 / math.sqrt(places * rounds)
    work = Workload(Schedule(rounds, places), 1.0 - alpha, np.full(rounds, alpha))
    plain = SlidingDifferences(places, step * places, alpha * step * places, alpha * step, step, keep=1.0 - alpha)
    paper = sized_by_the_paper(plain, work, sigma_mu=2.0)
    exact = dataclasses.replace(paper, least=0.0)
    assert paper.sensitivity(work) == 4.0 * alpha
    ratio = exact.sensitivity(work) / paper.sensitivity(work)
    assert 0.49 <= 4.0 * ratio**2 <= 1.07  # μ²σ², whose claim is 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused(kind: type[DifferenceTrees]) -> None:
    mechanism = trees(kind, 5)
    with pytest.raises(InputError, match="same order"):
        mechanism.sensitivity(Workload(Separated(20, 4, 5), 0.75, np.ones(20)))
    with pytest.raises(InputError, match="same order"):
        mechanism.sensitivity(workload(20, 4))
    with pytest.raises(InputError, match="smoothness"):
        dataclasses.replace(mechanism, difference=math.inf).sensitivity(workload(20, 5))
    with pytest.raises(InputError, match="γ"):
        dataclasses.replace(mechanism, mixing=0.0).sensitivity(workload(20, 5))
    with pytest.raises(InputError, match="no noise"):
        dataclasses.replace(mechanism, std_late=0.0).sensitivity(workload(20, 5))
    with pytest.raises(InputError, match="keep"):
        mechanism.sensitivity(workload(20, 5, keep=0.5))
    with pytest.raises(InputError, match="6"):
        sized_by_the_paper(mechanism, workload(20, 5), 2.0)
    with pytest.raises(InputError, match="at least 1/N"):
        sized_by_the_paper(trees(kind, 8, keep=0.95), workload(20, 8, keep=0.95), 2.0)
    with pytest.raises(InputError, match="clipped differences"):
        sized_by_the_paper(dataclasses.replace(mechanism, movement=None), workload(20, 5), 2.0)


@pytest.mark.parametrize("place", range(1, 6))
def test_no_path_of_bounded_steps_moves_a_node_farther(place: int) -> None:
    """Gradient x L w with x = ±1, the iterate in a straight line: the differences' bounds are attained."""
    places, rounds, keep, step, smoothness = 5, 13, 0.75, 0.1, 2.0
    path = {t: step * (t - 1) for t in range(1, rounds + 1)}
    anchor = {t: path[(t - 1) // places * places + 1] for t in path}
    own = [t for t in path if (t - 1) % places + 1 == place]
    change = {t: 2 * smoothness * (anchor[t] - anchor.get(t - places, anchor[t])) for t in own}
    residual = {t: 2 * smoothness * (path[t] - anchor[t]) for t in own}

    def moved(nodes: set[Interval], by: dict[int, float]) -> float:
        return sum(sum(by.get(t, 0.0) * keep ** (z - t) for t in range(y, z + 1)) ** 2 for y, z in nodes)

    mechanism = SlidingDifferences(places, 0.3, smoothness * step * places, smoothness * step, step, keep=keep)
    bound = mechanism.energies(workload(rounds, places))
    assert 4 * bound.difference[place - 1] == pytest.approx(moved(difference_nodes(rounds, places), change))
    assert 4 * bound.residual[place - 1] == pytest.approx(moved(prefix_nodes(rounds), residual))


def test_one_record_moves_releases_less_than_accounted() -> None:
    """Mahalanobis distance of the released momenta of neighbours, on a fixed path, against the accountant's μ."""
    rounds, places, keep, step = 23, 5, 0.75, 0.1
    for kind in KINDS:
        base = kind(places, 0.3, step * places, step, step, keep=keep)
        mechanism = calibrated(base, workload(rounds, places), "best")
        count = sum(mechanism.draws(t) or 0 for t in range(1, rounds + 1))
        state, drawn, rows = mechanism.start(), 0, []
        for t in range(1, rounds + 1):
            now = mechanism.draws(t) or 0
            row, state = mechanism.noise(state, t, torch.eye(count, dtype=torch.float64)[drawn : drawn + now])
            drawn += now
            rows.append(row.numpy())
        covariance = np.array(rows) @ np.array(rows).T
        for place in range(places):
            moved = np.zeros(rounds)
            for t in range(rounds):
                gradient = 1.0 if t % places == place else 0.0
                moved[t] = keep * (moved[t - 1] if t else 0.0) + gradient
            distance = math.sqrt(moved @ np.linalg.solve(covariance, moved))
            assert distance <= mechanism.sensitivity(workload(rounds, places))
