"""Numbers that floating point cannot hold are refused before a plan exists, in simulations and by guards alike."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import (
    Estimator,
    LinearWeights,
    PlainGradient,
    RecursiveGradient,
    Round,
    SplitClipping,
    SplitGradient,
    VarianceReducedGradient,
)
from fedpriv.loss.features import AugmentedView
from fedpriv.loss.objective import Batch, BatchLayout, Increment, Objective, Query, View
from fedpriv.noise.trust import Noise, NoiseSource
from fedpriv.papers.table import ALGORITHMS, add_algorithm
from fedpriv.participation.orders import Dependence, FixedOrder
from fedpriv.plan.calibration import check_clips, check_noise, check_sums, make_message_grid, make_workload
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.schema import Cell

MakeCell = Callable[..., Cell]


def planned(make: MakeCell, **overrides: Any) -> Plan:
    cell = make(**overrides)
    return make_plan(cell, load_task(cell).objective)


@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"algorithm__clip": 1.6e-44}, "clipped to norm 1.6e-44"),
        ({"algorithm__clip": 2.0**-41}, "clips between"),
        ({"algorithm__clip": 2.0**41}, "clips between"),
        ({"privacy__rho": 1e12}, "sums of up to|do not fit on a grid|too many"),
        ({"privacy__rho": 1e-300}, "standard deviation"),
    ],
)
def test_clip_norms_and_noise_that_floating_point_rounds_away_are_refused(
    small_cell: MakeCell, trust: str, dtype: str, overrides: dict[str, Any], line: str
) -> None:
    """A clip of 1.6e-44 once gave contributions of 3.5 clips, and noise below it was rounded to zero."""
    with pytest.raises(InputError, match=line) as refused:
        planned(small_cell, algorithm__trust=trust, run__dtype=dtype, **overrides)
    assert "\n" not in str(refused.value)


def test_clip_norms_between_2_to_the_minus_40_and_2_to_the_40_are_accepted(small_cell: MakeCell) -> None:
    for clip in (2.0**-40, 1.0, 2.0**40):
        assert planned(small_cell, algorithm__clip=clip).noise.sources


def test_federated_averaging_without_privacy_is_planned_without_noise_or_clip(small_cell: MakeCell) -> None:
    tree = {"name": "fedavg", "step": 0.1, "local_batch": 2, "trust": "untrusted"}
    plan = planned(small_cell, algorithm=tree, privacy={"relation": "replace-one", "mode": "none"})
    assert not plan.noise.sources


@pytest.mark.parametrize("clip", [0.0, -1.0, 1e-320, 2.0**-41, 2.0**41, math.inf, math.nan])
def test_an_extreme_clip_norm_of_any_part_of_a_round_is_refused(clip: float) -> None:
    with pytest.raises(InputError, match="round 7"):
        check_clips([Round(7, (1.0,), 0.0, clip, 1.0)], 1, is_private=True)
    for split in (SplitClipping(2, 0.5, clip, 1.0), SplitClipping(2, 0.5, 1.0, clip)):
        with pytest.raises(InputError, match="round 7"):
            check_clips([Round(7, (1.0,), 0.0, 1.0, 1.0, split)], 1, is_private=True)


def test_a_batch_too_large_for_its_clip_norm_is_refused() -> None:
    for batch in (1, 10**6, 2**30):
        check_clips([Round(1, (1.0,), 0.0, 2.0**-40, 1.0)], batch, is_private=True)
    with pytest.raises(InputError, match=f"batch of {2**30 + 1} records"):
        check_clips([Round(1, (1.0,), 0.0, 2.0**-40, 1.0)], 2**30 + 1, is_private=True)
    with pytest.raises(InputError, match="batch of 10000000000 records"):
        check_clips([Round(1, (1.0,), 0.0, 2.0**-40, 1.0)], 10**10, is_private=True)


@pytest.mark.parametrize("std", [0.0, 1e-320, 1e-45, 2.0**-101, 2.0**101, math.inf, math.nan])
def test_a_noise_source_with_an_extreme_standard_deviation_is_refused(std: float) -> None:
    """Noise of standard deviation 0 in a trust setting that asks for noise would release the sums."""
    with pytest.raises(InputError, match="standard deviation"):
        check_noise(Noise((NoiseSource(0, 1.0, 0.5), NoiseSource(1, std, 0.5))))


def test_noise_between_the_smallest_and_largest_supported_deviation_is_accepted() -> None:
    check_noise(Noise(tuple(NoiseSource(party, 2.0**power, 0.25) for party, power in enumerate((-100, 0, 100)))))


def test_sums_above_2_to_the_30_standard_deviations_of_noise_are_refused() -> None:
    noise = Noise((NoiseSource(0, 0.5, 1.0),))
    check_sums(noise, 2.0**29, 1.0)
    with pytest.raises(InputError, match="sums of up to"):
        check_sums(noise, 2.0**29, 0.5)
    for largest in (2.0**29 * (1 + 1e-15), math.inf, math.nan):
        with pytest.raises(InputError, match="sums of up to"):
            check_sums(noise, largest, 1.0)


def test_the_rounding_unit_of_masked_messages_follows_the_smallest_noise_of_a_silo(small_cell: MakeCell) -> None:
    """The unit is 2^-12 of it at most for 24 digits of float32, so that rounding adds next to nothing to any."""
    cell = small_cell(algorithm__trust="secure-aggregation", run__dtype="float32")
    least, most = NoiseSource(0, 0.5, 0.5), NoiseSource(1, 64.0, 0.5)
    for sources in ((least, most), (most, least), (least, least)):
        assert make_message_grid(cell, Noise(sources), 1.0).unit == 0.25 * 2.0**-12


def test_sums_are_checked_against_the_smallest_noise_of_several_parts(small_cell: MakeCell) -> None:
    """Parts clipped to 1e-12 beside others of 1e12: the noise of the small ones would be lost in the sum."""
    parts = {"name": "momentum-tree-aligned", "trust": "untrusted", "alpha": 0.5, "step": 0.1, "clip": 1e12}
    rest = {
        "federation": {"silos": 3, "rounds": 20, "epochs": 4, "samples": 75},
        "privacy": {"relation": "replace-one", "mu": 4.0},
    }
    alike = {**parts, "difference_clip": 1.0, "residual_clip": 1.0}
    assert planned(small_cell, algorithm=alike, **rest).noise.sources
    apart = {**alike, "residual_clip": 1e-11}
    with pytest.raises(InputError, match="sums of up to"):
        planned(small_cell, algorithm=apart, **rest)


@dataclasses.dataclass(frozen=True)
class Fading(PlainGradient):
    """A user's estimator whose rounds decay otherwise than it says."""

    late_decay: float = math.nan

    def round(self, t: int) -> Round:
        plain = super().round(t)
        return plain if t < 4 else plain._replace(decay=self.late_decay)


