"""Pages that are made from the code when the site is built, so that they cannot be stale.

A line `<!-- generated: NAME -->` in a page is replaced by what `GENERATED[NAME]` returns.
"""

import re
from collections.abc import Callable
from typing import Any

from fedpriv.cli.reference import algorithms_reference, commands_reference, scenario_reference

GENERATED: dict[str, Callable[[], str]] = {
    "scenario keys": scenario_reference,
    "algorithms": algorithms_reference,
    "commands": commands_reference,
}
_FOR_TESTS = re.compile(r"(  # )(?:long|network|manual): ")
_COMMENT = re.compile(r"^<!-- (?:long|network|manual): .* -->\n", flags=re.MULTILINE)
_MARK = re.compile(r"^<!-- generated: (.+) -->$", flags=re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for each page; KeyError for a name that nothing generates.

    What tells the tests which commands not to execute is no business of a reader's.
    """
    shown = _FOR_TESTS.sub(r"\1", _COMMENT.sub("", markdown))
    return _MARK.sub(lambda found: GENERATED[found[1]](), shown)
