"""Tokens, several inputs, several labels and losses of one's own, through what a guard computes with.

Gains, if a test here fails: a server that picks every float of a query, or a record that is made for it, moves a
release by more than its noise was made for, or says something about another record.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.data.layout import IGNORED_CLASS, combine_unnamed_inputs
from fedpriv.loss.objective import Batch, Objective, Query, Records
from fedpriv.loss.scores import make_summed_scores
from fedpriv.noise.integers.increments import sum_integer_increments
from fedpriv.plan.task import ModelInputs
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.shard import Shard, load_shard
from tests.attacks.test_company import guard_over, scenario
from tests.conftest import small_tree
from tests.loss import zoo
from tests.loss.test_hostile_queries import POINTS, SLACK, pair_of
from tests.silo.guarded import refused

COUNT, WORDS, CLASSES = 6, 20, 3
_draw = np.random.default_rng(5)
TOKENS = _draw.integers(0, WORDS, (COUNT, 5))
MASK = _draw.random((COUNT, 5)) < 0.7
NUMBERS = _draw.standard_normal((COUNT, 4))
IMAGES = _draw.integers(0, 256, (COUNT, 1, 3, 3), dtype=np.uint8)
FLAGS = _draw.integers(0, 2, (COUNT, 3))


class Kind(NamedTuple):
    """Records of a kind with the model that takes them, and record 0 as somebody makes it on purpose."""

    images: NDArray[Any]
    labels: NDArray[Any]
    model: dict[str, Any]
    strange: tuple[NDArray[Any], NDArray[Any]]
    classes: int = 2
    silent: bool = True
    """Whether the strange record adds nothing."""


def with_first(values: NDArray[Any], first: Any) -> NDArray[Any]:
    changed = values.copy()
    changed[0] = first
    return changed


KINDS = {
    "tokens": Kind(
        TOKENS, FLAGS[:, 0], {"name": "Sentences"}, (with_first(TOKENS, WORDS + 3), 1 - FLAGS[:, 0])
    ),
    "tags": Kind(
        combine_unnamed_inputs([TOKENS, MASK]), np.where(MASK, TOKENS % CLASSES, IGNORED_CLASS), {"name": "Tags"},
        (
            combine_unnamed_inputs([with_first(TOKENS, -1), with_first(MASK, False)]),
            with_first(TOKENS % CLASSES, IGNORED_CLASS),
        ),
        CLASSES,
    ),
    "flags": Kind(
        NUMBERS, FLAGS, {"name": "flags", "loss": "binary", "class_weights": [1.0, 1e9]},
        (with_first(NUMBERS, 1e300), 1 - FLAGS), silent=False,
    ),
    "flags, images beside numbers": Kind(
        combine_unnamed_inputs([IMAGES, NUMBERS]), FLAGS, {"name": "Beside", "loss": "binary"},
        (combine_unnamed_inputs([with_first(IMAGES, 255), with_first(NUMBERS, -1e300)]), 1 - FLAGS), silent=False,
    ),
    "counts": Kind(
        NUMBERS, np.abs(NUMBERS[:, :2]), {"name": "flags", "loss": "poisson"},
        (with_first(NUMBERS, 1e300), with_first(np.abs(NUMBERS[:, :2]), 1e308)), 0, silent=False,
    ),
    "a loss of one's own": Kind(
        NUMBERS, np.abs(NUMBERS[:, :2]), {"name": "flags", "loss": f"{zoo.__name__}:apart", "real": True},
        (NUMBERS, with_first(np.abs(NUMBERS[:, :2]), 1e200)), 0,
    ),
}  # fmt: skip


def seen(kind: Kind, dtype: str, strange: bool = False) -> tuple[Objective, Records]:
    """The objective and the rows of the records, or of those with record 0 as somebody made it."""
    model = {**kind.model, "name": f"{zoo.__name__}:{kind.model['name']}"}
    cell = resolve_cell(small_tree(model=model, run__dtype=dtype), "test")
    images, labels = kind.strange if strange else (kind.images, kind.labels)
    inputs = ModelInputs.from_cell(cell)
    layout = inputs.make_layout(images, labels, kind.classes)
    return inputs.make_objective(layout, kind.classes), Shard(images, labels).model_records(cell)


@pytest.mark.every(6)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
@given(
    pattern=st.sampled_from(POINTS),
    coefficients=st.sampled_from([(1.0,), (1.0, -1.0), (1e5, -99999.0)]),
    clip=st.floats(-40.0, 40.0).map(lambda exponent: 2.0**exponent),
    strange=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=6, derandomize=True)
def test_no_increment_of_any_kind_of_record_exceeds_its_clip(
    name: str, dtype: str, pattern: str, coefficients: tuple[float, ...], clip: float, strange: bool, seed: int
) -> None:
    objective, records = seen(KINDS[name], dtype, strange)
    points = pair_of(pattern, objective, records.features.dtype, seed)[: len(coefficients)]
    query, weights = Query(points, coefficients), torch.ones(COUNT, dtype=torch.float64)
    rows = objective.per_record(query, Batch(records, weights), torch.arange(COUNT), clip)
    assert rows.isfinite().all()
    assert float(rows.norm(dim=1).max()) <= clip * SLACK
    total = objective.increment(query, Batch(records, weights), clip).total
    for place in range(COUNT):
        left = weights.clone()
        left[place] = 0.0
        without = objective.increment(query, Batch(records, left), clip).total
        assert float((total - without).norm()) <= clip * SLACK


@pytest.mark.parametrize("name", KINDS)
@given(pattern=st.sampled_from(POINTS), clip=st.sampled_from([1e-3, 1.0, 1e6]), seed=st.integers(0, 10**6))
@settings(max_examples=4, derandomize=True)
def test_replacing_one_record_of_any_kind_moves_integer_sums_by_at_most_the_clip(
    name: str, pattern: str, clip: float, seed: int
) -> None:
    """Integers, as a guard adds them: K units under zero-out, and no bit of the others'."""
    kind, norm = KINDS[name], 2**20
    (objective, records), (_, exchanged) = (seen(kind, "float32", strange) for strange in (False, True))
    query = Query(pair_of(pattern, objective, torch.float32, seed)[:1])

    def of(some: Records) -> NDArray[np.int64]:
        return sum_integer_increments(objective, query, clip, some, norm, norm / clip)

    whole, others = of(records), of(Records(*(column[1:] for column in records)))
    alone = of(Records(*(column[:1] for column in records)))
    assert float(np.linalg.norm((whole - others).astype(float))) <= norm
    assert np.array_equal(whole, others + alone)
    moved = of(Records(*(torch.cat([new[:1], old[1:]]) for new, old in zip(exchanged, records, strict=True))))
    assert float(np.linalg.norm((moved - others).astype(float))) <= norm
    if kind.silent:
        assert np.array_equal(moved, others)


