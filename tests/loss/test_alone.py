"""One record computed by itself: the same bits for it whoever else is there, on every way that a record takes."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.loss import features as backbone
from fedpriv.loss.alone import evaluate_per_record, map_records
from fedpriv.loss.features import compute_frozen_features, orientation_histograms, pixel_features, scale_to_norm
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.linear import LogisticRegression
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.models import LinearSettings, compute_features_and_bias
from fedpriv.loss.module import ModuleObjective
from fedpriv.loss.objective import Objective, Query, Records, View
from fedpriv.loss.rows import ColumnMoments, MomentSettings, moment_features
from fedpriv.loss.scores import make_summed_scores
from fedpriv.loss.views import PerUnit
from fedpriv.noise.integers.increments import sum_integer_increments
from fedpriv.plan.plan import make_plan
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.silo import Silo
from tests.conftest import small_tree
from tests.disordered import disordered
from tests.loss import zoo
from tests.loss.builders import F32, NORM, Patch

COUNT, WIDE, LAST = 11, 6, 13
LABELS = torch.arange(COUNT) % 2
Sums = Callable[[Tensor, Tensor], Tensor]


def hostile(seed: int = 3) -> Tensor:
    """Records of which some raise, overflow or are not finite in `zoo.Fragile`."""
    features = torch.from_numpy(np.random.default_rng(seed).standard_normal((COUNT, WIDE))).float()
    features[2, 1], features[5, 0], features[7, 3], features[9, 2] = 50.0, -20.0, 1e30, torch.nan
    features[8] = torch.inf
    return features


def sums(objective: Objective, large: float) -> Sums:
    """Sums of integers at a point whose last values, those of the last layer, are up to `large`."""
    point = objective.base.initial() if isinstance(objective, View) else objective.initial()
    point[-LAST:] += large * torch.linspace(-1.0, 1.0, len(point))[-LAST:]
    return lambda features, labels: torch.from_numpy(
        sum_integer_increments(objective, Query([point]), 1.0, Records(features, labels), NORM, float(NORM))
    )


def persons(large: float) -> Sums:
    """Each row is a person's two records, itself and a public one."""
    compute = sums(PerUnit(fragile(), 2), large)
    return lambda features, labels: compute(
        torch.stack([features, torch.ones_like(features)], 1), torch.stack([labels, labels.clamp(max=0)], 1)
    )


def unclipped(objective: Objective) -> Sums:
    """Of increments that keep the last bits of their slopes: a clip takes them away."""
    compute = sums(objective, 1.0)
    return lambda features, labels: compute(0.1 * features, labels)


def moments_sums(features: Tensor, labels: Tensor) -> Tensor:
    moments = moment_features(features.numpy(), torch.float64, MomentSettings(columns=(0, 1, 2, 3)))
    return sums(ColumnMoments(8, 1.0), 0.0)(moments, labels)


def scores(made: Callable[[], Objective], large: float) -> Sums:
    return sums(make_summed_scores(made(), 4.0, classes=True), large)


def fragile() -> ModuleObjective:
    return ModuleObjective(zoo.Fragile(WIDE, 2), CrossEntropy(), 0)


def dense() -> Objective:
    module = nn.Sequential(nn.Linear(WIDE, 5), nn.Tanh(), nn.Linear(5, 2))
    return make_module_objective(module, WIDE, CrossEntropy(), 0)


ADDED = {
    "training": sums(fragile(), 1.0),
    "training, amplified": sums(fragile(), 2.0**20),
    "training in closed form, amplified": sums(dense(), 2.0**20),
    "logistic regression": unclipped(LogisticRegression(WIDE, 3.0, dtype=F32)),
    "persons, amplified": persons(2.0**10),
    "evaluation": scores(fragile, 1.0),
    "evaluation, amplified": scores(fragile, 2.0**20),
    "evaluation in closed form, amplified": scores(dense, 2.0**20),
    "moments": moments_sums,
}
"""Ways that end in a sum: (features, labels) → integers."""


