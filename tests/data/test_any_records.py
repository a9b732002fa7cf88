"""Records, labels and modules in the forms of other programs: read, or refused in one line with a remedy.

Each form is compared with the same records as plain arrays.  A form that cannot be read says what would be right.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedpriv
from fedpriv.core.errors import InputError
from fedpriv.data.given import to_record_arrays
from fedpriv.loss.imported import make_trained_model
from fedpriv.loss.models import find_model
from tests.loss.builders import save_weights

pytest.importorskip("fedpriv.addons.readers.items")  # items are read by an add-on

COUNT = 120
_draw = np.random.default_rng(3)
FEATURES = torch.from_numpy(_draw.standard_normal((COUNT, 4)).astype("float32"))
LABELS = (FEATURES[:, 0] > 0).long()
PLAIN = (FEATURES.numpy(), LABELS.numpy())
FAST = {"federation.silos": 2, "federation.rounds": 2}


class Items(Dataset[Any]):
    """A torch Dataset of what a function makes of a record, a label and a number."""

    def __init__(self, make_item: Callable[[Tensor, Tensor, int], Any], count: int = COUNT) -> None:
        self.make_item, self.count = make_item, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        return self.make_item(FEATURES[row], LABELS[row], row)


class Doubled(TensorDataset):
    """Tensors of half the features, which each item doubles."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        half, label = super().__getitem__(index)
        return 2.0 * half, label


