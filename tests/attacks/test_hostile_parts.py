"""Parts of one's own around which a plan was calibrated for other numbers than its run had, or for other vectors.

Each test names what the claim fell short by.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import fedpriv
from fedpriv.core.errors import InputError
from fedpriv.core.replicates import SHARED, Scalar, stack, stack_signature
from fedpriv.loss.estimators import PlainGradient, Round, SplitClipping, make_rounds
from fedpriv.loss.models import MODELS, add_model
from fedpriv.loss.objective import (
    Batch,
    Deterministic,
    Increment,
    ModelEvaluation,
    Objective,
    Query,
    Records,
    View,
)
from fedpriv.loss.rows import ColumnMoments
from fedpriv.noise.diagonal import ScheduledGaussian
from fedpriv.noise.mechanism import MechanismState, Sensitivity
from fedpriv.noise.registry import USER_MECHANISMS, add_mechanism, check_mechanism_claims, check_readable
from fedpriv.noise.series import Workload
from fedpriv.papers.table import ALGORITHMS
from fedpriv.participation.orders import Dependence, declared_dependence
from fedpriv.plan.evaluation import make_evaluation_plan
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from tests.conftest import small_tree
from tests.noise.integers.members import workload_of
from tests.noise.own import Echo

SGD = {"trust": "untrusted", "clip": 1.0, "step": 1.0}


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    tables: tuple[dict[str, Any], ...] = (USER_MECHANISMS, ALGORITHMS, MODELS)
    before = [dict(table) for table in tables]
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


def planned(base: str = "dp-sgd", tree: dict[str, Any] | None = None, **parts: Any) -> Plan:
    """The plan of a row with parts of one's own, which is `base` in all others."""
    fedpriv.add_algorithm(dataclasses.replace(ALGORITHMS[base], name="own", **parts))
    sections = {"algorithm": {**SGD, "name": "own"}, "privacy": {"relation": "replace-one", "mu": 1.0}}
    cell = resolve_cell(small_tree(**{**sections, **(tree or {})}), "test")
    return make_plan(cell, load_task(cell).objective)


class Settled(PlainGradient):
    """Rounds that stay what round 3 is, its number included."""

    def round(self, t: int) -> Round:
        return super().round(min(t, 3))


def test_guarantee_no_two_rounds_have_one_number_and_so_the_same_noise() -> None:
    """Gains: the difference of two releases without any noise, as silos drew the noise of round 3 again."""
    assert [record.t for record in make_rounds(Settled(1.0), 5)] == [1, 2, 3, 4, 5]
    plan = planned(estimator=lambda settings, _: Settled(settings.clip))
    assert [planned_round.step.t for planned_round in plan.rounds] == list(range(1, 9))


class WholeInWords(Round):
    """A round that hides from a plan that its increments are clipped in parts."""

    @property
    def clips(self) -> tuple[float, ...]:
        return (float(self.clip),)


class PartsInDisguise(PlainGradient):
    def round(self, t: int) -> Round:
        return WholeInWords(*super().round(t)._replace(split=SplitClipping(8, 0.5, 100.0, 100.0)))


def test_guarantee_the_clips_of_a_round_are_those_that_its_increments_have() -> None:
    with pytest.raises(InputError, match="noise is for increments that are clipped as a whole"):
        planned(estimator=lambda settings, _: PartsInDisguise(settings.clip))


@dataclass(frozen=True)
class Bare(Deterministic):
    """A loss with what the page asks for, and so without `per_record`."""

    inner: Any
    lipschitz = smoothness = math.inf

    @property
    def dimension(self) -> int:
        return int(self.inner.dimension)

    def initial(self) -> Tensor:
        start: Tensor = self.inner.initial()
        return start

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        increment: Increment = self.inner.increment(query, batch, clip)
        return increment

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        evaluation: ModelEvaluation = self.inner.evaluate(point, records)
        return evaluation


@dataclass(frozen=True)
class Sure(View):
    dependence = Dependence.RECORD


