"""Extension of griffe that shows the doctests below "Example:" as code."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Rename sections "Example:", since griffe reads doctests below "Examples:" only."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
