"""Records and modules of the calling program: trained on, handed back, refused in one line."""

import hmac
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import fedpriv
from fedpriv.api.run import _digest_arrays
from fedpriv.data.named import load
from fedpriv.data.schema import TableSchema
from fedpriv.data.tables import in_memory_name
from tests.conftest import small_tree
from tests.data.tables import rows, table_tree, write_csv

pytest.importorskip("fedpriv.addons.readers.items")  # items are read by an add-on

Arrays = tuple[NDArray[Any], NDArray[Any]]
TREE: dict[str, Any] = {
    "name": "own",
    "federation": {"silos": 4, "rounds": 30},
    "algorithm": {"name": "dp-ftrl", "trust": "trusted", "clip": 1.0, "step": 0.5},
    "privacy": {"relation": "zero-out", "epsilon": 8.0},
}


def records(shape: tuple[int, ...] = (8,)) -> tuple[Arrays, Arrays]:
    draw = np.random.default_rng(0)
    features = draw.standard_normal((900, *shape)).astype("float32")
    labels = (features.reshape(900, -1)[:, 0] > 0).astype(np.int64)
    return (features[:800], labels[:800]), (features[800:], labels[800:])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 2))


def run(out: Path, tree: dict[str, Any] = TREE, **changes: Any) -> Any:
    """A run on these records and this network, but for the arguments that are given."""
    train, test = records()
    arguments: dict[str, Any] = {"train": train, "test": test, "model": network(), **changes}
    return fedpriv.run(tree, out=out, **arguments)


class Branched(nn.Module):
    """No sequence of layers: its gradients come from torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(features))
        outputs: torch.Tensor = self.last(hidden * torch.sigmoid(hidden))
        return outputs


class Pairs(Dataset[Any]):
    """A Dataset that only has items."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, place: int) -> Any:
        return self.arrays[0][place], int(self.arrays[1][place])


@pytest.mark.parametrize("model", [network(), Branched()])
def test_a_torch_module_is_trained_as_a_copy_and_returned_with_its_type(tmp_path: Path, model: nn.Module) -> None:
    _, test = records()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    (cell,) = run(tmp_path / "run", model=model)
    assert all(torch.equal(before[name], values) for name, values in model.state_dict().items())
    assert cell.test_accuracy > 0.8
    module = cell.to_module()
    assert type(module) is type(model)
    assert not module.training
    outputs = module(torch.from_numpy(test[0]))
    assert float((outputs.argmax(-1).numpy() == test[1]).mean()) == pytest.approx(cell.test_accuracy)
    assert np.array_equal(cell.predict(test[0]), outputs.argmax(-1).numpy())
    flat = torch.cat([values.flatten() for values in cell.state_dict().values()])
    assert np.array_equal(flat.numpy(), cell.model())


def test_training_starts_from_the_parameters_of_the_given_module(tmp_path: Path) -> None:
    (cell,) = run(tmp_path / "run", {**TREE, "algorithm": {**TREE["algorithm"], "step": 1e-12}})
    for name, values in network().state_dict().items():
        assert torch.allclose(cell.state_dict()[name], values, atol=1e-6)


def test_vectorized_and_in_process_training_of_a_module_agree(tmp_path: Path) -> None:
    models = [run(tmp_path / engine, engine=engine)[0].model() for engine in ("vectorized", "inprocess")]
    assert np.allclose(*models, atol=1e-5)


def test_image_records_keep_their_shape_for_a_convolutional_module(tmp_path: Path) -> None:
    train, test = records((1, 6, 6))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 2))
    (cell,) = run(tmp_path / "run", train=train, test=test, model=model)
    assert [type(layer) for layer in cell.to_module().children()] == [type(layer) for layer in model]
    assert cell.predict(test[0]).shape == (100,)


@pytest.mark.parametrize("kind", ["tensors", "items"])
def test_torch_datasets_train_the_same_model_as_their_arrays(tmp_path: Path, kind: str) -> None:
    train, test = records()
    made: list[Any] = [
        TensorDataset(*map(torch.from_numpy, part)) if kind == "tensors" else Pairs(part) for part in (train, test)
    ]
    (of_arrays,) = run(tmp_path / "arrays")
    (of_sets,) = run(tmp_path / "sets", train=made[0], test=made[1])
    assert np.array_equal(of_arrays.model(), of_sets.model())


def test_a_built_in_model_trains_on_own_records_and_converts_to_a_module(tmp_path: Path) -> None:
    _, test = records()
    tree = {**TREE, "model": {"name": "softmax-regression", "feature_norm": 4.0}}
    (cell,) = run(tmp_path / "run", tree, model=None)
    assert isinstance(cell.to_module(), nn.Linear)
    assert (cell.predict(test[0]) == test[1]).mean() == pytest.approx(cell.test_accuracy)
    assert cell.scenario["federation"]["samples"] == 800


