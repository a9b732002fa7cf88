"""Copies of a picture, LoRA and several labels at once, through a real guard.

Gains, if a test here fails: a record that somebody made, or a query of a server, moves a release by more than one
clip, or a guard answers a question twice in two ways.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.core.errors import FedprivError
from fedpriv.loss.objective import Query
from fedpriv.noise.integers.increments import sum_integer_increments
from fedpriv.plan.task import ModelInputs
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.shard import Shard
from tests.attacks.test_company import guard_over, scenario
from tests.conftest import small_tree
from tests.loss import zoo
from tests.loss.builders import first_rows
from tests.loss.test_hostile_queries import pair_of

COUNT, VICTIM = 6, 2
SIZE = 2 * (16 + 8) + 2 * (8 + 3) + 2 * (16 + 3)
"""Two matrices of rank 2 for each of three Linear layers."""
_draw = np.random.default_rng(7)
IMAGES = _draw.integers(0, 256, (COUNT, 4, 4), dtype=np.uint8)
FLAGS = _draw.integers(0, 2, (COUNT, 3))
CODE = f"{zoo.__name__}:adapted"
Model = dict[str, Any]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """LoRA on constants that a file holds, with five copies of every picture."""
    torch.manual_seed(2)
    torch.save(zoo.Wide(16, 3).state_dict(), tmp_path / "w")
    digest = hashlib.sha256((tmp_path / "w").read_bytes()).hexdigest()
    (tmp_path / "w").rename(tmp_path / f"{digest}.pt")
    monkeypatch.setenv("FEDPRIV_WEIGHTS", str(tmp_path))
    augment = {"copies": 5, "shift": 1, "flip": True}
    return {"name": CODE, "loss": "binary", "weights": f"sha256:{digest}", "augment": augment}


@pytest.mark.parametrize("pattern", ["random", "largest", "cancelling", "all scales"])
def test_an_augmented_record_adds_at_most_one_clip_and_changes_no_other_increment(
    model: Model, pattern: str
) -> None:
    """Integers, as a guard adds them: with five copies, K units under zero-out, and nobody else's copies."""
    cell, norm = resolve_cell(small_tree(model=model, run__dtype="float32"), "test"), 2**20
    inputs, other = ModelInputs.from_cell(cell), IMAGES.copy()
    other[VICTIM] = 255 - other[VICTIM]
    flags = FLAGS.copy()
    flags[VICTIM] = 1 - flags[VICTIM]
    objective = inputs.make_objective(inputs.make_layout(IMAGES, FLAGS, 2), 2).for_batch(
        first_rows(3, ((0, COUNT),))
    )
    (query,) = pair_of(pattern, objective, torch.float32, 4)[:1]
    there, rows = np.ones(COUNT, np.bool_), np.arange(COUNT)
    there[VICTIM] = False
    without = []
    for images, labels in ((IMAGES, FLAGS), (other, flags)):
        records = Shard(images, labels).model_records(cell)
        whole = sum_integer_increments(objective, Query((query,)), 1.0, records, norm, norm, row_indices=rows)
        without.append(
            sum_integer_increments(
                objective, Query((query,)), 1.0, records, norm, norm, is_counted=there, row_indices=rows
            )
        )
        assert float(np.linalg.norm((whole - without[-1]).astype(float))) <= norm
    assert np.array_equal(*without)


def test_a_guard_gives_an_augmented_lora_round_one_reply_only(tmp_path: Path, model: Model) -> None:
    guard = guard_over(tmp_path / "silo", False, CODE, 2, features=IMAGES, labels=FLAGS)
    text = scenario(1, COUNT, model=model)
    first = guard.answer("run", text, 1, torch.full((SIZE,), 0.1))
    assert bool(first.isfinite().all())
    assert torch.equal(first, guard.answer("run", text, 1, torch.full((SIZE,), 0.1)))
    with pytest.raises(FedprivError):
        guard.answer("run", text, 1, torch.full((SIZE,), 0.2))


@pytest.mark.parametrize(
    ("copies", "shift", "said"), [(10**9, 1, "copies"), (2, 4, "out of sight"), (2, 0, "shift or flip")]
)
def test_a_guard_refuses_unreasonable_augmentation_settings(
    tmp_path: Path, model: Model, copies: int, shift: int, said: str
) -> None:
    guard = guard_over(tmp_path / "silo", False, CODE, 2, features=IMAGES, labels=FLAGS)
    tree = json.loads(scenario(1, COUNT, model=model))
    tree["model"]["augment"] = {"copies": copies, "shift": shift}
    with pytest.raises(FedprivError, match=said):
        guard.answer("run", json.dumps(tree), 1, torch.zeros(SIZE))