def frozen(features: Tensor) -> Tensor:
    arguments = {"features": WIDE, "outputs": 4}
    return compute_frozen_features(features, f"{zoo.__name__}:Fragile", arguments, "kept", ())


def images(features: Tensor) -> NDArray[np.uint8]:
    drawn = [np.resize(np.frombuffer(row.tobytes(), np.uint8), (12, 12)) for row in features.numpy()]
    return np.array(drawn, np.uint8).reshape(-1, 12, 12)


def test_no_images_have_no_pixels() -> None:
    for kind in (np.uint8, np.float64, np.uint16):
        assert pixel_features(np.zeros((0, 28, 28), kind), F32).shape == (0, 784)


MAPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "frozen features": frozen,
    "pixels": lambda features: pixel_features(images(features), F32),
    "orientations": lambda features: orientation_histograms(images(features), F32),
    "scaled": lambda features: scale_to_norm(features, 1.0, exactly=True),
    "scaled to at most a norm": lambda features: scale_to_norm(features, 1.0, exactly=False),
    "features and a bias": lambda features: compute_features_and_bias(
        features.numpy(), F32, LinearSettings(feature_norm=1.0)
    ),
}
"""Ways that end in a row a record."""


@pytest.fixture(autouse=True)
def weights(monkeypatch: Patch) -> None:
    """Any frozen module, as if its weights were on this disk."""
    torch.manual_seed(0)
    module = zoo.Fragile(WIDE, 4)
    monkeypatch.setattr(backbone, "_load_module", lambda *_: module)


@pytest.fixture(params=["this processor", "disordered"])
def processor(request: pytest.FixtureRequest) -> Iterator[None]:
    """This machine's products, and those of one whose sums depend on place, size and address."""
    with disordered() if request.param == "disordered" else nullcontext():
        yield


def companies() -> Iterator[list[int]]:
    """Who is there, and in which order: all, without every other one of them, turned around, few, and nobody."""
    everybody = list(range(COUNT))
    yield everybody
    yield everybody[::-1]
    for left in everybody[::2]:
        yield [row for row in everybody if row != left]
    yield from ([4, 2, 0], [8, 1], [5], [])


