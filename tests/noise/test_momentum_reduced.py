"""The mechanisms of momentum-tree-reduced: node sets, counts, variances and streams against literal versions."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from fedpriv.core.errors import InputError
from fedpriv.noise.differences import AlignedDifferences, DifferenceTrees, calibrate_trees, size_by_paper
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.sliding import SlidingDifferences
from fedpriv.noise.tree import PaperTree, cover, used_ends
from tests.noise.matrices import separated, stream, workload_matrix, workload_of
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
    stds = {f"std_{group}": std for group, std in GOLDEN_STDS._asdict().items()}
    return kind(rounds_per_epoch, mixing=0.3, difference=1.0, residual=0.1, movement=0.1, decay=decay, **stds)


def workload(rounds: int, rounds_per_epoch: int, decay: float = 0.75, clips: float = 1.0) -> Workload:
    return workload_of(rounds, decay, rounds_per_epoch, clips=clips)


def impulses(mechanism: Mechanism, rounds: int) -> Sequence[torch.Tensor]:
    """Unit vectors as fresh noise, as many for each round as it draws."""
    counts = [mechanism.draws(t) or 0 for t in range(1, rounds + 1)]
    return torch.eye(sum(counts), dtype=torch.float64).split(counts)


def places(rounds_per_epoch: int) -> Callable[[int], float]:
    return lambda t: (t - 1) % rounds_per_epoch


every_kind = pytest.mark.parametrize("kind", KINDS)
every_size = pytest.mark.parametrize(("rounds_per_epoch", "rounds"), SIZES)


def test_tree_cover_of_an_interval_matches_the_papers_compose() -> None:
    for first in range(1, 40):
        for last in range(first - 1, 70):
            assert [(end - (1 << k) + 1, end) for k, end in cover(first, last)] == compose(first, last)


def test_the_nodes_counted_are_those_the_reconstruction_touches() -> None:
    def intervals(rounds: int, epoch: int, earliest: int) -> set[Interval]:
        ends = [
            (k, end) for k in range(rounds.bit_length()) for end in used_ends(rounds, epoch, k, earliest).tolist()
        ]
        return {(end - (1 << k) + 1, end) for k, end in ends}

    for rounds in range(1, 40):
        for epoch in range(1, 12):
            assert intervals(rounds, epoch, 1) == gradient_nodes(rounds, epoch)
            assert intervals(rounds, epoch, 2 * epoch) == difference_nodes(rounds, epoch)
    assert len(gradient_nodes(13, 5)) == 19
    assert difference_nodes(13, 5) == {(6, 6), (7, 8), (8, 8), (9, 10), (9, 12), (11, 11), (13, 13)}


def test_squared_norms_of_the_four_noise_groups_match_golden_values() -> None:
    found = SlidingDifferences(5, 0.3, 1.0, 1.0, 0.1, decay=0.75).squared_norms(workload(13, 5))
    golden = [
        [4.056884765625, 4.44140625, 5.125, 4.5625, 2.740478515625],
        [1.5625, 1, 1, 0.177978515625, 0.31640625],
        [2.5625, 1.5625, 3, 0.740478515625, 1.31640625],
        [0, 4.17755037546158, 16.3736915588379, 25.5653228759766, 48.91015625],
    ]
    for group, expected in zip(found, golden, strict=True):
        assert group == pytest.approx(expected, rel=1e-13)


def test_mu_of_every_record_matches_golden_values() -> None:
    """h = ℓ = 2 and η = 0.1 at α = 0.25, with the golden standard deviations."""
    mechanism = dataclasses.replace(trees(SlidingDifferences, 5), difference=0.1 * 5, residual=0.1)
    groups = zip(mechanism.squared_norms(workload(13, 5)), mechanism.stds, strict=True)
    mu = 2.0 * np.sqrt(sum(squared_norm / std**2 for squared_norm, std in groups))
    assert mu == pytest.approx([117.787215, 108.734396, 130.586062, 101.973866, 100.23632], rel=1e-8)
    assert 2.0 * mechanism.sensitivity(workload(13, 5)) == pytest.approx(130.586062, rel=1e-8)


@every_size
def test_squared_norms_match_a_loop_over_nodes_and_records(rounds_per_epoch: int, rounds: int) -> None:
    mechanism = dataclasses.replace(trees(SlidingDifferences, rounds_per_epoch), difference=3.0, residual=0.5)
    found = mechanism.squared_norms(workload(rounds, rounds_per_epoch, clips=2.0))
    nodes = gradient_nodes(rounds, rounds_per_epoch)
    early = {node for node in nodes if node[1] <= 2 * rounds_per_epoch}
    expected = [
        4.0 * squared_norms(early, rounds_per_epoch, 0.75),
        4.0 * squared_norms(nodes - early, rounds_per_epoch, 0.75),
        9.0 * squared_norms(difference_nodes(rounds, rounds_per_epoch), rounds_per_epoch, 0.75),
        0.25 * squared_norms(prefix_nodes(rounds), rounds_per_epoch, 0.75, places(rounds_per_epoch)),
    ]
    for group, by_loop in zip(found, expected, strict=True):
        assert group == pytest.approx(by_loop, rel=1e-12)


@every_size
@pytest.mark.parametrize("movement", [0.1, None])
def test_squared_norms_of_aligned_trees_match_one_tree_per_epoch(
    rounds_per_epoch: int, rounds: int, movement: float | None
) -> None:
    """Every epoch has a tree over its own places; a clipped residual moves alike in all rounds but the first."""
    mechanism = dataclasses.replace(trees(AlignedDifferences, rounds_per_epoch), movement=movement)
    found = mechanism.squared_norms(workload(rounds, rounds_per_epoch))
    by_epoch = []
    for start in range(0, rounds, rounds_per_epoch):
        within = min(rounds_per_epoch, rounds - start)
        own = squared_norms(prefix_nodes(within), rounds_per_epoch, 0.75)
        by_epoch.append(np.where(np.arange(rounds_per_epoch) < within, own, 0.0))
    assert found.early == pytest.approx(by_epoch[0], rel=1e-12)
    assert found.late == pytest.approx(sum(by_epoch[1:], np.zeros(rounds_per_epoch)), rel=1e-12)
    assert found.difference == pytest.approx(found.late, rel=1e-12)
    place = places(rounds_per_epoch)
    moved = place if movement else lambda t: min(place(t), 1.0)
    residual = 0.01 * squared_norms(prefix_nodes(rounds), rounds_per_epoch, 0.75, moved)
    assert found.residual == pytest.approx(residual, rel=1e-12)


@every_kind
@every_size
def test_variances_are_the_sums_of_squared_coefficients(
    kind: type[DifferenceTrees], rounds_per_epoch: int, rounds: int
) -> None:
    """Unit impulses as fresh vectors show every coefficient; the state never has more vectors than announced."""
    mechanism, work = trees(kind, rounds_per_epoch), workload(rounds, rounds_per_epoch)
    streamed = list(stream(mechanism, impulses(mechanism, rounds)))
    if kind is SlidingDifferences and rounds_per_epoch == 1:  # whose variance counts the residual tree
        mechanism = dataclasses.replace(mechanism, std_residual=0.0)
    assert mechanism.variance(work) == pytest.approx([float(row @ row) for row, _ in streamed], rel=1e-12)
    assert max(len(state) for _, state in streamed) == mechanism.memory_vectors(work)


def test_variances_of_sliding_trees_match_golden_values() -> None:
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
            std_gradient = std_early if end <= (1 + (not aligned)) * rounds_per_epoch else std_late
            std = std_difference if tree == 2 else std_gradient
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
        before = estimate(epoch - 1, place) + total(2, 1, place, epoch * rounds_per_epoch)
        return (1 - mixing) * before + mixing * own

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


@every_size
def test_streamed_noise_equals_the_literal_reconstruction(rounds_per_epoch: int, rounds: int) -> None:
    mechanism = trees(SlidingDifferences, rounds_per_epoch)
    assert isinstance(mechanism, SlidingDifferences)
    numbers = {"gradient": 1, "difference": 2, "residual": 3}
    fresh = (
        torch.from_numpy(
            np.array([numbered(numbers[tree], k, (t >> k) - 1) for tree, k in mechanism.fresh_nodes(t)])
        )
        for t in range(1, rounds + 1)
    )
    expected = literal_noise(rounds, rounds_per_epoch, 0.3, 0.75, aligned=False)
    np.testing.assert_allclose([row.numpy() for row, _ in stream(mechanism, fresh)], expected, atol=1e-12)


@every_size
def test_streamed_noise_of_aligned_trees_equals_its_definition(rounds_per_epoch: int, rounds: int) -> None:
    def fresh(t: int) -> torch.Tensor:
        place = (t - 1) % rounds_per_epoch + 1
        own, whole = (place & -place).bit_length() - 1, (t & -t).bit_length() - 1
        nodes = [numbered(3, whole, (t >> whole) - 1)] if rounds_per_epoch > 1 else []
        nodes += [numbered(tree, own, t) for tree in ((1,) if t <= rounds_per_epoch else (1, 2))]
        return torch.from_numpy(np.array(nodes))

    expected = literal_noise(rounds, rounds_per_epoch, 0.3, 0.75, aligned=True)
    streamed = stream(trees(AlignedDifferences, rounds_per_epoch), map(fresh, range(1, rounds + 1)))
    np.testing.assert_allclose([row.numpy() for row, _ in streamed], expected, atol=1e-12)


@every_kind
def test_replicates_with_different_standard_deviations_stream_as_if_alone(kind: type[DifferenceTrees]) -> None:
    one, other = trees(kind, 5), dataclasses.replace(trees(kind, 5), std_early=1.0, std_late=2.0)
    column = {
        name: torch.tensor([[getattr(one, name)], [getattr(other, name)]], dtype=torch.float64)
        for name in ("std_early", "std_late")
    }
    both = dataclasses.replace(one, **column)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    fresh = [torch.randn(one.draws(t) or 0, 2, 4, generator=generator, dtype=torch.float64) for t in range(1, 24)]
    alone = [stream(mechanism, [vectors[:, k] for vectors in fresh]) for k, mechanism in enumerate((one, other))]
    for (together, _), (first, _), (second, _) in zip(stream(both, fresh), *alone, strict=True):
        torch.testing.assert_close(together, torch.stack([first, second]), rtol=1e-12, atol=1e-14)


@every_kind
@pytest.mark.parametrize("shares", ["best", "equal"])
@pytest.mark.parametrize(("rounds_per_epoch", "rounds"), [(5, 23), (50, 500), (8, 9), (1, 7), (7, 7)])
def test_sensitivity_of_calibrated_trees_is_at_most_the_clip(
    kind: type[DifferenceTrees], shares: str, rounds_per_epoch: int, rounds: int
) -> None:
    """With shares λ that sum to 1 the parts add up to at most 1: μ ≤ 1/σ."""
    work = workload(rounds, rounds_per_epoch, clips=2.0)
    found = calibrate_trees(trees(kind, rounds_per_epoch), work, "best" if shares == "best" else "equal")
    assert 1.0 <= found.sensitivity(work) <= 2.0 * (1.0 + 1e-12)
    assert (found.std_residual == 0.0) == (rounds_per_epoch == 1)


@every_kind
def test_best_shares_of_the_privacy_budget_have_the_least_mean_variance(kind: type[DifferenceTrees]) -> None:
    """At the size where the shares just add up, μ = 1/σ, no other split has a smaller mean variance."""
    work = workload(500, 50, decay=1.0 - 1 / 50)
    best = calibrate_trees(trees(kind, 50, decay=1.0 - 1 / 50), work, "best")
    worst = np.array([float(group.max()) for group in best.squared_norms(work)])
    split = worst / np.square(best.stds)
    assert np.sum(split) == pytest.approx(1.0)
    for factor in ([1.1, 1, 1, 1], [1, 1.1, 1, 1], [1, 1, 1.1, 1], [1, 1, 1, 1.1], [0.9, 1, 1, 1.2]):
        early, late, difference, residual = np.sqrt(worst / (split * factor / np.sum(split * factor)))
        other = dataclasses.replace(
            best, std_early=early, std_late=late, std_difference=difference, std_residual=residual
        )
        assert other.mean_variance(work) > best.mean_variance(work)


@pytest.mark.parametrize(("rounds_per_epoch", "epochs"), [(8, 20), (50, 10), (64, 7), (101, 9)])
def test_noise_sized_by_the_paper_is_more_than_exact_counting_needs(rounds_per_epoch: int, epochs: int) -> None:
    """Its ρ = 2/σ² is what it is sized for; exact counting of the same noise gives less."""
    alpha, rounds = 1.0 / rounds_per_epoch, rounds_per_epoch * epochs
    step = 1.0 / math.sqrt(rounds_per_epoch * rounds)
    work = workload(rounds, rounds_per_epoch, 1.0 - alpha, alpha)
    far = step * rounds_per_epoch
    plain = SlidingDifferences(rounds_per_epoch, far, alpha * far, alpha * step, step, decay=1.0 - alpha)
    paper = size_by_paper(plain, work, sigma_mu=2.0)
    exact = dataclasses.replace(paper, least=0.0)
    assert paper.sensitivity(work) == 4.0 * alpha
    ratio = exact.sensitivity(work) / paper.sensitivity(work)
    assert 0.49 <= 4.0 * ratio**2 <= 1.07  # μ²σ², whose claim is 4


LONG = {kind: trees(kind, 8, decay=0.95) for kind in KINDS}
REFUSED: list[tuple[str, Callable[[DifferenceTrees], object]]] = [
    ("one order of", lambda trees: trees.sensitivity(separated(20, 4, 5, 0.75))),
    ("one order of", lambda trees: trees.sensitivity(workload(20, 4))),
    ("smoothness", lambda trees: dataclasses.replace(trees, difference=math.inf).sensitivity(workload(20, 5))),
    ("movement", lambda trees: dataclasses.replace(trees, difference=0.0).sensitivity(workload(20, 5))),
    ("above", lambda trees: dataclasses.replace(trees, residual=0.0).sensitivity(workload(20, 5))),
    ("bounds", lambda trees: dataclasses.replace(trees, movement=0.0).sensitivity(workload(20, 5))),
    ("γ", lambda trees: dataclasses.replace(trees, mixing=0.0).sensitivity(workload(20, 5))),
    ("no noise", lambda trees: dataclasses.replace(trees, std_late=0.0).sensitivity(workload(20, 5))),
    ("decay", lambda trees: trees.sensitivity(workload(20, 5, decay=0.5))),
    ("6", lambda trees: size_by_paper(trees, workload(20, 5), 2.0)),
    ("at least 1/N", lambda trees: size_by_paper(LONG[type(trees)], workload(20, 8, decay=0.95), 2.0)),
    (
        "clipped differences",
        lambda trees: size_by_paper(dataclasses.replace(trees, movement=None), workload(20, 5), 2.0),
    ),
]


@every_kind
def test_trees_without_other_words_are_of_plain_sums_with_noise_of_one_size(kind: type[DifferenceTrees]) -> None:
    plain = kind(5, mixing=0.3, difference=1.0, residual=0.1, movement=None)
    alike = dataclasses.replace(
        plain, decay=1.0, std_early=1.0, std_late=1.0, std_difference=1.0, std_residual=1.0, least=0.0
    )
    assert plain == alike


@every_kind
def test_the_least_charge_is_in_the_largest_clip(kind: type[DifferenceTrees]) -> None:
    work = workload_of(20, 0.75, 5, clips=np.linspace(1.0, 2.0, 20))
    counted = trees(kind, 5).certified(work)
    assert counted == trees(kind, 5).attained_sensitivity(work)
    least = dataclasses.replace(trees(kind, 5), least=0.51 * counted.value)
    assert least.certified(work).value == pytest.approx(1.02 * counted.value)
    assert least.attained_sensitivity(work) == counted


@every_kind
@pytest.mark.parametrize(("named", "build"), REFUSED, ids=[named for named, _ in REFUSED])
def test_difference_trees_refuse_runs_without_a_known_sensitivity_or_noise_size(
    kind: type[DifferenceTrees], named: str, build: Callable[[DifferenceTrees], object]
) -> None:
    with pytest.raises(InputError, match=named):
        build(trees(kind, 5))


@pytest.mark.parametrize("place", range(1, 6))
def test_straight_path_attains_the_bounds_on_gradient_differences(place: int) -> None:
    """Gradient x L w with x = ±1, the iterate in a straight line: the differences' bounds are attained."""
    rounds_per_epoch, rounds, decay, step, smoothness = 5, 13, 0.75, 0.1, 2.0
    path = {t: step * (t - 1) for t in range(1, rounds + 1)}
    anchor = {t: path[(t - 1) // rounds_per_epoch * rounds_per_epoch + 1] for t in path}
    own = [t for t in path if (t - 1) % rounds_per_epoch + 1 == place]
    change = {t: 2 * smoothness * (anchor[t] - anchor.get(t - rounds_per_epoch, anchor[t])) for t in own}
    residual = {t: 2 * smoothness * (path[t] - anchor[t]) for t in own}

    def moved(nodes: set[Interval], by: dict[int, float]) -> float:
        return sum(sum(by.get(t, 0.0) * decay ** (z - t) for t in range(y, z + 1)) ** 2 for y, z in nodes)

    near = smoothness * step
    mechanism = SlidingDifferences(rounds_per_epoch, 0.3, near * rounds_per_epoch, near, step, decay=decay)
    bound = mechanism.squared_norms(workload(rounds, rounds_per_epoch))
    differences = moved(difference_nodes(rounds, rounds_per_epoch), change)
    assert 4 * bound.difference[place - 1] == pytest.approx(differences)
    assert 4 * bound.residual[place - 1] == pytest.approx(moved(prefix_nodes(rounds), residual))


def test_mahalanobis_distance_of_neighbouring_releases_is_at_most_the_sensitivity() -> None:
    """Mahalanobis distance of the released momenta of neighbours, on a fixed path, against the accountant's μ."""
    rounds, rounds_per_epoch, decay, step = 23, 5, 0.75, 0.1
    for kind in KINDS:
        base = kind(rounds_per_epoch, 0.3, step * rounds_per_epoch, step, step, decay=decay)
        mechanism = calibrate_trees(base, workload(rounds, rounds_per_epoch), "best")
        rows = torch.stack([row for row, _ in stream(mechanism, impulses(mechanism, rounds))]).numpy()
        covariance = rows @ rows.T
        for place in range(rounds_per_epoch):
            moved = workload_matrix(rounds, decay)[:, place::rounds_per_epoch].sum(axis=1)
            distance = math.sqrt(moved @ np.linalg.solve(covariance, moved))
            assert distance <= mechanism.sensitivity(workload(rounds, rounds_per_epoch))


def test_paper_tree_charges_the_larger_of_the_papers_constant_and_the_exact_count() -> None:
    work = workload_of(4, clips=[1.0, 2.0, 1.0, 0.5])
    counted = PaperTree().attained_sensitivity(work)
    assert counted.exact
    least = counted.value / 2.0  # of the largest clip: 2 · least is what counting gives, to the last bit
    assert PaperTree(least=least).certified(work) == counted
    charged = PaperTree(least=2.0 * least).certified(work)
    assert charged.value == 2.0 * counted.value
    assert not charged.exact