@pytest.fixture
def rows() -> Iterator[None]:
    before = dict(ALGORITHMS)
    yield
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


@pytest.mark.parametrize(
    ("estimator", "line"),
    [
        (PlainGradient(1.0, decay=1.0, period=2), "running sum of round 3 has decay = 1, .* calibrated for 0;"),
        (PlainGradient(1.0, decay=0.5, period=1), "running sum of round 2 has decay = 0.5, .* calibrated for 0;"),
        (Fading(1.0, decay=0.5, late_decay=1.0), "running sum of round 4 has decay = 1, .* calibrated for 0.5;"),
        (Fading(1.0, decay=0.5), "running sum of round 4 has decay = nan, .* calibrated for 0.5;"),
    ],
)
def test_running_sums_with_another_decay_than_the_calibrated_decay_are_refused(
    small_cell: MakeCell, rows: None, estimator: Estimator, line: str
) -> None:
    """Guarantee of `make_workload`.  Sums that never restarted were once charged as sums that restart."""
    add_algorithm(dataclasses.replace(ALGORITHMS["dp-ftrl"], name="own-sums", estimator=lambda *_: estimator))
    algorithm = {"name": "own-sums", "trust": "untrusted", "clip": 1.0, "step": 0.1, "mechanism": "tree"}
    with pytest.raises(InputError, match=line) as refused:
        planned(small_cell, algorithm=algorithm, privacy={"relation": "zero-out", "mu": 1.0})
    assert "\n" not in str(refused.value)


@dataclasses.dataclass(frozen=True)
class Alternating(View):
    """Gradients whose sign follows from the round, which it declares."""

    sign: float = 1.0
    dependence = Dependence.RECORD | Dependence.ROUND

    def for_batch(self, slots: BatchLayout) -> "Alternating":
        return dataclasses.replace(self, sign=(-1.0) ** slots.t)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        signed = query._replace(coefficients=[self.sign * each for each in query.coefficients])
        return self.base.increment(signed, batch, clip)


def test_gradients_that_change_with_the_round_are_refused_with_noise_that_rests_on_how_far_queries_move(
    small_cell: MakeCell, rows: None
) -> None:
    """At equal queries they are two clips apart between rounds, where smoothness was charged: next to nothing."""
    reduced = ALGORITHMS["momentum-tree-reduced"]
    add_algorithm(
        dataclasses.replace(reduced, name="own-rounds", objective=lambda _s, _p, loss: Alternating(loss))
    )
    sections: dict[str, Any] = {
        "privacy": {"relation": "zero-out", "mu": 1.0},
        "federation": {"silos": 2, "rounds": 8, "epochs": 2, "batch": 2},
    }
    algorithm = {"trust": "untrusted", "clip": 1.0, "step": 0.001}
    assert planned(small_cell, algorithm={**algorithm, "name": reduced.name}, **sections).noise.sources
    with pytest.raises(InputError, match=r"own-rounds: .* how far queries move, and gradients here") as refused:
        planned(small_cell, algorithm={**algorithm, "name": "own-rounds"}, **sections)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["momentum-tree-reduced", "phased-sgd"])
