"""Examples in docstrings of the product give what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

from tests.words import ROOT, product_files

EXAMPLES = [path for path in product_files() if "\n        >>> " in path.read_text(encoding="utf-8")]


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name if name.startswith("fedpriv.") else f"fedpriv.{name}"


@pytest.mark.parametrize("path", EXAMPLES, ids=module_name)
def test_docstring_examples_give_their_printed_output(path: Path) -> None:
    result = doctest.testmod(importlib.import_module(module_name(path)))
    assert result.attempted > 0
    assert result.failed == 0
