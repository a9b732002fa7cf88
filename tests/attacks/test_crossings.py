"""Every registered thing with every other: what a plan admits keeps its promise to each record, or is refused.

Gains, if a test here fails: a record that was drawn moves what others add, so that no ε that is printed holds; or
a query, a model and an order, each right by itself, add up to more than a unit was promised.

Examples are in `crossing_examples`, their combinations in `crossing_choices`, the checks in `crossings`.  Fast are
a few combinations in which everything is met once; the grids take minutes of a core.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.addons.worth.local_models import LinearHazards
from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar
from fedpriv.engines.table import IndexedOutcome
from fedpriv.engines.vectorized import engine as keeper
from fedpriv.engines.vectorized.checkpoints import Checkpoints
from fedpriv.engines.workers import run_worker
from fedpriv.flower.strategies import RemoteLoss
from fedpriv.loss.models import MODELS, SHIPPED
from fedpriv.loss.objective import (
    Batch,
    BatchLayout,
    Deterministic,
    EvaluationView,
    Increment,
    Objective,
    Query,
    Records,
    View,
)
from fedpriv.loss.views import LocalTraining
from fedpriv.noise.registry import MECHANISMS
from fedpriv.noise.registry import SELECTABLE_MECHANISMS as NOISES
from fedpriv.noise.trust import SECURE_AGGREGATION, TRUSTS, UNITS
from fedpriv.papers.table import ALGORITHMS
from fedpriv.participation import secret
from fedpriv.participation.orders import OWN_FACTS, Dependence
from fedpriv.participation.registry import SELECTABLE_PARTICIPATIONS
from fedpriv.plan.plan import Plan
from fedpriv.rounds.floats import FloatSteps
from fedpriv.rounds.integers import IntegerSteps
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.scenario.sections import RunSection
from tests.attacks import crossing_examples as examples
from tests.attacks.crossing_choices import (
    GRIDS,
    LONG,
    NEVER,
    PARTS,
    Choice,
    Files,
    cell_of,
    fast_choices,
    keys_of,
    part_of,
    plan_crossing,
)
from tests.engines.test_checkpoints import Memory, bits
from tests.engines.test_engines import Recorder, run
from tests.parts import in_parts
from tests.rough import rough_accounting

rough = pytest.fixture(autouse=True, scope="module")(rough_accounting)
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
OF_GRIDS = in_parts(
    itertools.product(GRIDS, range(PARTS)), long=itertools.product(GRIDS, range(1, PARTS))
)  # a part takes half a minute: that with every value is slow, and the others are asked every week


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    """Records and weights of all examples; calibrations that are asked for again are not computed again."""
    folder = tmp_path_factory.mktemp("crossings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPRIV_WEIGHTS", str(folder))
        for name in ("calibrate", "calibrated_poisson"):
            patch.setattr(secret, name, functools.cache(getattr(secret, name)))
        yield examples.write_files(folder)


@dataclass
class Census:
    """What became of some combinations, each with integers and with floats."""

    tried: int = 0
    refusals: list[str] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    """Comparisons, by check."""
    broken: list[str] = field(default_factory=list)
    largest: float = 0.0
    """Of what a unit moved, in parts of what is claimed."""
    classes: set[type] = field(default_factory=set)
    mechanisms: set[str] = field(default_factory=set)

    @property
    def refused(self) -> int:
        return len(self.refusals)

    @property
    def admitted(self) -> int:
        return self.tried - self.refused

    def __str__(self) -> str:
        return (
            f"{self.tried} combinations tried, {self.admitted} admitted, {self.refused} refused, "
            f"{sum(self.compared.values())} comparisons {dict(sorted(self.compared.items()))}, "
            f"largest {self.largest:.9f} of what is claimed"
        )


def census_of(
    choices: Iterable[Choice], files: Files, kinds: Sequence[bool] = (True, False), *, checked: bool = True
) -> Census:
    """Ask the plan of every combination, released (True) and simulated, and check what it admits."""
    census = Census()
    for choice, released in itertools.product(choices, kinds):
        if released and choice.extra in ("arithmetic", "passes"):
            continue  # a release is of integers anyway, and a guard's passes are not rounded
        census.tried += 1
        try:
            crossing = plan_crossing(choice, files, released)
        except InputError as error:
            census.refusals.append(str(error))
            continue
        own = crossing.silo().steps
        assert isinstance(own, FloatSteps | IntegerSteps)
        used = getattr(own, "objective", None) or own.plan.objective  # a simulated silo bounds its increments
        census.classes |= {type(each) for each in parts_of(used)}
        census.mechanisms.add(crossing.plan.mechanism.name)
        if checked:
            crossing.check()
            census.compared += crossing.compared
            census.largest = max(census.largest, crossing.largest)
            kind = "integers" if crossing.is_integer else "floats"
            census.broken += [f"{choice}, {kind}: {line}" for line in crossing.failures]
    return census


def parts_of(objective: Objective) -> Iterator[Objective]:
    """An objective, and those that it is made of."""
    yield objective
    for name in ("base", "copied"):
        if (inner := getattr(objective, name, None)) is not None and isinstance(objective, View):
            yield from parts_of(inner)


# Nobody forgets


@pytest.mark.parametrize(
    ("registered", "known"),
    [
        pytest.param(SHIPPED, examples.MODELS, id="models"),
        pytest.param(ALGORITHMS, examples.ALGORITHMS, id="algorithms"),
        pytest.param([kind.name for kind in NOISES], examples.MECHANISMS, id="mechanisms"),
        pytest.param(SELECTABLE_PARTICIPATIONS, examples.PARTICIPATIONS, id="participations"),
        pytest.param(UNITS, examples.UNITS, id="units"),
        pytest.param(TRUSTS, examples.TRUSTS, id="trust settings"),
        pytest.param(
            RunSection.model_fields, {**examples.RUNS, **dict.fromkeys(examples.SHOWN)}, id="keys of [run]"
        ),
    ],
)
def test_every_registered_component_has_a_test_example(registered: Iterable[str], known: Iterable[str]) -> None:
    assert set(registered) - set(known) == set(), "add an example to tests/attacks/crossing_examples.py"


@pytest.mark.parametrize("model", examples.MODELS)
def test_every_setting_of_a_model_has_a_test_example(model: str) -> None:
    assert set(keys_of(model)) - examples.KEYS.keys() == set(), "add one to KEYS of crossing_examples.py"


# What is admitted keeps its promise


@pytest.mark.every(4)
@pytest.mark.parametrize("choice", fast_choices(), ids=str)
def test_an_admitted_combination_of_components_satisfies_every_privacy_check(choice: Choice, files: Files) -> None:
    """As a silo releases it; as a simulation where it cannot be released, and where its order is secret."""
    censuses = [census_of([choice], files, [True])]
    if censuses[0].refused or SELECTABLE_PARTICIPATIONS[choice.participation].secret:
        censuses.append(census_of([choice], files, [False]))
    assert [census.broken for census in censuses] == len(censuses) * [[]]
    assert any(census.admitted for census in censuses)


@pytest.mark.parametrize(("grid", "part"), OF_GRIDS)
def test_every_admitted_combination_of_the_grids_satisfies_every_privacy_check(
    grid: str, part: int, files: Files
) -> None:
    census = census_of(part_of(grid, part), files)
    print(f"\n{grid}, part {part + 1} of {PARTS}: {census}")
    assert census.broken == []
    assert [line for line in census.refusals if "\n" in line] == []
    assert census.admitted > 0


def test_every_registered_component_occurs_in_the_fast_combinations() -> None:
    met = [set(values) for values in zip(*fast_choices(), strict=True)]
    registered = {
        "model": examples.MODELS.keys() - LONG,
        "algorithm": ALGORITHMS.keys() - NEVER,
        "mechanism": set(examples.MECHANISMS),
        "participation": set(SELECTABLE_PARTICIPATIONS),
        "unit": set(examples.UNITS),
        "trust": set(TRUSTS),
        "relation": set(examples.RELATIONS),
        "beside": set(examples.BESIDE),
    }
    for name, values in registered.items():
        assert values - met[Choice._fields.index(name)] == set(), name


APART = {LinearHazards, LocalTraining, RemoteLoss}
"""What a silo fits for itself, what no noise is calibrated to, and a server's stand-in that sees no record."""