def test_assumptions_beyond_clipping_are_believed_of_no_row_with_parts_of_its_own(
    small_cell: MakeCell, rows: None, name: str
) -> None:
    """With 50 times the gradient, increments moved 50 times as far between rounds as was charged for."""
    row = ALGORITHMS[name]

    def louder(settings: Any, problem: Any) -> Estimator:
        plain = cast(Any, row.estimator(settings, problem))
        return dataclasses.replace(plain, coefficient=50.0 * plain.coefficient)

    add_algorithm(dataclasses.replace(row, name="own-louder", estimator=louder))
    sections: dict[str, Any] = {
        "privacy": {"relation": "zero-out", "mu": 1.0},
        "model": {"name": "softmax-regression", "feature_norm": 1.0},
    }
    algorithm: dict[str, Any] = {"trust": "curator", "radius": 1.0, "step": 0.001}
    if name == "momentum-tree-reduced":
        algorithm = {"trust": "untrusted", "clip": 1.0, "step": 0.001}
        sections["federation"] = {"silos": 2, "rounds": 8, "epochs": 2, "batch": 2}
    assert planned(small_cell, algorithm={**algorithm, "name": name}, **sections).noise.sources
    with pytest.raises(InputError, match=r"own-louder: .* rests on more than clipping") as refused:
        planned(small_cell, algorithm={**algorithm, "name": "own-louder"}, **sections)
    assert "\n" not in str(refused.value)


def test_a_rows_own_kind_of_public_order_is_refused(small_cell: MakeCell, rows: None) -> None:
    """Its rounds are charged as those of the class that it is made from: one batch in 8 rounds, claimed as one."""

    @dataclasses.dataclass(frozen=True)
    class SameBatch(FixedOrder):
        def batches(self, t: int) -> range:
            return range(1)

    def same_batch(_settings: Any, declared: FixedOrder) -> FixedOrder:
        return SameBatch(declared.rounds, declared.rounds_per_epoch)

    add_algorithm(dataclasses.replace(ALGORITHMS["dp-sgd"], name="own-order", schedule=same_batch))
    algorithm = {"name": "own-order", "trust": "untrusted", "clip": 1.0, "step": 0.1}
    with pytest.raises(
        InputError, match="own-order reads records in an order of its own class, SameBatch"
    ) as refused:
        planned(small_cell, algorithm=algorithm, privacy={"relation": "zero-out", "mu": 1.0})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("trust", ["trusted", "secure-aggregation"])
def test_local_steps_from_releases_without_noise_of_their_own_are_refused(
    small_cell: MakeCell, rows: None, trust: str
) -> None:
    """One record moved the increments of all others: 2.3 σ in two rounds of 50 records, claimed as μ = 1."""
    local = ALGORITHMS["local-dp-sgd"]
    add_algorithm(dataclasses.replace(local, name="own-local", trusts=("untrusted", trust)))
    privacy = {"relation": "zero-out", "mu": 1.0}
    algorithm = {"name": "own-local", "clip": 1.0, "step": 0.1, "local_steps": 2}
    assert planned(small_cell, algorithm={**algorithm, "trust": "untrusted"}, privacy=privacy).noise.sources
    with pytest.raises(InputError, match="silos of own-local step from what they released") as refused:
        planned(small_cell, algorithm={**algorithm, "trust": trust}, privacy=privacy)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
def test_queries_between_the_ends_of_phases_are_broadcast_by_no_trust_setting(
    small_cell: MakeCell, rows: None, trust: str
) -> None:
    """They have no noise, and a claim on everyone who sees a query was made of them."""
    add_algorithm(dataclasses.replace(ALGORITHMS["phased-sgd"], name="own-phases", trusts=("curator", trust)))
    sections: dict[str, Any] = {
        "privacy": {"relation": "zero-out", "mu": 1.0},
        "model": {"name": "softmax-regression", "feature_norm": 1.0},
    }
    algorithm = {"name": "own-phases", "step": 0.01, "radius": 1.0}
    assert planned(small_cell, algorithm={**algorithm, "trust": "curator"}, **sections).noise.sources
    with pytest.raises(InputError, match="only what ends a phase is private") as refused:
        planned(small_cell, algorithm={**algorithm, "trust": trust}, **sections)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("first", [True, False])