@pytest.mark.every(20)
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("way", ADDED)
def test_a_records_integers_do_not_depend_on_its_company(way: str) -> None:
    """Guarantee of `sum_integer_increments`: any company's sum is that of its members alone, to the last unit."""
    features, compute = hostile(), ADDED[way]
    alone = [compute(features[row : row + 1], LABELS[row : row + 1]) for row in range(COUNT)]
    assert sum(int(vector.any()) for vector in alone) >= 3
    for company in list(companies())[:: 4 if "persons" in way else 1]:
        expected = sum((alone[row] for row in company), torch.zeros_like(alone[0]))
        assert torch.equal(compute(features[company], LABELS[company]), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("processor")
def test_a_silos_record_moves_its_answer_by_the_same_in_any_company() -> None:
    """The same through a silo as guards and audits have it, whose batch is full whoever is in it."""
    tree = small_tree(
        algorithm={"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "zero-out", "mu": 1.0},
        federation={"silos": 3, "rounds": 1, "batch": COUNT},
        run={"dtype": "float32"},
    )
    objective = fragile()
    plan = make_plan(resolve_cell(tree, "test"), objective, for_release=True)
    query = objective.initial()
    query[-LAST:] *= 2.0**20

    def answer(features: Tensor) -> Tensor:
        silo = Silo.for_release(0, plan, Records(features, LABELS), bytes(31) + b"8", b"")
        release, _ = silo.answer(silo.initial_state(), 1, query)
        return release.vector

    moved = []
    for company in (hostile(), hostile(4), hostile().flip(0).nan_to_num(1.0).clamp(-1.0, 1.0)):
        before, after = company.clone(), company.clone()
        before[7], after[7] = hostile()[2], hostile()[0]  # raises, or does not
        moved.append(answer(after) - answer(before))
    assert moved[0].any()
    assert all(torch.equal(moved[0], other) for other in moved)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("way", MAPPED)
def test_a_records_features_do_not_depend_on_its_company(way: str) -> None:
    """Guarantee of the maps: a row has the same bits wherever it stands, and whoever raises beside it."""
    features, compute = hostile(), MAPPED[way]
    alone = torch.cat([compute(features[row : row + 1]) for row in range(COUNT)])
    assert sum(int(row.isfinite().all() and row.any()) for row in alone) >= 5
    for company in companies():
        assert not company or same_bits(compute(features[company]), alone[company])


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.numpy().tobytes() == other.numpy().tobytes()


def test_whatever_a_record_makes_code_do_stays_with_it() -> None:
    """Guarantee of `evaluate_per_record`: errors, exits, other shapes, draws, writes and modes of gradients."""
    column = torch.arange(28.0).view(4, 7).mT[:, 1:]  # (7, 3), neither contiguous nor aligned
    before, drawn = torch.get_rng_state(), []

    def evaluate(row: Tensor) -> Tensor:
        assert row.shape == (1, 3)
        assert row.is_contiguous()
        assert row.data_ptr() % 64 == 0
        assert not torch.is_grad_enabled()
        number = int(row[0, 0]) - 7
        row.mul_(2.0)
        match number:
            case 0:
                raise RuntimeError
            case 1:
                raise SystemExit
            case 2:
                torch.set_grad_enabled(True)
                return torch.zeros(2, 3)
            case 3:
                return None  # type: ignore[return-value]
        drawn.append(torch.rand(1))
        return row + drawn[-1]

    result = list(evaluate_per_record(evaluate, (column,), torch.full((1, 3), -1.0)))
    assert [row.tolist() for row in result[:4]] == [[[-1.0] * 3]] * 4
    for place in (4, 5, 6):
        assert torch.equal(result[place], 2.0 * column[place : place + 1] + drawn[0])
        assert result[place].data_ptr() % 64 == 0
    assert drawn == [torch.rand(1, generator=torch.Generator().manual_seed(0))] * 3
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(column, torch.arange(28.0).view(4, 7).mT[:, 1:])


def test_an_interrupt_is_not_a_failing_record() -> None:
    def interrupted(_: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(evaluate_per_record(interrupted, (torch.zeros(2, 1),), torch.zeros(1, 1)))


@pytest.mark.parametrize("count", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("failing", [False, True])
def test_how_often_code_is_called_says_no_more_than_how_many_records_there_are_or_are_expected(
    count: int, failing: bool
) -> None:
    """Guarantee of `evaluate_per_record`: below `least` records, dummies take their turn and add nothing."""
    values = []

    def evaluate(row: Tensor) -> Tensor:
        values.append(float(row))
        if failing:
            raise FloatingPointError
        return row

    column = torch.arange(1.0, count + 1.0).view(-1, 1)
    result = list(evaluate_per_record(evaluate, (column,), torch.zeros(1, 1), (torch.full((1, 1), 9.0),), 5))
    assert values == [*column.flatten().tolist(), *[9.0] * (5 - count)]
    given = [0.0] * count if failing else column.flatten().tolist()
    assert [float(row) for row in result] == [*given, *[0.0] * (5 - count)]


def test_rows_apart_look_at_no_other_row() -> None:
    """Blocks of simulations: one record that overflows leaves the others' outputs, as in a batch of one."""
    module, features = zoo.Finite(WIDE, 2), hostile().nan_to_num(0.0, 0.0, 0.0).clamp(-9.0, 9.0)
    features[4] = 1e30
    with torch.no_grad():
        together = map_records(module, features)
        alone = torch.cat([module(row.unsqueeze(0)) for row in features])
        assert not torch.allclose(module(features), alone)  # the control: in one batch they meet
    torch.testing.assert_close(together, alone)