def test_every_test_example_occurs_in_the_grids() -> None:
    met = [set(values) for values in zip(*(choice for grid in GRIDS.values() for choice in grid()), strict=True)]
    for name, values in {
        "key": {key for model in examples.MODELS for key in keys_of(model)},
        "variant": examples.VARIANTS.keys(),
        "extra": examples.RUNS.keys() | examples.ABSENCES.keys(),
        "beside": examples.BESIDE.keys(),
    }.items():
        assert values - met[Choice._fields.index(name)] == set(), name


def subclasses(kind: type) -> set[type]:
    """Those of fedpriv itself, at any distance."""
    near = kind.__subclasses__()
    return {each for each in near if each.__module__.startswith("fedpriv.")}.union(*map(subclasses, near))


@pytest.mark.slow
def test_every_objective_class_and_every_mechanism_occurs_in_an_admitted_plan(files: Files) -> None:
    """Of what is admitted, part by part of all grids until each has occurred.

    The classes that only evaluate, or are the base of others, are left out.
    """
    made = {each for each in subclasses(View) | subclasses(Deterministic) if not each.__subclasses__()}
    missing = {each for each in made - APART if not issubclass(each, EvaluationView)} | set(MECHANISMS)
    for part, grid in itertools.product(range(PARTS), GRIDS):
        if missing:
            census = census_of(part_of(grid, part), files, checked=False)
            missing -= census.classes | census.mechanisms
    assert missing == set()


