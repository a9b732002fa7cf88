"""Records as they are: tokens, several inputs, several labels, and losses by name or as a function."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import fedpriv
from fedpriv.data.given import to_record_arrays
from fedpriv.data.named import make_dataset
from tests.api.test_own import TREE

pytest.importorskip("fedpriv.addons.readers.items")  # items are read by an add-on

WORDS, LENGTH, TRAIN = 50, 6, 800
_draw = np.random.default_rng(0)
TOKENS = _draw.integers(0, WORDS, (900, LENGTH))
MASK = _draw.random((900, LENGTH)) < 0.8
LOW = ((TOKENS < WORDS // 2).mean(1) > 0.5).astype(int)
FAST = {"algorithm.step": 10.0, "privacy.epsilon": 50.0}
NUMBERS = _draw.standard_normal((900, 4)).astype("float32")


def parts_of(records: Any, labels: NDArray[Any]) -> dict[str, Any]:
    """Arguments train and test: the first records, and the others."""
    rows = {"train": slice(None, TRAIN), "test": slice(TRAIN, None)}
    if isinstance(records, tuple):
        return {name: (tuple(column[part] for column in records), labels[part]) for name, part in rows.items()}
    return {name: (records[part], labels[part]) for name, part in rows.items()}


def run(out: Path, records: Any, labels: NDArray[Any], model: nn.Module | None, **more: Any) -> Any:
    """The cell of a run on these records."""
    arguments: dict[str, Any] = {"model": model, "out": out, "set": FAST, **parts_of(records, labels), **more}
    (cell,) = fedpriv.run(arguments.pop("scenario", TREE), **arguments)
    return cell


def linear(inputs: int, outputs: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, outputs))


class Bag(nn.Module):
    """A mean of the embeddings of a record's tokens; refuses what is no int64."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(WORDS, 4), nn.Linear(4, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.dtype == torch.int64
        outputs: Tensor = self.last(self.table(tokens).mean(1))
        return outputs


class Tagging(nn.Module):
    """A class for each token, of tokens and a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(WORDS, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        assert (tokens.dtype, mask.dtype) == (torch.int64, torch.bool)
        assert tokens.shape[1:] == mask.shape[1:] == (LENGTH,)
        outputs: Tensor = self.last(self.table(tokens) * mask.unsqueeze(-1))
        return outputs


class Beside(nn.Module):
    """An image and a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.images, self.last = nn.Conv2d(1, 2, 3), nn.Linear(2 * 4 + 4, 2)

    def forward(self, images: Tensor, row: Tensor) -> Tensor:
        assert images.shape[1:] == (1, 4, 4)
        outputs: Tensor = self.last(torch.cat([torch.tanh(self.images(images)).flatten(1), row], 1))
        return outputs


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_integer_tokens_reach_an_embedding_layer_unchanged(tmp_path: Path, kind: Any) -> None:
    cell = run(tmp_path / "run", TOKENS.astype(kind), LOW, Bag())
    assert cell.test_accuracy > 0.6
    assert cell.predict(TOKENS[TRAIN:]).shape == (100,)
    module = cell.to_module()
    again = module(torch.from_numpy(TOKENS[TRAIN:])).argmax(-1).numpy()
    assert (again == LOW[TRAIN:]).mean() == pytest.approx(cell.test_accuracy)