def test_parts_of_an_increment_that_the_noise_is_not_charged_for_are_refused(
    small_cell: MakeCell, rows: None, first: bool
) -> None:
    """Differences clipped to 50 were charged for the clip of the gradient, 1; so if only some rounds have them."""

    @dataclasses.dataclass(frozen=True)
    class LateParts(SplitGradient):
        def round(self, t: int) -> Round:
            return super().round(t) if first or t > 1 else super().round(t)._replace(split=None)

    estimator = LateParts(1.0, 50.0, 50.0, 0.5, 4)
    add_algorithm(dataclasses.replace(ALGORITHMS["dp-sgd"], name="own-parts", estimator=lambda *_: estimator))
    algorithm = {"name": "own-parts", "trust": "untrusted", "clip": 1.0, "step": 0.1}
    with pytest.raises(InputError, match="own-parts: independent noise is for increments that are clipped as a"):
        planned(small_cell, algorithm=algorithm, privacy={"relation": "zero-out", "mu": 1.0})


def test_parts_that_are_mixed_with_other_weights_than_those_of_the_noise_are_refused(
    small_cell: MakeCell, rows: None
) -> None:
    """With γ = 0 in the sums alone, whole parts of earlier epochs were released under a part of their noise."""
    aligned = ALGORITHMS["momentum-tree-aligned"]

    def unmixed(settings: Any, problem: Any) -> Estimator:
        return dataclasses.replace(cast(Any, aligned.estimator(settings, problem)), mixing=0.0)

    add_algorithm(dataclasses.replace(aligned, name="own-mixture", estimator=unmixed))
    sections: dict[str, Any] = {
        "privacy": {"relation": "zero-out", "mu": 1.0},
        "federation": {"silos": 2, "rounds": 8, "epochs": 2, "batch": 2},
    }
    algorithm = {"trust": "untrusted", "clip": 1.0, "difference_clip": 0.5, "residual_clip": 0.5, "step": 0.1}
    with pytest.raises(InputError, match=r"own-mixture: .* rests on more than clipping"):
        planned(small_cell, algorithm={**algorithm, "name": "own-mixture"}, **sections)


def test_parts_clipped_to_other_norms_than_the_trees_are_charged_for_are_refused(
    small_cell: MakeCell, rows: None
) -> None:
    aligned = ALGORITHMS["momentum-tree-aligned"]

    def wider(settings: Any, problem: Any) -> Estimator:
        estimator = aligned.estimator(settings, problem)
        return dataclasses.replace(cast(Any, estimator), difference_clip=50.0)

    add_algorithm(dataclasses.replace(aligned, name="own-wider", estimator=wider))
    sections: dict[str, Any] = {
        "privacy": {"relation": "zero-out", "mu": 1.0},
        "federation": {"silos": 2, "rounds": 8, "epochs": 2, "batch": 2},
    }
    algorithm = {"trust": "untrusted", "clip": 1.0, "difference_clip": 0.5, "residual_clip": 0.5, "step": 0.1}
    assert planned(small_cell, algorithm={**algorithm, "name": aligned.name}, **sections).noise.sources
    with pytest.raises(InputError, match="clipped in parts, to its own norms"):
        planned(small_cell, algorithm={**algorithm, "name": "own-wider"}, **sections)


def test_an_algorithm_that_ignores_augmented_copies_of_records_is_refused(
    small_cell: MakeCell, rows: None
) -> None:
    """An objective of its own, without the view of the copies that the scenario asks for."""

    def without_copies(_settings: Any, _problem: Any, objective: Objective) -> Objective:
        return objective.base if isinstance(objective, AugmentedView) else objective

    add_algorithm(dataclasses.replace(ALGORITHMS["dp-sgd"], name="own-sgd", objective=without_copies))
    algorithm = {"name": "own-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1}
    sections: dict[str, Any] = {"algorithm": algorithm, "privacy": {"relation": "zero-out", "mu": 1.0}}
    model = {"name": "mlp", "hidden": 4}
    assert planned(small_cell, model=model, **sections).noise.sources
    with pytest.raises(InputError, match=r"model\.augment: own-sgd takes records apart in its own way"):
        planned(small_cell, model={**model, "augment": {"copies": 2, "shift": 1}}, **sections)


def test_running_sums_with_their_calibrated_decay_and_restart_period_are_accepted() -> None:
    """The decay of round 1 is of no sum, and a period beyond the run restarts nothing."""
    order = FixedOrder(rounds=6, rounds_per_epoch=6)
    recursive = RecursiveGradient(1.0, weights=LinearWeights())
    periods = [make_workload(VarianceReducedGradient(1.0, 1.0, period), order).period for period in (1, 3, 6)]
    assert periods == [1, 3, 6]
    for estimator in (recursive, PlainGradient(1.0, decay=0.5), PlainGradient(1.0, decay=1.0, period=6)):
        assert make_workload(estimator, order).decay == estimator.decay
