"""Count the places of a source at which a newcomer stumbles: names and openings of docstrings.

    python -m tests.words [KIND]       counts of the product, or the places of one kind

A name counts once for each function, class or module that binds it.  docs/glossary.md has the words to use.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PRODUCT = ("fedpriv", "server", "clients")
_PARTICIPLES = """
asked told said held kept seen found given known taken made done sent named wanted meant put shown laid left
let looked heard drawn tried missed noted counted listed marked passed met owed lent dealt spent carried
waited answered allowed charged opened written read_off begun gone moved added chosen wished thrown pulled
ended planned spelled presumed priced reached shared hidden each every own here there beside behind following
apart together alone anew again once first_of several others whole least most words whose where which what who
whom
"""
_PREPOSITIONS = "at of to by from_ back within only under over into upon along around between beyond out off up"
PARTICIPLES = frozenset(_PARTICIPLES.split())
"""Everyday participles and adverbs, which say what happened to a value and not what it is."""
BARE_FUNCTIONS = PARTICIPLES | frozenset(_PREPOSITIONS.split())
OPENINGS = re.compile(
    r"(What|Of|Which|Where|Whose|Who|Whoever|Whatever|Those|These|That|This|It|Its|They|Their|As|From|By|In|On|At|To|"
    r"Under|After|Before|Beside|Between|While|With|Without|Within|For|So|Such|How|If|All|Both|Each|Every|Nothing|"
    r"Nobody|Somebody|Up to|Not|And|But|Or|One's)\b"
)
CLAUSES = re.compile(
    r"\b(whoever|whatever it|of whom|of which|nobody|somebody|anybody|in vain|goes? on|let go|lets go|puts? to|"
    r"is told|are told|that asks?\b|hears?|as it is|of its own|of one's own|of their own|so many|is there|"
    r"are there|that are there|such as has|what is|what was|what a|what it|what they|for itself|for themselves|"
    r"at home|in place of|there is none)\b",
    re.IGNORECASE,
)
LONGEST_SENTENCE = 100


class Place(NamedTuple):
    path: Path
    line: int
    text: str


def first_sentence(text: str) -> str:
    """Return the first sentence, which ends at a full stop, a blank line or a list."""
    paragraph = re.split(r"\n\s*\n|\n\s*(?=[-*|])", text.strip(), maxsplit=1)[0]
    return re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!cf\.)\s", re.sub(r"\s+", " ", paragraph), maxsplit=1)[0]


class SourceReader(ast.NodeVisitor):
    """Collect the places of one file by kind, and the names of its classes."""

    def __init__(self, path: Path) -> None:
        self.places: dict[str, list[Place]] = defaultdict(list)
        self.class_names: list[str] = []
        self._path, self._scopes = path, [set[str]()]

    def _note(self, kind: str, line: int, text: str) -> None:
        self.places[kind].append(Place(self._path, line, text))

    def _bind(self, name: str, line: int) -> None:
        if name.strip("_").lower() in PARTICIPLES and name not in self._scopes[-1]:
            self._scopes[-1].add(name)
            self._note("names", line, name)

    def _read_texts(self, owner: ast.AST, body: Sequence[ast.stmt]) -> None:
        for before, node in zip([owner, *body], body, strict=False):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                annotation = getattr(before, "returns", None) or getattr(before, "annotation", None)
                predicate = isinstance(annotation, ast.Name) and annotation.id == "bool"
                text, sentence = node.value.value.strip(), first_sentence(node.value.value)
                if OPENINGS.match(text) or (re.match(r"Whether\b", text) and not predicate):
                    self._note("openings", node.lineno, sentence)
                if CLAUSES.search(sentence):
                    self._note("clauses", node.lineno, sentence)
                if len(sentence) > LONGEST_SENTENCE:
                    self._note("long", node.lineno, sentence)
                if ";" in sentence:
                    self._note("semicolons", node.lineno, sentence)

    def _enter(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._scopes.append(set())
        self._read_texts(node, node.body)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_Module(self, node: ast.Module) -> None:
        self._read_texts(node, node.body)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._bind(node.name, node.lineno)
        self.class_names.append(node.name)
        self._enter(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name.strip("_").lower() in BARE_FUNCTIONS:
            self._note("functions", node.lineno, node.name)
        if not node.name.startswith("_") and not ast.get_docstring(node) and len(self._scopes) == 1:
            self._note("undocumented", node.lineno, node.name)
        self._enter(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that ast asks for

    def visit_arg(self, node: ast.arg) -> None:
        self._bind(node.arg, node.lineno)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._bind(node.id, node.lineno)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store):
            self._bind(node.attr, node.lineno)
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._bind(node.name, node.lineno)
        self.generic_visit(node)


def read_places(paths: Iterable[Path]) -> Mapping[str, list[Place]]:
    """Return the places of all files by kind; `classes` has each class whose name stands for another, too."""
    places, classes = defaultdict[str, list[Place]](list), defaultdict[str, list[Place]](list)
    for path in paths:
        reader = SourceReader(path)
        reader.visit(ast.parse(path.read_text(encoding="utf-8")))
        for kind, listed_places in reader.places.items():
            places[kind] += listed_places
        for name in reader.class_names:
            classes[name].append(Place(path, 0, name))
    places["classes"] = [places_of_name[0] for places_of_name in classes.values() if len(places_of_name) > 1]
    return places


def product_files() -> list[Path]:
    return [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]


if __name__ == "__main__":
    for kind, found_places in sorted(read_places(product_files()).items()):
        if sys.argv[1:] == [kind]:
            sys.stdout.writelines(f"{place.path}:{place.line}: {place.text}\n" for place in found_places)
        elif not sys.argv[1:]:
            sys.stdout.write(f"{kind}: {len(found_places)}\n")
