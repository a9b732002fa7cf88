"""The mechanisms of momentum-tree-reduced: node sets, counts, variances and streams against literal versions."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from fedpriv.core.errors import InputError
from fedpriv.noise.differences import AlignedDifferences, DifferenceTrees, calibrate_trees, size_by_paper
from fedpriv.noise.series import Workload
from fedpriv.noise.sliding import SlidingDifferences
from fedpriv.noise.tree import PaperTree, cover, used_ends
from fedpriv.participation.orders import FixedOrder, MinSeparation
from tests.oracle_momentum import (
    GOLDEN_STDS,
    Interval,
    Vector,
    compose,
    difference_nodes,
    gradient_nodes,
    level,
    noise_of,
    prefix_nodes,
    squared_norms,
)

KINDS = [SlidingDifferences, AlignedDifferences]
SIZES = [(4, 16), (5, 23), (7, 64), (3, 20), (2, 9), (8, 9), (16, 70), (6, 5), (5, 5), (5, 10), (1, 7)]


def trees(kind: type[DifferenceTrees], rounds_per_epoch: int, decay: float = 0.75) -> DifferenceTrees:
    return kind(
        rounds_per_epoch,
        mixing=0.3,
        difference=1.0,
        residual=0.1,
        movement=0.1,
        decay=decay,
        std_early=GOLDEN_STDS.early,
        std_late=GOLDEN_STDS.late,
        std_difference=GOLDEN_STDS.difference,
        std_residual=GOLDEN_STDS.residual,
    )


def workload(rounds: int, rounds_per_epoch: int, decay: float = 0.75) -> Workload:
    return Workload(FixedOrder(rounds, rounds_per_epoch), decay, np.ones(rounds))


def test_the_cover_is_compose() -> None:
    for first in range(1, 40):
        for last in range(first - 1, 70):
            assert [(end - (1 << k) + 1, end) for k, end in cover(first, last)] == compose(first, last)


def test_the_nodes_counted_are_those_the_reconstruction_touches() -> None:
    def intervals(rounds: int, rounds_per_epoch: int, earliest: int) -> set[Interval]:
        levels = range(rounds.bit_length())
        return {
            (end - (1 << k) + 1, end)
            for k in levels
            for end in used_ends(rounds, rounds_per_epoch, k, earliest).tolist()
        }

    for rounds in range(1, 40):
        for rounds_per_epoch in range(1, 12):
            assert intervals(rounds, rounds_per_epoch, 1) == gradient_nodes(rounds, rounds_per_epoch)
            assert intervals(rounds, rounds_per_epoch, 2 * rounds_per_epoch) == difference_nodes(
                rounds, rounds_per_epoch
            )
    assert len(gradient_nodes(13, 5)) == 19
    assert difference_nodes(13, 5) == {(6, 6), (7, 8), (8, 8), (9, 10), (9, 12), (11, 11), (13, 13)}


def test_golden_energies_of_the_four_groups() -> None:
    found = SlidingDifferences(5, 0.3, 1.0, 1.0, 0.1, decay=0.75).squared_norms(workload(13, 5))
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
    groups = zip(mechanism.squared_norms(workload(13, 5)), mechanism.stds, strict=True)
    mu = 2.0 * np.sqrt(sum(squared_norm / std**2 for squared_norm, std in groups))
    assert mu == pytest.approx([117.787215, 108.734396, 130.586062, 101.973866, 100.23632], rel=1e-8)
    assert 2.0 * mechanism.sensitivity(workload(13, 5)) == pytest.approx(130.586062, rel=1e-8)


@pytest.mark.parametrize(("rounds_per_epoch", "rounds"), SIZES)
def test_energies_are_those_of_a_loop_over_nodes_and_records(rounds_per_epoch: int, rounds: int) -> None:
    mechanism = dataclasses.replace(trees(SlidingDifferences, rounds_per_epoch), difference=3.0, residual=0.5)
    found = mechanism.squared_norms(Workload(FixedOrder(rounds, rounds_per_epoch), 0.75, np.full(rounds, 2.0)))
    nodes = gradient_nodes(rounds, rounds_per_epoch)
    early = {node for node in nodes if node[1] <= 2 * rounds_per_epoch}
    expected = [
        4.0 * squared_norms(early, rounds_per_epoch, 0.75),
        4.0 * squared_norms(nodes - early, rounds_per_epoch, 0.75),
        9.0 * squared_norms(difference_nodes(rounds, rounds_per_epoch), rounds_per_epoch, 0.75),
        0.25 * squared_norms(prefix_nodes(rounds), rounds_per_epoch, 0.75, lambda t: (t - 1) % rounds_per_epoch),
    ]
    for group, by_loop in zip(found, expected, strict=True):
        assert group == pytest.approx(by_loop, rel=1e-12)


@pytest.mark.parametrize(("rounds_per_epoch", "rounds"), SIZES)
def test_energies_of_the_aligned_trees(rounds_per_epoch: int, rounds: int) -> None:
    """Every epoch has a tree over its own places."""
    found = trees(AlignedDifferences, rounds_per_epoch).squared_norms(workload(rounds, rounds_per_epoch))
    by_epoch = []
    for start in range(0, rounds, rounds_per_epoch):
        within = min(rounds_per_epoch, rounds - start)
        own = squared_norms(prefix_nodes(within), rounds_per_epoch, 0.75)
        by_epoch.append(np.where(np.arange(rounds_per_epoch) < within, own, 0.0))
    assert found.early == pytest.approx(by_epoch[0], rel=1e-12)
    assert found.late == pytest.approx(sum(by_epoch[1:], np.zeros(rounds_per_epoch)), rel=1e-12)
    assert found.difference == pytest.approx(found.late, rel=1e-12)
    assert found.residual == pytest.approx(
        0.01 * squared_norms(prefix_nodes(rounds), rounds_per_epoch, 0.75, lambda t: (t - 1) % rounds_per_epoch),
        rel=1e-12,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rounds_per_epoch", "rounds"), SIZES)
def test_variances_are_the_sums_of_squared_coefficients(
    kind: type[DifferenceTrees], rounds_per_epoch: int, rounds: int
) -> None:
    """Unit impulses as fresh vectors show every coefficient; the state never has more vectors than announced."""
    mechanism = trees(kind, rounds_per_epoch)
    count = sum(mechanism.draws(t) or 0 for t in range(1, rounds + 1))
    state, drawn, squares, longest = mechanism.start(), 0, [], 0
    impulses = torch.eye(count, dtype=torch.float64)
    for t in range(1, rounds + 1):
        now = mechanism.draws(t) or 0
        row, state = mechanism.noise(state, t, impulses[drawn : drawn + now])
        drawn += now
        squares.append(float(row @ row))
        longest = max(longest, len(state))
    flat = dataclasses.replace(mechanism, std_residual=mechanism.std_residual if rounds_per_epoch > 1 else 0.0)
    assert flat.variance(workload(rounds, rounds_per_epoch)) == pytest.approx(squares, rel=1e-12)
    assert longest == mechanism.memory_vectors(workload(rounds, rounds_per_epoch))


def test_golden_variances() -> None:
    variance = 0.25**2 * trees(SlidingDifferences, 5).variance(workload(13, 5))
    golden = {1: 0.0002125, 7: 0.000378650671243668, 10: 0.000325807335630059, 13: 0.000318237682698055}
    assert {t: variance[t - 1] for t in golden} == pytest.approx(golden, rel=1e-12)


def numbered(tree: int, level: int, index: int) -> Vector:
    return np.random.default_rng([7, tree, level, index]).standard_normal(3)


def literal_noise(rounds: int, rounds_per_epoch: int, mixing: float, decay: float, aligned: bool) -> list[Vector]:
    """The noise of each release by its definition, every window and prefix composed anew."""
    std_early, std_late, std_difference, std_residual = GOLDEN_STDS

    def total(tree: int, first: int, last: int, offset: int = 0) -> Vector:
        found = np.zeros(3)
        for y, z in compose(first, last):
            end = z + offset
            std = (
                std_difference
                if tree == 2
                else std_early
                if end <= (1 + (not aligned)) * rounds_per_epoch
                else std_late
            )
            node = numbered(tree, level((y, z)), end) if aligned else noise_of(numbered, tree, (y, z))
            found += decay ** (last - z) * std * node
        return found

    def sliding(t: int) -> Vector:
        whole, rest = divmod(t, rounds_per_epoch)
        found = decay ** (whole * rounds_per_epoch) * total(1, 1, rest)
        mixed = [0.0]
        for i in range(1, whole + 1):
            mixed.append((1 - mixing) * mixed[-1] + decay ** (rounds_per_epoch * (i - 1)))
        if whole:
            found = found + mixed[whole] * total(1, rest + 1, rest + rounds_per_epoch)
        for i in range(1, whole):
            at = (t - i * rounds_per_epoch + 1, t - (i - 1) * rounds_per_epoch)
            found = found + mixed[i] * ((1 - mixing) * total(2, *at) + mixing * total(1, *at))
        return found

    def estimate(epoch: int, place: int) -> Vector:
        """Q_{q,p}"""
        own = total(1, 1, place, epoch * rounds_per_epoch)
        if epoch == 0:
            return own
        return (1 - mixing) * (
            estimate(epoch - 1, place) + total(2, 1, place, epoch * rounds_per_epoch)
        ) + mixing * own

    def by_epochs(t: int) -> Vector:
        epoch, place = (t - 1) // rounds_per_epoch, (t - 1) % rounds_per_epoch + 1
        found = estimate(epoch, place)
        for k in range(epoch):
            found = found + decay ** (place + (epoch - 1 - k) * rounds_per_epoch) * estimate(k, rounds_per_epoch)
        return found

    def residual(t: int) -> Vector:
        added = [decay ** (t - z) * noise_of(numbered, 3, (y, z)) for y, z in compose(1, t)]
        return std_residual * np.sum(added, axis=0) if rounds_per_epoch > 1 else np.zeros(3)

    return [(by_epochs(t) if aligned else sliding(t)) + residual(t) for t in range(1, rounds + 1)]


@pytest.mark.parametrize(("rounds_per_epoch", "rounds"), SIZES)
def test_the_stream_is_the_literal_reconstruction(rounds_per_epoch: int, rounds: int) -> None:
    mechanism = trees(SlidingDifferences, rounds_per_epoch)
    assert isinstance(mechanism, SlidingDifferences)
    numbers, state = {"gradient": 1, "difference": 2, "residual": 3}, mechanism.start()
    for t, expected in enumerate(literal_noise(rounds, rounds_per_epoch, 0.3, 0.75, aligned=False), start=1):
        nodes = [numbered(numbers[tree], k, (t >> k) - 1) for tree, k in mechanism.fresh_nodes(t)]
        row, state = mechanism.noise(state, t, torch.from_numpy(np.array(nodes)))
        np.testing.assert_allclose(row.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(("rounds_per_epoch", "rounds"), SIZES)
def test_the_aligned_stream_is_its_definition(rounds_per_epoch: int, rounds: int) -> None:
    mechanism, state = trees(AlignedDifferences, rounds_per_epoch), ()
    for t, expected in enumerate(literal_noise(rounds, rounds_per_epoch, 0.3, 0.75, aligned=True), start=1):
        place = (t - 1) % rounds_per_epoch + 1
        own, whole = (place & -place).bit_length() - 1, (t & -t).bit_length() - 1
        nodes = [numbered(3, whole, (t >> whole) - 1)] if rounds_per_epoch > 1 else []
        nodes += [numbered(tree, own, t) for tree in ((1,) if t <= rounds_per_epoch else (1, 2))]
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
@pytest.mark.parametrize(("rounds_per_epoch", "rounds"), [(5, 23), (50, 500), (8, 9), (1, 7), (7, 7)])
def test_calibration_costs_at_most_the_clip(
    kind: type[DifferenceTrees], shares: str, rounds_per_epoch: int, rounds: int
) -> None:
    """With shares λ that sum to 1 the parts add up to at most 1: μ ≤ 1/σ."""
    work = Workload(FixedOrder(rounds, rounds_per_epoch), 0.75, np.full(rounds, 2.0))
    found = calibrate_trees(trees(kind, rounds_per_epoch), work, "best" if shares == "best" else "equal")
    assert 1.0 <= found.sensitivity(work) <= 2.0 * (1.0 + 1e-12)
    assert (found.std_residual == 0.0) == (rounds_per_epoch == 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_shares_have_the_least_noise(kind: type[DifferenceTrees]) -> None:
    """At the size where the shares just add up, μ = 1/σ, no other split has a smaller mean variance."""
    work = workload(500, 50, decay=1.0 - 1 / 50)
    best = calibrate_trees(trees(kind, 50, decay=1.0 - 1 / 50), work, "best")
    worst = np.array([float(group.max()) for group in best.squared_norms(work)])
    split = worst / np.square(best.stds)
    assert np.sum(split) == pytest.approx(1.0)
    for factor in ([1.1, 1, 1, 1], [1, 1.1, 1, 1], [1, 1, 1.1, 1], [1, 1, 1, 1.1], [0.9, 1, 1, 1.2]):
        changed = split * factor / np.sum(split * factor)
        stds = np.sqrt(worst / changed)
        other = dataclasses.replace(
            best, std_early=stds[0], std_late=stds[1], std_difference=stds[2], std_residual=stds[3]
        )
        assert other.mean_variance(work) > best.mean_variance(work)


@pytest.mark.parametrize(("rounds_per_epoch", "epochs"), [(8, 20), (50, 10), (64, 7), (101, 9)])
def test_the_papers_size_is_enough(rounds_per_epoch: int, epochs: int) -> None:
    """Its ρ = 2/σ² is what it is sized for; exact counting of the same noise gives less."""
    alpha, rounds = 1.0 / rounds_per_epoch, rounds_per_epoch * epochs
    step = 1.0 / math.sqrt(rounds_per_epoch * rounds)
    work = Workload(FixedOrder(rounds, rounds_per_epoch), 1.0 - alpha, np.full(rounds, alpha))
    plain = SlidingDifferences(
        rounds_per_epoch,
        step * rounds_per_epoch,
        alpha * step * rounds_per_epoch,
        alpha * step,
        step,
        decay=1.0 - alpha,
    )
    paper = size_by_paper(plain, work, sigma_mu=2.0)
    exact = dataclasses.replace(paper, least=0.0)
    assert paper.sensitivity(work) == 4.0 * alpha
    ratio = exact.sensitivity(work) / paper.sensitivity(work)
    assert 0.49 <= 4.0 * ratio**2 <= 1.07  # μ²σ², whose claim is 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused(kind: type[DifferenceTrees]) -> None:
    mechanism = trees(kind, 5)
    with pytest.raises(InputError, match="one order of"):
        mechanism.sensitivity(Workload(MinSeparation(20, 4, 5), 0.75, np.ones(20)))
    with pytest.raises(InputError, match="one order of"):
        mechanism.sensitivity(workload(20, 4))
    with pytest.raises(InputError, match="smoothness"):
        dataclasses.replace(mechanism, difference=math.inf).sensitivity(workload(20, 5))
    with pytest.raises(InputError, match="γ"):
        dataclasses.replace(mechanism, mixing=0.0).sensitivity(workload(20, 5))
    with pytest.raises(InputError, match="no noise"):
        dataclasses.replace(mechanism, std_late=0.0).sensitivity(workload(20, 5))
    with pytest.raises(InputError, match="decay"):
        mechanism.sensitivity(workload(20, 5, decay=0.5))
    with pytest.raises(InputError, match="6"):
        size_by_paper(mechanism, workload(20, 5), 2.0)
    with pytest.raises(InputError, match="at least 1/N"):
        size_by_paper(trees(kind, 8, decay=0.95), workload(20, 8, decay=0.95), 2.0)
    with pytest.raises(InputError, match="clipped differences"):
        size_by_paper(dataclasses.replace(mechanism, movement=None), workload(20, 5), 2.0)


@pytest.mark.parametrize("place", range(1, 6))
def test_no_path_of_bounded_steps_moves_a_node_farther(place: int) -> None:
    """Gradient x L w with x = ±1, the iterate in a straight line: the differences' bounds are attained."""
    rounds_per_epoch, rounds, decay, step, smoothness = 5, 13, 0.75, 0.1, 2.0
    path = {t: step * (t - 1) for t in range(1, rounds + 1)}
    anchor = {t: path[(t - 1) // rounds_per_epoch * rounds_per_epoch + 1] for t in path}
    own = [t for t in path if (t - 1) % rounds_per_epoch + 1 == place]
    change = {t: 2 * smoothness * (anchor[t] - anchor.get(t - rounds_per_epoch, anchor[t])) for t in own}
    residual = {t: 2 * smoothness * (path[t] - anchor[t]) for t in own}

    def moved(nodes: set[Interval], by: dict[int, float]) -> float:
        return sum(sum(by.get(t, 0.0) * decay ** (z - t) for t in range(y, z + 1)) ** 2 for y, z in nodes)

    mechanism = SlidingDifferences(
        rounds_per_epoch, 0.3, smoothness * step * rounds_per_epoch, smoothness * step, step, decay=decay
    )
    bound = mechanism.squared_norms(workload(rounds, rounds_per_epoch))
    assert 4 * bound.difference[place - 1] == pytest.approx(
        moved(difference_nodes(rounds, rounds_per_epoch), change)
    )
    assert 4 * bound.residual[place - 1] == pytest.approx(moved(prefix_nodes(rounds), residual))


def test_one_record_moves_releases_less_than_accounted() -> None:
    """Mahalanobis distance of the released momenta of neighbours, on a fixed path, against the accountant's μ."""
    rounds, rounds_per_epoch, decay, step = 23, 5, 0.75, 0.1
    for kind in KINDS:
        base = kind(rounds_per_epoch, 0.3, step * rounds_per_epoch, step, step, decay=decay)
        mechanism = calibrate_trees(base, workload(rounds, rounds_per_epoch), "best")
        count = sum(mechanism.draws(t) or 0 for t in range(1, rounds + 1))
        state, drawn, rows = mechanism.start(), 0, []
        for t in range(1, rounds + 1):
            now = mechanism.draws(t) or 0
            row, state = mechanism.noise(state, t, torch.eye(count, dtype=torch.float64)[drawn : drawn + now])
            drawn += now
            rows.append(row.numpy())
        covariance = np.array(rows) @ np.array(rows).T
        for place in range(rounds_per_epoch):
            moved = np.zeros(rounds)
            for t in range(rounds):
                gradient = 1.0 if t % rounds_per_epoch == place else 0.0
                moved[t] = decay * (moved[t - 1] if t else 0.0) + gradient
            distance = math.sqrt(moved @ np.linalg.solve(covariance, moved))
            assert distance <= mechanism.sensitivity(workload(rounds, rounds_per_epoch))


def test_a_papers_tree_is_charged_by_its_largest_clip_and_is_exact_up_to_what_counting_gives() -> None:
    work = Workload(FixedOrder(4, 4), 1.0, np.array([1.0, 2.0, 1.0, 0.5]))
    counted = PaperTree().attained_sensitivity(work)
    assert counted.exact
    least = counted.value / 2.0  # of the largest clip: 2 · least is what counting gives, to the last bit
    assert PaperTree(least=least).certified(work) == counted
    charged = PaperTree(least=2.0 * least).certified(work)
    assert charged.value == 2.0 * counted.value
    assert not charged.exact
