"""Algorithms, models and data of one's own without a change to the package."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import fedpriv
from fedpriv.core import extensions
from fedpriv.loss.models import MODELS
from fedpriv.papers.table import ALGORITHMS, find_algorithm
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from tests.conftest import small_tree

DATA = """
import numpy as np
import fedpriv

def records():
    draw = np.random.default_rng(0)
    features = draw.standard_normal((60, 4))
    return (features[:40], features[:40, 0] > 0), (features[40:], features[40:, 0] > 0)

fedpriv.add_data("imported", records)
"""


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test adds is taken out again."""
    monkeypatch.delenv(extensions.IMPORT_VARIABLE, raising=False)
    models, algorithms, read = dict(MODELS), dict(ALGORITHMS), set(extensions._imported_extensions)
    yield
    MODELS.clear()
    MODELS.update(models)
    ALGORITHMS.clear()
    ALGORITHMS.update(algorithms)
    extensions._imported_extensions.clear()
    extensions._imported_extensions.update(read)
    os.environ.pop(extensions.IMPORT_VARIABLE, None)


@pytest.mark.slow
def test_an_imported_file_adds_data_in_this_process_and_in_subprocesses(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DATA, encoding="utf-8")
    extensions.import_files([tmp_path / "mine.py"])
    code = "from fedpriv.data.named import load; d = load('imported'); print(d.class_count, d.train_images.shape)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "2 (40, 4)"


def test_an_entry_point_package_is_imported_when_an_unknown_algorithm_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = "dataclasses.replace(ALGORITHMS['dp-sgd'], name='from-a-package')"
    text = (
        f"import dataclasses, fedpriv\nfrom fedpriv.papers.table import ALGORITHMS\nfedpriv.add_algorithm({row})"
    )
    (tmp_path / "some_package.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    entry = metadata.EntryPoint("any", "some_package", extensions.ENTRY_POINT_GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [entry] if group == entry.group else [])
    assert find_algorithm("from-a-package").title == ALGORITHMS["dp-sgd"].title


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("x = 1\nraise ValueError('two\\nlines')", "line 2: ValueError: two lines"),
        ("import fedpriv\nfedpriv.add_model('mlp', None)", "line 2: add_model: 'mlp' is a model of fedpriv"),
        ("import fedpriv\nfedpriv.add_data('mnist', None)", "line 2: add_data: 'mnist' is a data set of fedpriv"),
        ("def (", "SyntaxError"),
        (None, "cannot be read"),
    ],
)
def test_an_import_file_that_fails_is_refused_in_one_line_with_its_path(
    tmp_path: Path, text: str | None, part: str
) -> None:
    path = tmp_path / "bad.py"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(fedpriv.InputError) as caught:
        extensions.import_files([path])
    assert str(caught.value).startswith(f"--import {path}")
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert extensions.IMPORT_VARIABLE not in os.environ


def test_a_relative_path_in_the_variable_stands_for_the_file_that_the_option_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("once.py").write_text("from fedpriv.core import extensions\nextensions.note_table_change()", "utf-8")
    monkeypatch.setenv(extensions.IMPORT_VARIABLE, "once.py")
    revision = extensions.table_revision()
    extensions.load_extensions()
    extensions.import_files([Path("once.py")])
    assert extensions.table_revision() == revision + 1
    Path("bad.py").write_text("x = 1\nraise ValueError('it')", encoding="utf-8")
    monkeypatch.setenv(extensions.IMPORT_VARIABLE, "bad.py")
    with pytest.raises(fedpriv.InputError, match=r"bad\.py, line 2: ValueError: it"):
        extensions.load_extensions()


def test_a_path_with_the_separator_of_the_variable_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"a{os.pathsep}b.py"
    path.write_text("x = 1", encoding="utf-8")
    with pytest.raises(fedpriv.InputError, match=f"rename it without '{os.pathsep}'"):
        extensions.import_files([path])
    assert extensions.IMPORT_VARIABLE not in os.environ


def test_built_in_algorithms_cannot_be_replaced() -> None:
    with pytest.raises(fedpriv.InputError, match="'dp-sgd' is an algorithm of fedpriv"):
        fedpriv.add_algorithm(ALGORITHMS["dp-sgd"])


def test_a_data_set_added_again_under_one_name_is_loaded_again() -> None:
    cell = resolve_cell({**small_tree(), "data": {"name": "twice"}, "model": {"feature_norm": 1.0}}, "test")
    for classes in (2, 3):
        part = np.zeros((40, 4)), np.arange(40) % classes
        fedpriv.add_data("twice", lambda part=part: (part, part))
        assert load_task(cell).objective.dimension == 5 * classes
