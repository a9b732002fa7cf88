"""docs/papers.md: all 67 items, each with code that exists and a command that a block of the page runs."""

import ast
import re

from tests.doc_pages import ROOT

PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| \d+\. ", line)]


def defined_names(path: str) -> set[str]:
    tree = ast.parse((ROOT / "fedpriv" / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_all_items_of_the_papers_are_listed_once() -> None:
    assert [int(row.split(".")[0].removeprefix("| ")) for row in ROWS] == list(range(1, 68))


def test_every_code_reference_of_the_papers_page_exists() -> None:
    entries = re.findall(r"`([\w/]+\.py):(\w+)`", PAGE)
    assert len(entries) > 55
    assert [entry for entry in entries if entry[1] not in defined_names(entry[0])] == []


def test_every_item_has_a_command_or_a_reason() -> None:
    for row in ROWS:
        _, _, mark, code, command, difference, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", row))
        assert mark in {"=", "clip", "erratum", "own", "no"}, row
        assert (code and command) or difference, row


def test_every_command_of_the_papers_page_is_in_a_tested_block() -> None:
    """A block is executed by tests/test_docs.py, or says that its commands are long."""
    shown = set(re.findall(r"`(fedpriv [^`]+)`", "\n".join(ROWS))) - {"fedpriv plot"}
    in_blocks = set(re.findall(r"^(fedpriv .*?)(?:  +#.*)?$", PAGE, flags=re.MULTILINE))
    assert len(shown) > 15
    assert shown <= in_blocks