class Lookups(nn.Module):
    """Every usual way to look up tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.last = kind, nn.Linear(4, 2)
        if kind == "bag":
            self.table: nn.Module = nn.EmbeddingBag(WORDS, 4, mode="mean")
        else:
            self.table = nn.Embedding(WORDS, 4, padding_idx=0 if kind == "padding" else None)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.table(tokens)
        outputs: Tensor = self.last(rows if self.kind == "bag" else rows.mean(1))
        return outputs


@pytest.mark.parametrize("kind", ["plain", "padding", "bag"])
def test_modules_with_plain_padded_or_bag_embeddings_train_on_tokens(tmp_path: Path, kind: str) -> None:
    assert run(tmp_path / "run", TOKENS, LOW, Lookups(kind)).test_accuracy > 0.5


def test_a_token_module_that_mixes_records_of_a_batch_is_refused(tmp_path: Path) -> None:
    class Looking(Bag):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + self.table(tokens).mean()

    with pytest.raises(fedpriv.InputError, match="change with the other records of its batch"):
        run(tmp_path / "run", TOKENS, LOW, Looking())


@pytest.mark.slow
def test_a_token_beyond_the_vocabulary_leaves_the_trained_model_finite(tmp_path: Path) -> None:
    strange = TOKENS.copy()
    strange[0] = WORDS + 7
    finite = run(tmp_path / "run", strange, LOW, Bag())
    assert np.isfinite(finite.model()).all()
    assert finite.test_accuracy > 0.6


@pytest.mark.parametrize("given", ["arrays", "tensors", "items"])
def test_a_module_with_two_inputs_and_one_label_for_each_token_trains(tmp_path: Path, given: str) -> None:
    tags = np.where(MASK, TOKENS % 3, -100)
    forms: dict[str, Any] = {}
    for name, ((tokens, mask), labels) in parts_of((TOKENS, MASK), tags).items():
        tensors = TensorDataset(*map(torch.from_numpy, (tokens, mask, labels)))
        if given != "arrays":
            forms[name] = tensors if given == "tensors" else ListData([((t, m), y) for t, m, y in tensors])
    cell = run(tmp_path / "run", (TOKENS, MASK), tags, Tagging(), **forms)
    outputs = cell.to_module()(*map(torch.from_numpy, (tokens, mask))).argmax(-1).numpy()
    assert (outputs == labels)[mask].mean() == pytest.approx(cell.test_accuracy, abs=1e-6)
    assert cell.test_accuracy > 0.5
    assert np.array_equal(cell.predict((tokens, mask)), outputs)


@pytest.mark.parametrize(
    ("items", "line"),
    [
        ([], "has no records"),
        ([(1.0, 2, 3)], r"expected items \(record, label\), found 3 parts"),
        ([5.0], r"expected items \(record, label\), found a float"),
        ([(np.zeros(2), 1), (np.zeros(3), 1)], "records have one shape, and those of items 0 and 1"),
        ([(np.datetime64("2020"), 1), (3, 1)], "records cannot be joined"),
    ],
    ids=["none", "three", "one", "shapes", "types"],
)
def test_torch_datasets_with_malformed_items_are_refused_in_one_line(items: list[Any], line: str) -> None:
    with pytest.raises(fedpriv.InputError, match=f"^train, test: {line}"):
        to_record_arrays(ListData(items))


class ListData(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        return self.items[row]


def test_added_data_with_inputs_of_unequal_length_are_refused() -> None:
    part = ((np.zeros((3, 2)), np.zeros((4, 2))), np.zeros(3, int))
    with pytest.raises(fedpriv.InputError, match=r"inputs of a tuple have the shapes \(3, 2\), \(4, 2\)"):
        make_dataset("added", part, part, None)


def test_a_module_with_image_and_numeric_inputs_trains(tmp_path: Path) -> None:
    images = _draw.integers(0, 256, (900, 1, 4, 4), dtype=np.uint8)
    cell = run(tmp_path / "run", (images, NUMBERS), (NUMBERS[:, 0] > 0).astype(int), Beside())
    assert cell.test_accuracy > 0.7
    shown = torch.from_numpy(images[TRAIN:]).float() / 255.0, torch.from_numpy(NUMBERS[TRAIN:])
    assert np.array_equal(cell.predict((images[TRAIN:], NUMBERS[TRAIN:])), cell.to_module()(*shown).argmax(-1))


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
def test_a_module_with_several_binary_labels_trains(tmp_path: Path, engine: str) -> None:
    labels = (NUMBERS[:, :3] > 0).astype(int)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    cell = run(tmp_path / "run", NUMBERS, labels, model, loss="binary", engine=engine)
    assert cell.test_accuracy > 0.8
    predicted = cell.predict(NUMBERS[TRAIN:])
    assert (predicted == labels[TRAIN:]).mean() == pytest.approx(cell.test_accuracy, abs=1e-6)


@pytest.mark.parametrize("loss", ["squared", "absolute", "huber", "poisson"])
def test_a_module_with_several_real_labels_trains_with_four_regression_losses(tmp_path: Path, loss: str) -> None:
    cell = run(tmp_path / "run", NUMBERS, np.abs(NUMBERS[:, :2]), linear(4, 2), loss=loss)
    assert cell.predict(NUMBERS[TRAIN:]).shape == (100, 2)
    assert "test_accuracy" not in cell.metrics
    assert np.isfinite(cell.test_loss)


def test_a_loss_function_of_the_user_matches_the_equal_built_in_loss(tmp_path: Path) -> None:
    labels = np.abs(NUMBERS[:, :2])

    def half_square(output: Tensor, label: Tensor) -> Tensor:
        return (output - label).square().mean() / 2.0

    function = run(tmp_path / "function", NUMBERS, labels, linear(4, 2), loss=half_square)
    named = run(tmp_path / "named", NUMBERS, labels, linear(4, 2), loss="squared")
    assert function.test_loss == pytest.approx(named.test_loss, rel=1e-5)
    with pytest.raises(fedpriv.InputError, match="holds another run"):
        run(tmp_path / "function", NUMBERS, labels, linear(4, 2), loss="squared", resume=True)


@pytest.mark.parametrize(
    ("labels", "more", "line"),
    [
        (np.arange(900) % 2 + 1, {}, "labels are 0 … 2 .give labels - 1 if they begin with 1."),
        ((NUMBERS[:, 0] > 0).astype(float), {}, "classes are whole numbers: labels.astype.int."),
        (np.array(["a", "b"] * 450), {}, r"np.unique\(labels, return_inverse=True\)\[1\]"),
        ((NUMBERS[:, 0] > 0).astype(float), {"classes": 2}, "classes are labels.astype.int."),
        (
            np.arange(900) % 2,
            {"classes": 1},
            "labels are whole numbers from 0 to 0, found 0 … 1; classes that begin",
        ),
        (np.arange(900) % 2, {"loss": lambda output, label: output}, "must give one number, a tensor of shape"),
        (np.arange(900) % 2, {"loss": lambda output, label: 1 / 0}, "loss: the function fails on outputs .2,."),
        (
            np.arange(900) % 2,
            {"loss": lambda output, label: output.sum() if output.sum() > 1.0 else output.max()},
            "loss: the function fails on outputs .2,. .*data-dependent control flow",
        ),
        (np.arange(900) % 2, {"loss": {"label": 3}}, "accepted keys are name, class_weights and label_smoothing"),
        ((NUMBERS > 0).astype(int), {"set": {"run.metrics": [["auc"]]}}, "auc are of one label a record"),
        ((NUMBERS > 0).astype(int), {"set": {"data.partition": "shards", "data.shards": 2}}, "take 'iid'"),
    ],
)
def test_labels_and_losses_that_do_not_fit_are_refused_with_the_remedy(
    tmp_path: Path, labels: NDArray[Any], more: dict[str, Any], line: str
) -> None:
    module = nn.Sequential(nn.Linear(4, 2 if labels.ndim == 1 else 4))
    more = {"loss": "binary", **more} if labels.ndim > 1 else more
    with pytest.raises(fedpriv.InputError, match=line):
        run(tmp_path / "run", NUMBERS, labels, module, **more)


def test_integer_records_for_a_linear_module_are_refused_as_tokens(tmp_path: Path) -> None:
    with pytest.raises(fedpriv.InputError, match=r"cannot be given a record of 6 tokens \(floats are numbers\)"):
        run(tmp_path / "run", TOKENS, TOKENS[:, 0] % 2, nn.Linear(LENGTH, 2))


def test_a_built_in_model_of_one_label_refuses_several_labels(tmp_path: Path) -> None:
    tree = {**TREE, "model": {"name": "softmax-regression", "feature_norm": 4.0}}
    with pytest.raises(fedpriv.InputError, match="takes one label a record, and here labels are of shape"):
        run(tmp_path / "run", NUMBERS, (NUMBERS > 0).astype(int), None, scenario=tree, set={})


@pytest.mark.slow
def test_dp_fedavg_trains_on_clients_whose_records_have_several_labels(tmp_path: Path) -> None:
    labels, steps = (NUMBERS[:, :3] > 0).astype(int), {"clip": 1.0, "step": 1.0, "local_step": 0.5}
    tree = {
        **TREE,
        "federation": {"clients": 400, "cohort": 40, "rounds": 20, "sampling": "poisson"},
        "algorithm": {"name": "dp-fedavg", "trust": "trusted", "local_steps": 3, **steps},
        "privacy": {"relation": "zero-out", "unit": "client", "records": 2, "epsilon": 50.0},
    }
    models = []
    for engine in ("vectorized", "inprocess"):
        options = {"scenario": tree, "loss": "binary", "engine": engine, "set": {}}
        cell = run(tmp_path / engine, NUMBERS, labels, linear(4, 3), **options)
        models.append(cell.model())
        assert cell.test_accuracy > 0.6
    assert np.allclose(*models, atol=1e-4)