class HuggingFace:
    """Rows as dictionaries of Python's own numbers, with a length and without torch, as `datasets` gives them."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"label": int(LABELS[row]), "features": FEATURES[row].tolist()}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(FEATURES, LABELS, strict=True))


class StreamOfKnownLength(Stream):
    """A stream that says how many records it has, as torch documents it for the length of a DataLoader."""

    def __len__(self) -> int:
        return COUNT


BY_NAME = ("x", "label")
READ: dict[str, tuple[Any, Any]] = {
    "bfloat16": ((FEATURES.bfloat16(), LABELS), None),
    "tensors with gradients": ((FEATURES.clone().requires_grad_(), LABELS), None),
    "triples": (Items(lambda x, y, row: (x, y, row)), (0, 1)),
    "dictionaries of three": (Items(lambda x, y, row: {"id": row, "x": x, "label": y}), BY_NAME),
    "dictionaries of two": (Items(lambda x, y, row: {"label": y, "x": x}), None),
    "Hugging Face": (HuggingFace(), None),
    "iterable": (Stream(), None),
    "iterable with a length": (StreamOfKnownLength(), None),
    "generator": (((x, y) for x, y in zip(FEATURES, LABELS, strict=True)), None),
    "list of items": ([(x, y) for x, y in zip(FEATURES, LABELS, strict=True)], None),
    "list of dictionaries": ([{"x": x, "y": int(y)} for x, y in zip(FEATURES, LABELS, strict=True)], None),
    "DataLoader of triples": (DataLoader(Items(lambda x, y, row: (x, y, row)), batch_size=50), (0, 1)),
    "DataLoader of dictionaries": (DataLoader(Items(lambda x, y, row: {"y": y, "x": x}), batch_size=50), None),
    "tensors with items of their own": (Doubled(FEATURES / 2.0, LABELS), None),
    "tensors of three": (TensorDataset(FEATURES, LABELS, torch.arange(COUNT)), (0, 1)),
}


@pytest.mark.parametrize("form", READ)
def test_every_supported_record_format_is_loaded_like_plain_arrays(form: str) -> None:
    data, fields = READ[form]
    features, labels = to_record_arrays(data, "train", fields)
    rounding = 0.01 if form == "bfloat16" else 0.0
    np.testing.assert_allclose(features, PLAIN[0], rtol=rounding)
    np.testing.assert_array_equal(labels, PLAIN[1])


@pytest.mark.parametrize("batch_size", [None, 50])
def test_a_dataloader_of_several_inputs_gives_the_same_records_as_its_dataset(batch_size: int | None) -> None:
    """Before: torch makes a list of the tuple, and two inputs of one shape became one of two rows, in silence."""
    data = Items(lambda x, y, row: ((x, 2.0 * x), y))
    records, labels = to_record_arrays(DataLoader(data, batch_size=batch_size), "train", None)
    expected, expected_labels = to_record_arrays(data, "train", None)
    assert records.dtype.names is not None
    for name in records.dtype.names:
        np.testing.assert_array_equal(records[name], expected[name])
    np.testing.assert_array_equal(labels, expected_labels)


def test_items_of_several_inputs_are_loaded_by_field_name() -> None:
    data = Items(lambda x, y, row: {"id": row, "mask": x > 0, "tokens": (10 * x).long(), "label": y})
    records, labels = to_record_arrays(data, "train", (("tokens", "mask"), "label"))
    assert records.dtype.names is not None
    first, second = (records[name] for name in records.dtype.names)
    np.testing.assert_array_equal(first, (10 * FEATURES).long().numpy())
    np.testing.assert_array_equal(second, (FEATURES > 0).numpy())
    np.testing.assert_array_equal(labels, PLAIN[1])


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "triples": (Items(lambda x, y, row: (x, y, row)), None, r"found 3 parts; fields = \(0, 1\) would name"),
    "dictionaries": (
        Items(lambda x, y, row: {"id": row, "x": x, "label": y}),
        None,
        r"found the entries 'id', 'x', 'label'; fields = \('image', 'label'\) would name",
    ),
    "fields of none": (HuggingFace(), BY_NAME, r"fields = .*no such parts, but the entries 'label', 'features'"),
    "fields of one name": (
        HuggingFace(),
        ("features",),
        r"fields = \('features',\): an item of train has no such",
    ),
    "unequal lengths": (
        Items(lambda x, y, row: (x[: 2 + row % 2], y)),
        None,
        r"those of items 0 and 1 have \(2,\) and \(3,\); pad or cut them to a length that is known without",
    ),
    "unequal batches": (
        DataLoader(Items(lambda x, y, row: (x[: 2 + row // 60], y)), batch_size=60),
        None,
        r"those of batches 0 and 1 have \(2,\) and \(3,\)",
    ),
    "unequal lists": (([[1.0], [1.0, 2.0]], [0, 1]), None, "expected numbers in an array of one shape"),
    "empty": (Items(lambda x, y, row: (x, y), 0), None, "train: has no records"),
    "an empty DataLoader": (DataLoader(Items(lambda x, y, row: (x, y), 0)), None, "train: has no records"),
    "an empty list": ([], None, "train: has no records"),
    "sparse": ((FEATURES.to_sparse(), LABELS), None, "expected numbers in an array of one shape"),
    "records alone": (FEATURES, None, r"expected \(records, labels\) or a data set"),
    "three arrays": ((FEATURES, LABELS, LABELS), None, r"expected \(records, labels\) or a data set"),
    "parts": ({"train": HuggingFace(), "test": HuggingFace()}, None, "a dictionary of 'train', 'test'; give one"),
    "no labels": (TensorDataset(FEATURES), None, "train: the TensorDataset has no labels"),
    "a number": (3, None, r"expected \(records, labels\) or a data set"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_unsupported_record_formats_are_refused_in_one_line_with_a_remedy(form: str) -> None:
    data, fields, line = REFUSED[form]
    with pytest.raises(InputError, match=line) as caught:
        to_record_arrays(data, "train", fields)
    assert "\n" not in str(caught.value)


def test_a_dataloader_without_batches_is_loaded_item_by_item() -> None:
    loader = DataLoader(TensorDataset(FEATURES, LABELS), batch_size=None)
    records, labels = to_record_arrays(loader, "train")
    assert (records.shape, labels.shape) == (tuple(FEATURES.shape), tuple(LABELS.shape))


def run(out: Path, **changes: Any) -> Any:
    """The only cell of a run of own-data on these records, in two rounds of two silos."""
    arguments: dict[str, Any] = {"train": PLAIN, "test": PLAIN, "set": FAST, **changes}
    (cell,) = fedpriv.run("own-data", out=out, **arguments)
    return cell


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


WRAPPED: dict[str, Callable[[], Any]] = {
    "several devices": lambda: nn.DataParallel(network()),
    "bfloat16": lambda: network().bfloat16(),
    "parametrized": lambda: parametrizations.weight_norm(network()),
    "compiled": lambda: torch.compile(network()),
    "parts for several devices": lambda: nn.Sequential(nn.DataParallel(network())),
}


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "form", [slow(form) if form in ("compiled", "parametrized") else form for form in WRAPPED]
)
def test_a_wrapped_module_reaches_the_test_loss_of_the_plain_module(form: str, tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", model=network())
    wrapped = run(tmp_path / "wrapped", model=WRAPPED[form]())
    assert wrapped.test_loss == pytest.approx(plain.test_loss, rel=0.01)
    assert wrapped.test_loss < math.log(2.0)


def scripted() -> Any:
    return torch.jit.script(network())  # type: ignore[no-untyped-call,unused-ignore]


NO_MODULES: dict[str, tuple[Callable[[], Any], str]] = {
    "scripted": (scripted, "is scripted, .*give the module before it"),
    "a class": (lambda: nn.Linear, r"Linear is the class of one; give an instance, such as Linear\(…\)"),
    "a function": (lambda: network, "not a function; give what it returns"),
    "a state_dict": (lambda: network().state_dict(), "not a state_dict; load it into a module"),
    "a name": (lambda: "resnet", r'a model by name is set=\{"model\.name": …\}'),
    "lazy": (lambda: nn.LazyLinear(2), "has parameters without values"),
    "sizes alone": (lambda: nn.Linear(4, 2, device="meta"), "has parameters without values"),
    "complex": (lambda: nn.Linear(4, 2, dtype=torch.complex64), "has complex parameters"),
    "old weight_norm": (lambda: torch.nn.utils.weight_norm(network()), "cannot be copied .*remove_weight_norm"),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, of what is deprecated
@pytest.mark.parametrize("form", NO_MODULES)
def test_objects_that_are_no_trainable_module_are_refused_in_one_line_with_a_remedy(
    form: str, tmp_path: Path
) -> None:
    make, line = NO_MODULES[form]
    with pytest.raises(InputError, match=line) as caught:
        run(tmp_path / "run", model=make())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [torch.int64, torch.float32, torch.bool])
def test_one_hot_labels_are_refused_unless_a_binary_loss_is_given(kind: torch.dtype, tmp_path: Path) -> None:
    one_hot = nn.functional.one_hot(LABELS, 2).to(kind)
    for model in (network(), None):
        with pytest.raises(
            InputError, match=r"are one-hot; give the number of each record's class, labels\.argmax"
        ):
            run(tmp_path / "run", train=(FEATURES, one_hot), test=(FEATURES, one_hot), model=model)
    cell = run(tmp_path / "said", train=(FEATURES, one_hot.long()), test=(FEATURES, one_hot.long()),
               model=network(), loss="binary")  # fmt: skip
    assert cell.test_loss > 0.0


CHECKPOINTS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "plain": lambda state: state,
    "with an epoch": lambda state: {"state_dict": state, "epoch": 3},
    "with an optimizer": lambda state: {
        "epoch": 3,
        "model_state_dict": state,
        "optimizer_state_dict": {"state": {}},
    },
    "of DataParallel": lambda state: {f"module.{name}": values for name, values in state.items()},
    "of Lightning": lambda state: {"state_dict": {f"model.{name}": values for name, values in state.items()}},
    "of torch.compile": lambda state: {f"_orig_mod.{name}": values for name, values in state.items()},
}


def linear(weights: str) -> Any:
    """The objective of a layer that is imported, with its weights."""
    row = find_model("torch.nn:Linear")
    return row.objective((6,), 3, torch.float64, row.settings.model_validate({"weights": weights}))


@pytest.mark.parametrize("form", CHECKPOINTS)
def test_weights_are_loaded_from_common_checkpoint_layouts(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPRIV_WEIGHTS", str(tmp_path))
    state = {name: torch.randn_like(values) for name, values in nn.Linear(6, 3).state_dict().items()}
    trained = linear(save_weights(tmp_path, CHECKPOINTS[form](state)))
    module = make_trained_model(trained, trained.initial().numpy()).module
    assert all(torch.allclose(module.state_dict()[name].float(), values) for name, values in state.items())


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"epoch": 3}, r"holds no state_dict; save module\.state_dict\(\)"),
        ([torch.zeros(1)], "holds no state_dict that can be loaded"),
        (torch.zeros(1), "holds no state_dict that can be loaded"),
        ({"module.weight": torch.zeros(3, 6), "bias": torch.zeros(3)}, "holds module.weight"),
        (nn.Linear(6, 3), r"holds no state_dict that can be loaded; save module\.state_dict\(\) with"),
    ],
)
def test_files_without_a_fitting_state_dict_are_refused_as_weights(
    content: Any, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPRIV_WEIGHTS", str(tmp_path))
    with pytest.raises(InputError, match=line) as caught:
        linear(save_weights(tmp_path, content))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("content", [b"", b"hello world" * 20, b"\x80\x02"])
def test_other_files_are_refused_as_weights(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the reason in the message was empty, or a number."""
    monkeypatch.setenv("FEDPRIV_WEIGHTS", str(tmp_path))
    digest = hashlib.sha256(content).hexdigest()
    (tmp_path / f"{digest}.pt").write_bytes(content)
    with pytest.raises(InputError, match="holds no state_dict that can be loaded"):
        linear(f"sha256:{digest}")


