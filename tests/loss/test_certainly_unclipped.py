"""Guarantee: what is said to be unclipped at a glance is what the clip of every record would leave as it is."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.loss.clipping import (
    clipping_if_certain,
    compute_clipping,
    joint_upper_norm,
    rank_one_bounds,
    upper_norm,
)
from fedpriv.loss.layers import DenseTerms
from fedpriv.loss.linear import RecordBlock, _max_feature_norm
from fedpriv.loss.objective import Records

CLIPS = st.floats(2.0**-40, 2.0**40)
ANY = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, 3e38, 2.0**-64, 2.0**49, 2.0**50, 2.0**51]),
    st.floats(-2.0, 2.0, width=32),
)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(
    slopes=st.lists(ANY, min_size=6, max_size=6),
    seen=st.lists(st.one_of(ANY.map(abs), st.floats(0.0, 10.0)), min_size=3, max_size=3),
    weights=st.lists(st.floats(0.0, 2.0, width=32), min_size=3, max_size=3),
    clip=CLIPS,
    wide=st.booleans(),
    summed_wide=st.booleans(),
)
def test_a_glance_says_what_the_clip_of_each_record_says(
    slopes: list[float], seen: list[float], weights: list[float], clip: float, wide: bool, summed_wide: bool
) -> None:
    kind = torch.float64 if wide else torch.float32
    summed = torch.float64 if wide or summed_wide else torch.float32
    columns = torch.tensor(slopes, dtype=kind).view(2, 3).to(summed)
    norms, weight = torch.tensor(seen, dtype=torch.float64), torch.tensor(weights, dtype=summed)
    found = clipping_if_certain(columns, lambda: norms.max().item(), weight, clip)
    if found is None:
        return
    each = compute_clipping(rank_one_bounds(upper_norm(columns, -2), norms), weight, clip)
    assert found.representable is each.representable is None
    assert found.is_clipped is each.is_clipped is None
    assert torch.equal(found.factor, each.factor)
    assert torch.equal(found.clipped_count, each.clipped_count)


@pytest.mark.parametrize("clip", [0.999, 1.001])
def test_it_knows_a_clip_that_is_just_long_enough(clip: float) -> None:
    slopes = torch.tensor([[0.6], [0.8]])
    found = clipping_if_certain(slopes, lambda: 1.0, torch.ones(1), clip)
    assert (found is not None) == (clip > 1.0)


def test_it_does_not_look_where_each_replicate_has_a_clip_of_its_own_or_records_are_many() -> None:
    def looked() -> float:
        raise AssertionError("nobody asks for the longest")

    assert clipping_if_certain(torch.zeros(2, 2, 1), looked, torch.ones(1), torch.tensor([[1.0], [2.0]])) is None
    assert clipping_if_certain(torch.zeros(2, 600), looked, torch.ones(600), 1.0) is None
    assert clipping_if_certain(torch.zeros(2, 0), looked, torch.ones(0), 1.0) is None


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(values=st.lists(ANY, min_size=1, max_size=6), wide=st.booleans(), long=st.booleans())
def test_the_length_of_all_is_at_least_the_norm_of_each(values: list[float], wide: bool, long: bool) -> None:
    """Also beyond 1,024 values, from where on squares are added in float64; NaN and infinity say nothing."""
    vectors = torch.tensor(values, dtype=torch.float64 if wide else torch.float32).unsqueeze(-1)
    vectors = vectors.expand(-1, 300 if long else 2)
    length, norms = joint_upper_norm(vectors), upper_norm(vectors)
    if math.isfinite(length):
        exact = sum(Fraction(value) ** 2 for value in vectors.double().flatten().tolist())
        assert Fraction(length) ** 2 >= exact
    if len(values) == 1 and not long:
        assert length == norms.item() or math.isnan(length)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**31), together=st.integers(1, 3), wide=st.booleans())
def test_a_block_knows_the_longest_of_each_round(seed: int, together: int, wide: bool) -> None:
    """As records that are no part of a block are looked at: the same number for the same records."""
    draw, kind = torch.Generator().manual_seed(seed), torch.float64 if wide else torch.float32
    features = torch.randn(4, together, 9, generator=draw)
    block = RecordBlock(Records(features, torch.zeros(4, together, dtype=torch.int64)), 2)
    for of_round in block.split_rounds():
        assert _max_feature_norm(of_round, kind) == _max_feature_norm(of_round.shared, kind)


@pytest.mark.parametrize("terms", [2, 3])
def test_guarantee_a_norm_from_products_is_at_least_the_exact_one(terms: int) -> None:
    """Σ_k u_k v_k of numbers that nearly cancel, against fractions: the roundings cover all that floats lose."""
    draw = np.random.default_rng(7)
    for _ in range(500):
        slopes = draw.standard_normal((terms, 1))
        seen = draw.standard_normal((terms, 1))
        seen[-1] = -(slopes[:-1] * seen[:-1]).sum() / slopes[-1] * (1.0 + draw.choice([0.0, 1e-16, 1e-9, 0.3]))
        exact = sum(Fraction(float(u)) * Fraction(float(v)) for u, v in zip(slopes[:, 0], seen[:, 0], strict=True))
        held = DenseTerms(*([torch.from_numpy(each)[None] for each in parts] for parts in (slopes, seen)), False)
        assert Fraction(float(held.norm_bounds().norm)) ** 2 * (1 + Fraction(1, 2**50)) >= exact**2