# Every check turns red


@dataclass(frozen=True)
class ByPlace(View):
    """Increments turned by the place of a record among those that are read, which it does not declare."""

    read: Iterator[int] = field(default_factory=itertools.count, compare=False)
    """Records of this round that it has seen."""

    @property
    def dependence(self) -> Dependence:
        return OWN_FACTS

    def for_batch(self, slots: BatchLayout) -> "ByPlace":
        return replace(self, read=itertools.count())

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        count = len(batch.weights)
        alone = [
            Batch(Records(*(column[b : b + 1] for column in batch.records)), batch.weights[b : b + 1])
            for b in range(count)
        ]
        found = [self.base.increment(query, one, clip) for one in alone]
        total = torch.zeros(self.dimension, dtype=batch.weights.dtype)
        for place, each in enumerate(found):
            total = total + each.total.roll(place)
        return Increment(total, torch.tensor(0))

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        return self.base.per_record(query, batch, rows, clip).roll(next(self.read), 1)


class ByNeighbour(ByPlace):
    """Increments turned by what another record is: of floats, where records meet."""

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        found = self.base.increment(query, batch, clip)
        return found._replace(total=found.total.roll(int(batch.records.features.sum() * 1e6) % 7))


class ByCall(ByPlace):
    """Increments turned by how often it was asked."""

    calls: ClassVar[Iterator[int]] = itertools.count()

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        return self.base.per_record(query, batch, rows, clip).roll(next(self.calls), 1)


def planted(kind: type[View], choice: Choice, files: Files, released: bool, patch: pytest.MonkeyPatch) -> set[str]:
    """The checks that a made-up model breaks, whose increments are softmax regression's in a view of this kind."""
    row, name = MODELS["softmax-regression"], f"planted-{kind.__name__.lower()}"  # tasks are cached by name
    made = replace(row, objective=lambda *given: kind(row.objective(*given)))
    patch.setitem(MODELS, name, made)
    patch.setitem(examples.MODELS, name, examples.Example("pictures", {}))
    crossing = plan_crossing(choice._replace(model=name), files, released).check()
    return {line.partition(":")[0] for line in crossing.failures}