@pytest.mark.parametrize("name", KINDS)
def test_an_adversarial_record_does_not_change_the_increments_of_other_records(name: str) -> None:
    (objective, records), (_, exchanged) = (seen(KINDS[name], "float32", strange) for strange in (False, True))
    mixed = Records(*(torch.cat([new[:1], old[1:]]) for new, old in zip(exchanged, records, strict=True)))
    query, weights = Query((objective.initial(),)), torch.ones(COUNT, dtype=torch.float64)
    rows, changed = (
        objective.per_record(query, Batch(some, weights), torch.arange(COUNT), 1.0) for some in (records, mixed)
    )
    assert torch.equal(rows[1:], changed[1:])
    assert changed.isfinite().all()


def arrays(kind: Kind) -> dict[str, NDArray[Any]]:
    """As a silo writes them into its file: inputs by name."""
    if kind.images.dtype.names is None:
        return {"features": kind.images, "labels": kind.labels}
    return {"labels": kind.labels} | {f"features.{name}": kind.images[name] for name in kind.images.dtype.names}


ADAM = {"name": "dp-adamw", "trust": "untrusted", "clip": 1.0, "step": 0.1, "step_schedule": "cosine"}


@pytest.mark.parametrize("algorithm", [{}, {"algorithm": ADAM}], ids=["dp-sgd", "dp-adamw"])
@pytest.mark.parametrize("name", ["tokens", "tags", "flags"])
def test_a_guard_answers_for_tokens_tags_and_multi_label_records_of_its_file(
    tmp_path: Path, name: str, algorithm: dict[str, Any]
) -> None:
    kind = KINDS[name]
    code = f"{zoo.__name__}:{kind.model['name']}"
    guard = guard_over(tmp_path / "silo", False, code, kind.classes, **arrays(kind))
    text = scenario(1, COUNT, model={**kind.model, "name": code}, **algorithm)
    objective, _ = seen(kind, "float32")
    first = guard.answer("run", text, 1, objective.initial())
    assert first.shape == (objective.dimension,)
    assert bool(first.isfinite().all())
    assert torch.equal(first, guard.answer("run", text, 1, objective.initial()))