def test_guarantee_no_wrapper_hides_the_undeclared_dependence_of_a_loss_without_per_record() -> None:
    """Gains: everything, as a loss that declares nothing may add what other records say."""
    assert Dependence.UNKNOWN in declared_dependence(Sure(Bare(None)))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"does not go with Bare, .* does not declare"):
        planned(objective=lambda _settings, _problem, loss: Sure(Bare(loss)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Narrow(Bare):
    dependence = Dependence.RECORD

    @property
    def dimension(self) -> int:
        return 1


def test_guarantee_noise_has_as_many_values_as_what_it_hides() -> None:
    """Gains: all differences of coordinates without noise, as one number was added to 7,850 of them."""
    with pytest.raises(InputError, match=r"x_1 has another shape than \(1,\), in which noise is drawn"):
        planned(objective=lambda _settings, _problem, loss: Narrow(loss))


def signed(images: NDArray[Any], dtype: torch.dtype, _settings: Any) -> Tensor:
    """Features of both signs, unlike moments."""
    pixels = torch.from_numpy(images.astype(np.float64)).flatten(1)[:, :4].to(dtype)
    return torch.cat([pixels, -pixels], dim=1)


def moments(_settings: Any, _problem: Any, loss: Objective) -> Objective:
    return ColumnMoments(loss.dimension, 1.0, dtype=torch.float64)


def test_guarantee_a_proof_of_close_increments_is_not_used_for_features_of_ones_own() -> None:
    """Gains: μ = 1.10 in place of 1, as opposite increments are 2 clips apart and were charged 1.81."""
    one_round = {"federation": {"silos": 3, "rounds": 1}}
    add_model("own-moments", dataclasses.replace(MODELS["column-moments"], features=signed, evaluated=True))
    found = planned(tree={**one_round, "model": {"name": "own-moments", "columns": (0, 1)}})
    assert isinstance(found.objective, ColumnMoments)
    assert found.increment_diameter == 2.0
    assert planned(tree=one_round, objective=moments).increment_diameter == 2.0


def test_guarantee_silos_that_step_by_themselves_add_the_noise_that_is_charged() -> None:
    """Gains: μ = 100 in place of 1, as the vectorized engine's silos added fresh noise without its sizes."""
    with pytest.raises(InputError, match="silos step from each release by itself, whose noise is independent"):
        planned(
            "local-dp-sgd",
            {"algorithm": {**SGD, "name": "own", "local_steps": 2}},
            mechanism=lambda _settings, _problem, workload: ScheduledGaussian((100.0,) * workload.rounds, 0.0),
        )


class Raised(PlainGradient):
    """An estimator with an attribute that no field gives, and that a copy has not."""

    raised: float

    def __init__(self, clip: Scalar, coefficient: float = 1.0, decay: float = 0.0, period: int | None = None,
                 memory: int = 1, raised: float = 1.0) -> None:  # fmt: skip
        super().__init__(clip, coefficient, decay, period, memory)
        object.__setattr__(self, "raised", raised)

    def round(self, t: int) -> Round:
        plain = super().round(t)
        return plain._replace(clip=plain.clip * self.raised)


class HiddenInSlot(Raised):
    """The same attribute, in no dictionary."""

    __slots__ = ("raised",)


def test_guarantee_runs_that_are_computed_together_have_the_clips_that_they_were_planned_with() -> None:
    """Gains: μ = 100 in place of 1, as a copy for two clips had `raised` = 1 and the noise was for 0.01."""
    parts = [Raised(clip, raised=0.01) for clip in (1.0, 2.0)]
    assert stack_signature(parts[0]) != stack_signature(parts[1])
    assert stack_signature(parts[0]) != stack_signature(Raised(1.0, raised=0.01))
    assert stack(parts[:1], torch.float64, torch.device("cpu")) is parts[0]
    hidden = [HiddenInSlot(clip, raised=0.01) for clip in (1.0, 2.0)]
    assert stack_signature(hidden[0]) != stack_signature(hidden[1])
    plain = [PlainGradient(clip) for clip in (1.0, 2.0)]
    assert stack_signature(plain[0]) == stack_signature(plain[1])


class Louder(Echo):
    """A mechanism whose factor of the noise is not in what a ledger stores."""

    name = "louder"
    factor: float

    def __init__(self, decay: float = 1.0, share: float = 0.25, factor: float = 1.0) -> None:
        super().__init__(decay, share)
        object.__setattr__(self, "factor", factor)

    def certified(self, workload: Workload) -> Sensitivity:
        plain = super().certified(workload)
        return plain._replace(value=plain.value / self.factor)

    @property
    def fresh_std(self) -> float:
        return self.factor

    def noise(self, state: MechanismState, t: int, fresh: Tensor) -> tuple[Tensor, MechanismState]:
        return super().noise(state, t, self.factor * fresh)


@dataclass(frozen=True, slots=True)
class Slotted:
    step: float


def test_parts_without_a_dictionary_are_computed_together() -> None:
    assert stack_signature(Slotted(1.0)) == stack_signature(Slotted(2.0))
    stacked: Any = stack([Slotted(1.0), Slotted(2.0)], torch.float64, torch.device("cpu"))
    assert stacked.step.tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_guarantee_a_mechanism_that_is_read_back_with_another_certificate_is_refused(factor: float) -> None:
    """Gains: 10 times the claim, as a run or its record had the factor 1."""
    add_mechanism(Louder)
    check_mechanism_claims(Louder(factor=factor), workload_of(8, 1.0))
    check_readable(Louder(), workload_of(8, 1.0), "own")
    with pytest.raises(InputError, match=r"what it writes \(as_data\) is not what it is read as"):
        check_readable(Louder(factor=factor), workload_of(8, 1.0), "own")


@dataclass(frozen=True)
class Unequal(Echo):
    """A mechanism that equals others with more noise, and certifies all of them alike."""

    factor: float = field(default=1.0, compare=False, metadata=SHARED)

    @property
    def fresh_std(self) -> float:
        return self.factor

    def noise(self, state: MechanismState, t: int, fresh: Tensor) -> tuple[Tensor, MechanismState]:
        return super().noise(state, t, self.factor * fresh)


def test_guarantee_the_noise_of_every_mechanism_is_measured_also_of_those_that_count_as_equal() -> None:
    """Gains: 10 times the claim, as the noise of the first of them was not measured again."""
    check_mechanism_claims(Unequal(), workload_of(8, 1.0))
    with pytest.raises(InputError, match="its certificate says"):
        check_mechanism_claims(Unequal(factor=0.1), workload_of(8, 1.0))


class Mixing(View):
    """A loss that says that other records of a batch, such as those of one person, enter each record's loss."""

    dependence = Dependence.RECORD | Dependence.BATCH


def test_guarantee_a_loss_that_mixes_records_is_not_evaluated_with_noise_for_single_ones() -> None:
    """Gains: all test records move with one of them, as scores said to depend on their own record alone."""
    cell = resolve_cell(small_tree(evaluation={"records": 30, "mu": 1.0}), "test")
    loss = load_task(cell).objective
    assert make_evaluation_plan(cell, loss) is not None
    with pytest.raises(InputError, match=r"does not go with .*, .* depends on other records of the batch"):
        make_evaluation_plan(cell, Mixing(loss))