def test_a_regression_module_trains_with_the_chosen_loss(tmp_path: Path) -> None:
    (features, _), (held_out, _) = records()
    train, test = (features, features[:, 0]), (held_out, held_out[:, 0])
    for loss in ("squared", "absolute"):
        model = nn.Sequential(nn.Linear(8, 1))
        (cell,) = run(tmp_path / loss, train=train, test=test, model=model, loss=loss)
        assert "test_accuracy" not in cell.metrics
        error = cell.predict(test[0]) - test[1]
        expected = np.square(error).mean() / 2 if loss == "squared" else np.abs(error).mean()
        assert cell.test_loss == pytest.approx(expected, rel=1e-4)


def test_resuming_a_run_with_other_records_is_refused(tmp_path: Path) -> None:
    (features, labels), _ = records()
    run(tmp_path / "run")
    assert run(tmp_path / "run", resume=True).complete
    with pytest.raises(fedpriv.InputError, match="holds another run"):
        run(tmp_path / "run", train=(features + 1.0, labels), resume=True)


@pytest.mark.slow
def test_resuming_a_run_with_another_number_of_classes_is_refused(tmp_path: Path) -> None:
    """Before: seeds with models of two and of five classes were means of one table."""
    tree = {**TREE, "federation": {"silos": 4, "rounds": 2}, "model": {"name": "mlp"}}
    run(tmp_path / "run", tree, model=None)
    with pytest.raises(fedpriv.InputError, match="holds another run"):
        run(tmp_path / "run", tree, model=None, classes=5, resume=True)


class Activated(nn.Module):
    """A module whose text shows nothing of its activation."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.activation = nn.Linear(8, 2), activation

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.activation(self.layer(features))
        return outputs


def test_resuming_a_run_with_another_forward_pass_is_refused(tmp_path: Path) -> None:
    """Before: modules with equal parameters and texts were one, whatever their code and attributes."""
    tree = {**TREE, "federation": {"silos": 4, "rounds": 2}}
    run(tmp_path / "run", tree, model=Activated(torch.relu))
    assert run(tmp_path / "run", tree, model=Activated(torch.relu), resume=True).complete
    with pytest.raises(fedpriv.InputError, match="holds another run"):
        run(tmp_path / "run", tree, model=Activated(torch.tanh), resume=True)


def test_guarantee_results_have_no_unkeyed_digest_of_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: a record, from published results, for whoever knows all others; the name was SHA-256 of all."""
    monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path / "user" / "data"))
    run(tmp_path / "run", {**TREE, "federation": {"silos": 4, "rounds": 2}})
    written = (tmp_path / "run" / "results.json").read_text(encoding="utf-8")
    digest = _digest_arrays(*(column for part in records() for column in part), text="2 classes ")
    assert "given-" in written
    assert digest.hex()[:16] not in written
    names = list[str]()
    for user in ("user", "another", "user"):
        monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path / user / "data"))
        names.append(in_memory_name(digest))
    assert names[0] == names[2] != names[1]
    assert names[0] in written
    assert (tmp_path / "user" / "records.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("planted", ["readable", "another user's"])
def test_a_digest_key_that_others_can_know_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """Gains: the same digest, for who puts a key beside a data folder in a place of all users, as in /tmp."""
    monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path / "data"))
    (tmp_path / "records.key").write_bytes(bytes(32))
    (tmp_path / "records.key").chmod(0o644 if planted == "readable" else 0o600)
    if planted != "readable":
        monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    digest = bytes(range(32))
    assert hmac.digest(bytes(32), digest, "sha256").hex()[:16] not in in_memory_name(digest)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"test": None}, "train and test: give both"),
        ({"train": None, "test": None}, "model: a module is given with train and test"),
        ({"train": np.zeros(3)}, "expected \\(records, labels\\)"),
        ({"train": (np.zeros((4, 8)), np.zeros(3, int))}, "as many labels"),
        ({"train": (np.full((800, 8), np.nan), np.zeros(800, int))}, "not finite"),
        ({"model": nn.Linear(7, 2)}, "model: the module cannot be given a record of 8 values"),
        ({"model": nn.Linear(8, 3)}, "maps one record to shape \\(1, 3\\), but \\(1, 2\\) is needed"),
        ({"model": nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))}, "mixes the records of a batch"),
        ({"model": nn.Linear(8, 2).requires_grad_(False)}, "requires_grad = False"),
        ({"engine": "ray"}, "no arrays and modules of this program"),
        ({"loss": "cubic"}, "accepted are 'cross-entropy', 'binary', 'squared-error'"),
    ],
)
def test_invalid_records_modules_and_losses_are_refused(tmp_path: Path, given: dict[str, Any], part: str) -> None:
    with pytest.raises(fedpriv.InputError, match=part):
        run(tmp_path / "run", **given)