def test_a_shard_with_several_inputs_is_read_back_unchanged(tmp_path: Path) -> None:
    kind = KINDS["tags"]
    np.savez(tmp_path / "own.npz", **arrays(kind))
    shard = load_shard(tmp_path / "own.npz", kind.classes)
    assert [shard.images[name].dtype.kind for name in shard.images.dtype.names or ()] == ["i", "b"]
    for name, given_name in zip(shard.images.dtype.names or (), kind.images.dtype.names or (), strict=True):
        assert np.array_equal(shard.images[name], kind.images[given_name])
    assert np.array_equal(shard.labels, kind.labels)
    other = Shard(kind.images.view([("a", "i8", (4,)), ("b", "i8"), ("c", "?", (5,))]), kind.labels)
    assert other.content_digest != Shard(kind.images, kind.labels).content_digest


def test_a_custom_loss_that_the_policy_does_not_list_is_refused_and_not_executed(tmp_path: Path) -> None:
    kind = KINDS["counts"]
    guard = guard_over(tmp_path / "silo", False, f"{zoo.__name__}:flags", 0, **arrays(kind))
    model = {"name": f"{zoo.__name__}:flags", "loss": f"{zoo.__name__}:spying", "real": True}
    text = scenario(1, COUNT, model=model)
    refused(guard, r"zoo:spying', and allow.models does not name it", text, query=torch.zeros(37))
    assert not zoo.calls


@pytest.mark.every(2)
@given(pattern=st.sampled_from(POINTS), seed=st.integers(0, 10**6))
@settings(max_examples=20, derandomize=True)
@pytest.mark.parametrize("name", ["tags", "flags"])
def test_evaluation_scores_of_one_test_record_are_bounded_for_any_model(
    name: str, pattern: str, seed: int
) -> None:
    for strange in (False, True):
        objective, records = seen(KINDS[name], "float32", strange)
        scores = make_summed_scores(objective, 4.0, classes=True)
        (model,) = pair_of(pattern, objective, torch.float32, seed)[:1]
        query, weights = Query((model,)), torch.ones(COUNT, dtype=torch.float64)
        norm = 2**20
        for place in range(COUNT):
            one = Records(*(column[place : place + 1] for column in records))
            said = sum_integer_increments(scores, query, scores.norm, one, norm, norm / scores.norm)
            assert float(np.linalg.norm(said.astype(float))) <= norm
            if pattern == "equal" and not strange:
                alone = scores.per_record(query, Batch(one, weights[:1]), torch.arange(1), scores.norm)
                together = scores.per_record(query, Batch(records, weights), torch.arange(COUNT), scores.norm)
                assert torch.allclose(alone[0], together[place], atol=1e-5)


def test_evaluation_scores_of_silos_equal_the_accuracy_over_all_labels() -> None:
    objective, records = seen(KINDS["flags"], "float32")
    scores = make_summed_scores(objective, 1e12, classes=True)
    mean = scores.contributions(objective.initial(), records).mean(0)
    whole = objective.evaluate(objective.initial(), records)
    assert whole.accuracy is not None
    assert float(scores.to_metrics(mean)["test_accuracy"]) == pytest.approx(float(whole.accuracy), abs=1e-6)
    assert float(scores.to_metrics(mean)["test_loss"]) == pytest.approx(float(whole.loss), rel=1e-3)
    several = torch.stack([objective.initial(), -objective.initial()])
    alone = torch.stack([scores.contributions(model, records) for model in several])
    torch.testing.assert_close(scores.contributions(several, records), alone)
    own, _ = seen(KINDS["a loss of one's own"], "float32")
    with pytest.raises(InputError, match="a loss of your own does not say what is right"):
        make_summed_scores(own, 1.0, classes=True)