@pytest.mark.every(2)
@pytest.mark.parametrize("released", [True, False])
def test_the_checks_detect_increments_that_depend_on_batch_position(
    files: Files, released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a secret order; in a fixed one places are rows, and it is right."""
    assert planted(ByPlace, Choice(participation="poisson"), files, released, monkeypatch) == {"b"}
    assert planted(ByPlace, Choice(), files, released, monkeypatch) == set()


def test_the_checks_detect_increments_that_depend_on_other_records(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "a" in planted(ByNeighbour, Choice(), files, False, monkeypatch)


def test_the_checks_detect_different_replies_to_a_repeated_query(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "e" in planted(ByCall, Choice(), files, True, monkeypatch)


def test_the_checks_detect_a_record_that_is_read_more_often_than_charged(files: Files) -> None:
    crossing = plan_crossing(Choice("logistic-regression"), files, True)
    rounds = tuple(planned._replace(batch_range=range(1)) for planned in crossing.plan.rounds)
    object.__setattr__(crossing.plan, "rounds", rounds)
    assert {line.partition(":")[0] for line in crossing.check().failures} == {"c"}


def test_the_checks_detect_a_round_that_computes_less_for_an_empty_draw(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plan, "record_capacity", lambda *_: 0)
    crossing = plan_crossing(Choice(participation="poisson"), files, True)
    assert {line.partition(":")[0] for line in crossing.check().failures} == {"d"}


def test_the_checks_detect_a_registered_model_without_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "forgotten", MODELS["mlp"])
    with pytest.raises(AssertionError, match="forgotten"):
        test_every_registered_component_has_a_test_example(MODELS, examples.MODELS)


# Engines


SIDE_BY_SIDE = [
    Choice("mlp", "augment", participation="poisson"),
    Choice("mlp", "augment", participation="allocation", trust="trusted"),
    Choice("mlp", "augment"),
    Choice("softmax-regression", participation="balanced", relation="zero-out"),
    Choice("logistic-regression", algorithm="dp-ftrl", mechanism="banded", participation="poisson"),
    Choice("logistic-regression", algorithm="dp-ftrl", mechanism="tree", trust="secure-aggregation"),
    Choice("logistic-regression", algorithm="goldstein-erm"),
    Choice("logistic-regression", algorithm="dp-sgd", participation="poisson", extra="drop-outs"),
    Choice("logistic-regression", "", "dp-fedadam", "", "", "available", "client of a pool", "trusted"),
    Choice("logistic-regression", "", "dp-fedavg", "", "", "poisson", "client of a pool", "trusted"),
    Choice("logistic-regression", algorithm="local-dp-sgd"),
    Choice("logistic-regression", participation="allocation", unit="user"),
    Choice("logistic-regression", algorithm="local-dp-sgd", participation="poisson", unit="user"),
]  # fmt: skip
"""Of all that could be keyed by who is there: copies, directions, units, pools, silos that are away."""
FIRST_STEP = Choice("column-moments", algorithm="dp-adam", participation="poisson")
"""One round, too few to be resumed; its noise has another seed than its records."""


def replicates(choice: Choice, files: Files) -> list[Cell]:
    """Three seeds, which draw other records and other numbers of them, with clips and noise of their own."""
    cells = []
    for seed in (1, 2, 3):
        cell = cell_of(choice, files, seed)
        keys = cell.algorithm.model_dump()
        keys |= {key: keys[key] * seed for key in ("clip", "step") if isinstance(keys.get(key), float)}
        mu = cell.privacy.model_copy(update={"mu": 2.0 / seed})
        algorithm = type(cell.algorithm).model_validate(keys)
        cells.append(
            resolve_cell(
                {
                    **cell.canonical_data(),
                    "algorithm": algorithm.model_dump(),
                    "privacy": mu.model_dump(exclude_none=True),
                },
                "test",
            )
        )
    return cells


def alike(one: Any, other: Any, choice: Choice) -> bool:
    """Whether two outcomes have the same model, up to what floats round, or masked words."""
    near = 1e-3 if choice.trust == SECURE_AGGREGATION.name else 1e-4 if choice.extra == "dtype" else 1e-9
    ours, theirs = one.cell_outcome.model, other.cell_outcome.model
    return bool(np.linalg.norm(ours - theirs) <= near * max(np.linalg.norm(ours), 1e-3))


@pytest.mark.every(18)
@pytest.mark.parametrize("choice", [*SIDE_BY_SIDE, FIRST_STEP], ids=str)
def test_a_replicate_run_in_a_batch_equals_the_same_run_alone(choice: Choice, files: Files) -> None:
    cells = replicates(choice, files)
    together, _ = run("vectorized", *cells)
    for cell, outcome in zip(cells, together, strict=True):
        (alone,), _ = run("vectorized", cell)
        (inprocess,), _ = run("inprocess", cell)
        assert alike(outcome, alone, choice)
        assert alike(outcome, inprocess, choice)


@pytest.mark.every(18)
@pytest.mark.parametrize("choice", SIDE_BY_SIDE, ids=str)
def test_a_run_resumed_from_a_checkpoint_or_on_a_worker_has_the_same_bits(
    choice: Choice, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint in its middle, and in the function that workers run."""
    cells = replicates(choice, files)
    whole = bits(list(keeper.run_vectorized(cells, Recorder(), Checkpoints())))
    monkeypatch.setattr(keeper, "_MIN_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(keeper, "_MAX_CHECKPOINT_SHARE", float("inf"))
    memory = Memory(stop=3)
    with pytest.raises(KeyboardInterrupt):
        list(keeper.run_vectorized(cells, Recorder(), memory))
    memory.stop = None
    assert bits(list(keeper.run_vectorized(cells, Recorder(), memory))) == whole
    events = run_worker("vectorized", [cell.canonical_data() for cell in cells], ())
    assert bits([event for event in events if isinstance(event, IndexedOutcome)]) == whole


@pytest.mark.parametrize(("grid", "part"), OF_GRIDS)
def test_both_engines_agree_on_every_combination_in_floating_point(grid: str, part: int, files: Files) -> None:
    """The vectorized engine and silos of one process, wherever both compute a combination."""
    compared, apart, refusals = 0, [], []
    for choice in part_of(grid, part):
        try:
            plan_crossing(choice, files, released=False)
            cell = cell_of(choice, files)
            (vectorized,), _ = run("vectorized", cell)
            (inprocess,), _ = run("inprocess", cell)
        except InputError as error:
            refusals.append(str(error))
            continue
        compared += 1
        apart += [] if alike(vectorized, inprocess, choice) else [str(choice)]
    print(f"\n{grid}, part {part + 1} of {PARTS}: engines compared on {compared} combinations")
    assert apart == []
    assert [line for line in refusals if "\n" in line] == []
    assert compared > 0
