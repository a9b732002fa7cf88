"""Counterexamples to what the papers print, each computed again (docs/errata.md)."""

import itertools
import math

import numpy as np
import pytest

from fedpriv.accounting.gaussian import epsilon_of
from fedpriv.addons.rates.momentum import first_rounds
from fedpriv.papers.tran_cutkosky import paper_node_count


@pytest.mark.parametrize(("claimed", "true"), [(10.0, 10.3939), (15.0, 17.3717), (24.3816, 33.4044)])
def test_lemma_8_underestimates_epsilon_for_large_mu(claimed: float, true: float) -> None:
    factor = math.sqrt(2.0 * math.log(1.25 / 1e-5))
    assert epsilon_of(claimed / factor, 1e-5) == pytest.approx(true, abs=5e-4)
    assert epsilon_of(8.42 / factor, 1e-5) <= 8.421  # up to here it holds


def test_the_corollaries_conversion_at_half_delta_fails_from_epsilon_8_54() -> None:
    factor = math.sqrt(2.0 * math.log(2.5 / 1e-5))
    assert epsilon_of(8.53 / factor, 5e-6) <= 8.53
    assert epsilon_of(8.54 / factor, 5e-6) > 8.54


def largest_weight(records: int, epochs: int) -> float:
    """Largest weight of a record in a node over all orders, in which it comes as late as it can in each epoch."""
    decay, rounds = 1.0 - 1.0 / records, records * epochs
    largest = 0.0
    for level in range(rounds.bit_length()):
        length = 1 << level
        for end in range(length, rounds + 1, length):
            epochs_of_node = range((end - length) // records, (end - 1) // records + 1)
            weight = sum(decay ** (end - min(end, (epoch + 1) * records)) for epoch in epochs_of_node)
            largest = max(largest, weight)
    return largest


@pytest.mark.parametrize(
    ("records", "golden"), [(5, 4.3798), (7, 4.5969), (10, 4.4873), (11, 4.7941), (100, 4.9040), (64, 3.1495)]
)
def test_the_bound_4_alpha_g_of_theorem_4_fails_for_fresh_permutations(records: int, golden: float) -> None:
    assert 2.0 * largest_weight(records, 64) == pytest.approx(golden, abs=5e-5)
    assert golden < 2.0 * (1.0 + math.e / (math.e - 1.0))


def test_random_permutations_exceed_the_printed_bound_4_alpha_g() -> None:
    """By brute force: in some order of three epochs of 5 records a node moves by more than the printed bound."""
    records, decay = 5, 0.8
    weights = []
    for places in itertools.product(range(records), repeat=3):
        rounds = [epoch * records + place + 1 for epoch, place in enumerate(places)]
        for level in range(4):
            length = 1 << level
            for end in range(length, 16, length):
                weights += [sum(decay ** (end - t) for t in rounds if end - length < t <= end)]
    assert 2.0 * max(weights) > 2.0 * (1.0 + decay**3) > 3.0
    assert 2.0 * largest_weight(5, 64) > 4.0


def test_the_last_term_of_theorem_6_is_below_the_noise_of_its_own_lemma() -> None:
    """At N = 1,000, d = 50, ε = 4 the printed 12 gives 3.425, and three times Lemma 12's noise is 6.48."""
    records, dimension, epsilon = 1000, 50, 4.0
    rounds = first_rounds(records, dimension, epsilon)
    assert 12.0 * math.sqrt(records / rounds) == pytest.approx(3.425, abs=5e-4)
    nodes = paper_node_count(int(rounds), records) * math.log2(int(rounds))
    noise = 8.0 / records * math.sqrt(math.log(1e5) * dimension * nodes) / epsilon
    assert 3.0 * noise == pytest.approx(6.48, abs=5e-3)
    assert nodes / math.log2(int(rounds)) <= 4.0 * math.log2(rounds) * rounds / records


def test_a_tree_node_of_differences_moves_by_3_16_for_a_thousand_records() -> None:
    """δ_Δ = 2ηN: with G's factor 2 and L a node moves by 2 ηNL times its weight, 3.16 for N = 1,000."""
    decay = 1.0 - 1.0 / 1000
    weight = 1.0 / (1.0 - decay**1000)
    assert 2.0 * weight == pytest.approx(3.16, abs=5e-3)


def test_a_replaced_record_moves_the_anchor_mean_by_twice_the_printed_bound() -> None:
    """Lemma 6.3 prints L/B: gradients of opposite directions are 2L apart."""
    batch, lipschitz = 8, 1.0
    gradients = np.tile([lipschitz, 0.0], (batch, 1))
    replaced = gradients.copy()
    replaced[0] = [-lipschitz, 0.0]
    moved = np.linalg.norm(gradients.mean(axis=0) - replaced.mean(axis=0))
    assert moved == pytest.approx(2.0 * lipschitz / batch)
    assert moved > lipschitz / batch