# Records by silo.


def by_silo(counts: tuple[int, ...]) -> list[Any]:
    ends = np.cumsum((0, *counts))
    return [(FEATURES[start:end], LABELS[start:end]) for start, end in itertools.pairwise(ends)]


def test_one_data_set_per_silo_trains_like_one_data_set_with_site_labels(tmp_path: Path) -> None:
    """The same as one set with the site of each record; batches have the silos' own sizes."""
    counts, rounds = (60, 40, 20), {"federation.rounds": 2}
    split = run(tmp_path / "split", train=by_silo(counts), set=rounds)
    assert list(split.scenario["federation"]["batches"]) == list(counts)
    assert (split.scenario["data"]["partition"], split.scenario["federation"]["silos"]) == ("site", 3)
    sites = np.repeat(["west", "north", "east"], counts)
    named = run(tmp_path / "named", train=PLAIN, sites=sites, set=rounds)
    assert list(named.scenario["federation"]["batches"]) == [20, 40, 60]  # in the order of their names
    numbered = run(tmp_path / "numbered", train=PLAIN, sites=np.repeat([0, 1, 2], counts), set=rounds)
    assert numbered.model().tobytes() == split.model().tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 4, "epochs": 2},
        {"rounds": 5, "batch": 7},  # five silos would read all 120 records, and three do not
        {"batch": 7},
        {"samples": 60},
        {"rounds": [2, 4]},
    ],
    ids=str,
)
def test_federation_settings_of_a_program_hold_for_records_by_silo(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Before: all were refused, since `batches` were of the shipped rounds or stood beside samples or batch."""
    settings = {f"federation.{key}": value for key, value in changes.items()}
    results = fedpriv.run("own-data", train=by_silo((40, 40, 40)), test=PLAIN, set=settings, out=tmp_path / "run")
    for key, value in changes.items():
        values = value if isinstance(value, list) else [value]
        assert [cell.scenario["federation"][key] for cell in results] == values


def test_a_scenario_that_sweeps_rounds_trains_on_records_by_silo(tmp_path: Path) -> None:
    """Before: refused, since `batches` were of the first number of rounds."""
    tree = {
        "name": "swept",
        "federation": {"silos": 2, "rounds": 2},
        "algorithm": {"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 1.0},
        "privacy": {"relation": "zero-out", "mode": "none"},
        "model": {"name": "softmax-regression", "feature_norm": 2.0},
        "sweep": {"federation.rounds": [2, 4]},
    }
    results = fedpriv.run(tree, train=by_silo((40, 40)), test=PLAIN, out=tmp_path / "run")
    assert [cell.scenario["federation"]["rounds"] for cell in results] == [2, 4]
    with pytest.raises(InputError, match="sweep"):
        fedpriv.run({**tree, "sweep": "x"}, train=by_silo((40, 40)), test=PLAIN, out=tmp_path / "none")


def test_each_silo_trains_on_its_own_records_only(tmp_path: Path) -> None:
    """Without noise a silo of the wrong labels moves the model as its share of the mean says."""
    tree = {
        "name": "split",
        "federation": {"silos": 2, "rounds": 1},
        "algorithm": {"name": "dp-sgd", "trust": "trusted", "clip": 1e3, "step": 1.0},
        "privacy": {"relation": "zero-out", "mode": "none"},
        "model": {"name": "linear-regression", "feature_norm": 2.0},
    }
    features = np.ones((30, 1), np.float32)
    labels = np.concatenate([np.full(20, 3.0), np.full(10, -6.0)])
    (cell,) = fedpriv.run(
        tree, train=[(features[:20], labels[:20]), (features[20:], labels[20:])], test=(features, labels),
        out=tmp_path / "run",
    )  # fmt: skip
    assert list(cell.scenario["federation"]["batches"]) == [20, 10]
    assert float(np.abs(cell.model()).max()) < 1e-6  # (20 · 3 - 10 · 6) / 30


def test_per_silo_metrics_need_test_records_with_known_sites(tmp_path: Path) -> None:
    per_silo = {**FAST, "run.per_silo": True}
    del per_silo["federation.silos"]
    parts = by_silo((60, 60))
    cell = run(tmp_path / "run", train=parts, test=parts, set=per_silo)
    assert {name for name in cell.metrics if "silo" in name}
    assert cell.predict(FEATURES[:3]).shape == (3,)  # the task without training records has the sites, too
    with pytest.raises(InputError, match=r"run\.per_silo: the test records are of no site"):
        run(tmp_path / "none", train=parts, set=per_silo)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"sites": [0, 1]}, r"sites: of shape \(2,\); expected the site of each of 120 records"),
        ({"sites": [0.0] * 119 + [float("nan")]}, r"sites: a record has no site \(nan\)"),
        ({"sites": np.array(["a"] * 119 + [None], dtype=object)}, r"sites: a record has no site"),
        ({"sites": [0] * COUNT, "set": {"federation.epochs": 0}}, "federation.epochs = 0: "),
        ({"set": {"federation.epochs": "two"}}, "federation.epochs = 'two': "),
        ({"sites": ["a"] * 119 + [float("nan")]}, r"sites: a record has no site \(nan\)"),
        ({"sites": np.array(["a"] * 119 + [1], dtype=object)}, "sites: .* or sites are of several types"),
        (
            {
                "train": list(zip(FEATURES, LABELS, strict=True)),
                "test": [PLAIN] * COUNT,
                "sites": [0] * COUNT,
            },
            "as many as train has data sets",
        ),
        ({"train": [([[1.0, 2.0], [3.0]], [0, 1])]}, "expected numbers in an array of one shape"),
        ({"train": by_silo((60, 60)), "sites": [0] * COUNT}, "leave sites out"),
        ({"train": by_silo((60, 60)), "test": by_silo((40, 40, 40))}, "as many as train has data sets"),
        ({"train": [((), [1])]}, "give as many records of each"),
        ({"set": {"federation.batches": [[6, 12], [3, 6]]}}, "different sums need different numbers of rounds"),
        ({"set": {"federation.batches": [["six", "twelve"]]}}, "federation.batches.0 = 'six': expected a whole"),
        ({"train": [PLAIN, (FEATURES[:, :2], LABELS)]}, r"train\[0\] and train\[1\]: .* must be alike"),
        ({"train": None, "test": None, "fields": (0, 1)}, "sites, fields: are of train and test"),
        (
            {"train": by_silo((60, 60)), "set": {**FAST, "federation.silos": 3}},
            "federation.silos = 3: the records are of 2 sites",
        ),
    ],
)
def test_inconsistent_sites_and_silo_data_sets_are_refused_in_one_line(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=line) as caught:
        run(tmp_path / "run", **changes)
    assert "\n" not in str(caught.value)


def test_a_missing_site_of_pandas_is_refused_in_one_line(tmp_path: Path) -> None:
    """Before: a TypeError, since NA has no truth value."""
    pandas = pytest.importorskip("pandas", reason="needs pip install 'fedpriv[checks]'")
    with pytest.raises(InputError, match="sites: a record has no site"):
        run(tmp_path / "run", sites=pandas.Series(["a"] * 119 + [None], dtype="string"))


@pytest.mark.parametrize("form", ["pandas", "polars"])
def test_data_frames_of_features_with_a_target_series_are_loaded(form: str, tmp_path: Path) -> None:
    library = pytest.importorskip(form, reason="needs pip install 'fedpriv[checks]'")
    frame = library.DataFrame(dict(zip("abcd", PLAIN[0].T, strict=True)))
    target = library.Series(PLAIN[1])
    features, labels = to_record_arrays((frame, target), "train")
    np.testing.assert_array_equal(features, PLAIN[0])
    np.testing.assert_array_equal(labels, PLAIN[1])
    with pytest.raises(InputError, match=r"train: is a DataFrame; give \(frame\[columns\], frame\[target\]\)"):
        to_record_arrays(frame, "train")


# Numbers that nobody wrote (N1, F6).


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.name": "dp-adam"},
        {"algorithm.name": ["dp-sgd", "dp-ftrl"]},
        {"algorithm.name": "dp-adam", "federation.rounds": 10},
        {"algorithm.clip": 0.3, "federation.rounds": [2, 4]},
        {"federation.batch": 10},
        {"federation.batch": 10, "federation.rounds": 3},
        {"federation.batch": 10, "federation.rounds": 24},
        {"federation.batches": [[6, 12]]},
        {"federation.epochs": 2},
        {"federation.samples": 100, "algorithm.name": "dp-adam"},
        {"federation.size_skew": 5.0},
        {"privacy.unit": "client", "privacy.records": 10},
        {"federation.clients": 12, "federation.cohort": 4, "privacy.unit": "client", "privacy.records": 5},
        slow({"federation.sampling": "poisson", "federation.batch": 5, "federation.rounds": 6}),
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_own_records_train_under_many_algorithm_and_federation_settings(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    base = {} if "federation.clients" in changes else {"federation.silos": 2}
    results = fedpriv.run("own-data", train=PLAIN, test=PLAIN, set={**base, **changes}, out=tmp_path / "run")
    assert all(np.isfinite(cell.test_loss) for cell in results)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"privacy.epsilon": -1, "federation.rounds": 10}, "privacy.epsilon = -1"),
        ({"privacy.epsilon": "three"}, "privacy.epsilon"),
        ({"algorithm.clip": 0.0}, "algorithm.clip"),
        ({"federation.silos": 121}, "silos|samples = 120"),
    ],
)
def test_error_messages_name_user_settings_and_no_default_values(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=line) as caught:
        fedpriv.run("own-data", train=PLAIN, test=PLAIN, set=changes, out=tmp_path / "run")
    assert "6000" not in str(caught.value)
    assert "epochs = 50" not in str(caught.value)