@pytest.mark.slow
def test_run_results_have_short_reprs_and_html_tables_for_notebooks(tmp_path: Path) -> None:
    tree = {**TREE, "title": "<b>mine</b>", "sweep": {"privacy.epsilon": [1.0, 8.0]}}
    results = run(tmp_path / "run", tree)
    assert len(repr(results)) < 200
    assert len(repr(results[0])) < 200
    shown = results._repr_html_()
    assert "&lt;b&gt;mine&lt;/b&gt;" in shown
    assert shown.count("<tr>") == 3
    figures = results.figures()
    assert all(figure._repr_svg_().startswith("<svg") for figure in figures.values())
    rows = results.rows()
    assert [row["privacy.epsilon"] for row in rows] == [1.0, 8.0]
    assert rows[1]["test_accuracy"] == results[1].test_accuracy


def test_converting_results_without_pandas_names_the_pip_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fedpriv.InputError, match=r"pip install 'fedpriv\[notebook\]'"):
        results.to_pandas()


def test_a_damaged_model_file_is_refused(tmp_path: Path) -> None:
    (cell,) = run(tmp_path / "run")
    cell.model_file.write_bytes(b"garbage")
    with pytest.raises(fedpriv.InputError, match="cannot be read as a model"):
        cell.model()


def test_too_few_own_records_are_refused_with_their_count(tmp_path: Path) -> None:
    train, test = (tuple(column[:10] for column in part) for part in records())
    tree = {**TREE, "federation": {**TREE["federation"], "batch": 5}}
    with pytest.raises(fedpriv.InputError, match="but train has 10 training records: too few for either; change"):
        run(tmp_path / "run", tree, train=train, test=test)


@pytest.mark.parametrize("model", [{"name": "softmax-regression", "feature_norm": 4.0}, None])
def test_records_of_another_width_are_not_predicted(tmp_path: Path, model: dict[str, Any] | None) -> None:
    """Before: softmax regression took its constant feature for the missing one, a module raised RuntimeError."""
    tree, module = ({**TREE, "model": model}, None) if model else (TREE, network())
    (cell,) = run(tmp_path / "run", tree, model=module)
    for values in (records()[1][0][:, :-1], records()[1][0][0], 5):
        with pytest.raises(fedpriv.InputError, match="records: expected"):
            cell.predict(values)


@pytest.mark.parametrize("section", ["data", "federation"])
def test_a_section_that_is_no_table_is_refused_by_name(tmp_path: Path, section: str) -> None:
    """Before: TypeError, or AttributeError."""
    with pytest.raises(fedpriv.InputError, match=f"{section} = 5: expected a table of keys"):
        run(tmp_path / "run", {**TREE, section: 5})


@pytest.mark.parametrize("choice", [{"validation": 20}, {"split": 1}, {"spared": 0.25}])
def test_a_run_on_a_choice_of_its_training_records_predicts(tmp_path: Path, choice: dict[str, Any]) -> None:
    """No model needs that choice, and a server of a deployment would refuse it."""
    results = fedpriv.run(small_tree(data={"name": "synthetic", **choice}), out=tmp_path / "run")
    assert results[0].predict(load("synthetic").test_images[:5]).shape == (5,)


@pytest.mark.filterwarnings("ignore:(Of the|The model|By its)")
def test_predictions_of_a_tables_target_are_in_the_unit_of_its_column(tmp_path: Path) -> None:
    """Was: values in -1 … 1, to which the range is scaled."""
    columns = {"sex": {"values": ["f", "m"]}, "pain": {"values": ["none", "some", "*"]}}
    tree = {
        **table_tree(write_csv(tmp_path / "t.csv", rows()), target="age", range=[20.0, 100.0], columns=columns),
        "model": {"name": "linear-regression", "feature_norm": 2.0},
        "privacy": {"relation": "zero-out", "mode": "none"},
    }
    del tree["data"]["table"]["classes"]
    (cell,) = fedpriv.run(tree, out=tmp_path / "run")
    data = load(tree["data"]["name"], table=TableSchema.model_validate(tree["data"]["table"]))
    predicted = cell.predict(data.test_images)
    assert 20.0 < predicted.min() <= predicted.max() < 100.0
    errors = [predicted[index] - float(row["age"]) for index, row in enumerate(rows()) if row["part"] == "test"]
    assert float(np.mean(np.square(errors))) / 40.0**2 == pytest.approx(2.0 * cell.test_loss, rel=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(Of the|The model|By its)")
def test_a_table_trained_by_the_poisson_loss_predicts_logarithms_of_rates(tmp_path: Path) -> None:
    """Was: the logarithms mapped from -1 … 1 to the range of the column."""
    columns = {"sex": {"values": ["f", "m"]}, "pain": {"values": ["none", "some", "*"]}}
    tree = {
        **table_tree(write_csv(tmp_path / "t.csv", rows()), target="age", range=[20.0, 100.0], columns=columns),
        "model": {"name": "torch.nn:Linear", "loss": "poisson"},
        "privacy": {"relation": "zero-out", "mode": "none"},
    }
    del tree["data"]["table"]["classes"]
    (cell,) = fedpriv.run(tree, out=tmp_path / "run")
    outputs = cell.to_module().double()(torch.ones(2, 5).double()).squeeze(-1).detach().numpy()
    assert cell.predict(np.ones((2, 5))) == pytest.approx(outputs, rel=1e-5)
