"""Slips of the hand, over the syntax tree: where one can happen, and the source with it.

A slip changes one expression or statement and no line number.  Texts for people (docstrings, messages, what a
`raise` or a log says), annotations and `__all__` have none.
"""

import ast
import copy
import hashlib
import itertools
import random
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.mutants.listing import ROOT

ROOMS = (
    *(
        "accounting",
        "noise",
        "noise/integers",
        "noise/fitting",
        "participation",
        "loss",
        "plan",
        "rounds",
        "claims",
    ),
    *("silo", "server", "protocol", "data"),
)
_COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
}
_ARITHMETIC: dict[type, type] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
}
_COMMUTATIVE = ("min", "max", "minimum", "maximum", "fmin", "fmax", "gcd", "lcm", "logaddexp")
"""Functions of which no test sees the order of two arguments, NaN apart."""
_NAMES = {"min": "max", "minimum": "maximum", "argmin": "argmax", "ceil": "floor"}
_NAMES |= {after: before for before, after in _NAMES.items()}
_REFUSALS = ("check_", "_check_", "require_", "_require_", "refuse_", "_refuse_")
_SPEAKERS = {"_log", "log", "logger", "logging", "print", "warnings"}
_ATOMS = ast.Constant | ast.Name | ast.Attribute | ast.Call | ast.Slice | ast.stmt


@dataclass(frozen=True)
class Slip:
    """A slip, by the bytes of its file that it replaces, and the tests' way to it."""

    file: str
    function: str
    """Qualified name of the function, or "" for what runs at import."""
    operator: str
    before: str
    after: str
    """Source lines without and with the slip."""
    repeated: int = field(compare=False)
    """Number of earlier slips of the function that read the same."""
    start: int = field(compare=False)
    stop: int = field(compare=False)
    text: str = field(compare=False)
    lines: range = field(compare=False)
    statement: range = field(compare=False)
    """Lines of the expression, and of the statement around it without its block."""
    names: tuple[str, ...] = field(compare=False)
    body: range = field(compare=False)
    """For what runs at import: names that the statement defines, and the lines of a function that it defines."""

    @property
    def id(self) -> str:
        key = "\0".join((self.file, self.function, self.operator, self.before, self.after, str(self.repeated)))
        return hashlib.sha256(key.encode()).hexdigest()[:12]

    @property
    def room(self) -> str:
        return room_of(self.file)

    @property
    def where(self) -> str:
        return f"{self.file}:{self.lines.start}"

    def applied(self, source: str) -> str:
        """Return the source of the file with the slip."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.stop :]).decode()

    def changes(self, source: str) -> bool:
        """Whether the slip is Python, and compiles to something else."""
        try:
            return _differ(compile(source, self.file, "exec"), compile(self.applied(source), self.file, "exec"))
        except SyntaxError:
            return False


def _differ(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two code objects do something else, line numbers apart."""
    if len(one.co_consts) != len(other.co_consts):
        return True
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable")
    return any(getattr(one, name) != getattr(other, name) for name in names) or any(
        _differ(left, right)
        if isinstance(left, types.CodeType) and isinstance(right, types.CodeType)
        else repr(left) != repr(right)
        for left, right in zip(one.co_consts, other.co_consts, strict=True)
    )


def room_of(file: str) -> str:
    """Room of a file, the longest that fits."""
    folder = file.removeprefix("fedpriv/")
    return max((room for room in ROOMS if folder.startswith(f"{room}/")), key=len, default="")


def sources(folders: Iterable[str], root: Path = ROOT) -> list[str]:
    paths = (path for folder in folders for path in (root / folder).rglob("*.py"))
    return sorted(str(path.relative_to(root)) for path in paths)


def sites(source: str, file: str, functions: Collection[str] | None = None) -> list[list[Slip]]:
    """Slips of a file, or of some functions of it, by site, that is place and operator, in its order."""
    finder = _Finder(source, file, functions)
    finder.visit(ast.parse(source), "", None)
    return finder.sites


def all_sites(root: Path = ROOT) -> list[list[Slip]]:
    """Sites of the rooms, by file and place."""
    files = [file for file in sources(("fedpriv", "server"), root) if room_of(file)]
    return [site for file in files for site in sites((root / file).read_text(encoding="utf-8"), file)]


def draw(
    every_site: Sequence[list[Slip]], rooms: Sequence[str], count: int, seed: int, root: Path = ROOT
) -> list[Slip]:
    """Draw slips, uniformly over the sites; a smaller count gives the first of them."""
    chosen = [site for site in every_site if site[0].room in rooms]
    generator = random.Random(seed)
    slips = (generator.choice(site) for site in generator.sample(chosen, len(chosen)))
    real = (slip for slip in slips if slip.changes((root / slip.file).read_text(encoding="utf-8")))
    return list(itertools.islice(real, count))


class _Finder:
    def __init__(self, source: str, file: str, functions: Collection[str] | None) -> None:
        self.sites: list[list[Slip]] = []
        self._functions = functions
        self._file = file
        self._data = source.encode()
        self._starts = [0, *itertools.accumulate(len(line) for line in self._data.splitlines(keepends=True))]
        self._seen: dict[tuple[str, ...], int] = {}

    def visit(self, node: ast.AST, function: str, statement: ast.stmt | None) -> None:
        if _is_text(node):
            return
        if isinstance(node, ast.stmt):
            statement = node
        if statement is not None and hasattr(node, "lineno"):
            found: dict[str, list[ast.AST]] = {}
            for operator, new in _slips(node):
                found.setdefault(operator, []).append(new)
            for operator, variants in found.items():
                self._add(node, operator, variants, function, statement)
        for test in _conditions(node):
            self._add(test, "condition", [ast.UnaryOp(ast.Not(), test)], function, statement)
        for name, value in ast.iter_fields(node):
            inside = function
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and name == "body":
                inside = f"{function}.{node.name}".lstrip(".")
                inside = _Class(inside) if isinstance(node, ast.ClassDef) else inside
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns", "ctx"):
                    self.visit(child, inside, statement)
            if (
                name in ("body", "orelse")
                and isinstance(node, ast.If)
                and value
                and isinstance(value[-1], ast.Raise)
            ):
                self._add(value[-1], "refusal", [ast.Pass()], function, value[-1])

    def _add(self, node: Any, operator: str, variants: Sequence[ast.AST], function: str, statement: Any) -> None:
        if isinstance(node, ast.stmt) and hasattr(node, "body"):
            return
        start = self._starts[node.lineno - 1] + node.col_offset
        stop = self._starts[node.end_lineno - 1] + node.end_col_offset
        first, last = self._starts[node.lineno - 1], self._starts[node.end_lineno]
        at_import = isinstance(function, _Class) or not function
        if self._functions is not None and ("" if at_import else function) not in self._functions:
            return
        site = []
        for new in variants:
            text, lines = ast.unparse(new), "\n" * (node.end_lineno - node.lineno)
            is_closed = isinstance(new, ast.stmt) or (isinstance(new, _ATOMS) and not lines)
            text = f"{text}{lines}" if is_closed else f"({text}{lines})"
            before = _tidy(self._data[first:last])
            after = _tidy(self._data[first:start] + text.encode() + self._data[stop:last])
            key = ("" if at_import else function, operator, before, after)
            repeated = self._seen[key] = self._seen.get(key, -1) + 1
            site.append(
                Slip(
                    file=self._file,
                    function="" if at_import else function,
                    operator=operator,
                    before=before,
                    after=after,
                    repeated=repeated,
                    start=start,
                    stop=stop,
                    text=text,
                    lines=range(node.lineno, node.end_lineno + 1),
                    statement=_header(statement),
                    names=_defined(statement) if at_import else (),
                    body=_body(statement) if at_import else range(0),
                )
            )
        self.sites.append(site)


class _Class(str):
    """Name of a class whose body is being read, which runs at import."""


def _tidy(lines: bytes) -> str:
    return "\n".join(line.strip() for line in lines.decode().splitlines() if line.strip())


def _header(statement: Any) -> range:
    block = getattr(statement, "body", None)
    return range(
        statement.lineno, 1 + (max(statement.lineno, block[0].lineno - 1) if block else statement.end_lineno)
    )


def _body(statement: Any) -> range:
    is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
    return range(statement.lineno + 1, statement.end_lineno + 1) if is_function else range(0)


def _defined(statement: Any) -> tuple[str, ...]:
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    names = [each.id for target in targets if target for each in ast.walk(target) if isinstance(each, ast.Name)]
    return (*names, *([statement.name] if hasattr(statement, "name") else []))


def _called(node: ast.AST) -> str:
    """Dotted name of what a call calls, as far as it has one."""
    if isinstance(node, ast.Call):
        node = node.func
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _is_text(node: ast.AST) -> bool:
    """Whether a node is a text for people, a type or a list of names."""
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.pattern() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call() as call):
            return _called(call).partition(".")[0] in _SPEAKERS
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Subscript(value=ast.Name(id="Literal" | "Annotated" | "Callable")):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def _conditions(node: ast.AST) -> list[ast.expr]:
    """Conditions to negate; one that is a negation already loses it as a slip of its own."""
    tests = [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else getattr(node, "ifs", [])
    return [test for test in tests if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not))]


def _with(node: Any, **fields: Any) -> Any:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _replaced(items: list[Any], index: int, new: Any) -> list[Any]:
    return [*items[:index], new, *items[index + 1 :]]


def _is_number(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _slips(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in place of a node, with the operator's name."""
    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                for new in _COMPARISONS.get(type(op), ()):
                    yield "comparison", _with(node, ops=_replaced(ops, index, new()))
        case ast.BinOp(left=left, op=op, right=right) if not _is_string(left) and not _is_string(right):
            if type(op) in _ARITHMETIC:
                yield "sign", _with(node, op=_ARITHMETIC[type(op)]())
        case ast.AugAssign(op=op, value=value) if type(op) in _ARITHMETIC and not _is_string(value):
            yield "sign", _with(node, op=_ARITHMETIC[type(op)]())
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "sign", operand
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "condition", operand
        case ast.Constant(value=value) if _is_number(node):
            written = Decimal(repr(value))
            digit = written.normalize().as_tuple().exponent if isinstance(value, float) else 0
            step = Decimal((0, (1,), int(digit)))
            yield from (("constant", ast.Constant(type(value)(new))) for new in (written + step, written - step))
        case ast.BoolOp(op=op):
            yield "logic", _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.Name(id=name, ctx=ast.Load()) if name in _NAMES:
            yield "extreme", _with(node, id=_NAMES[name])
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in _NAMES:
            yield "extreme", _with(node, attr=_NAMES[name])
        case ast.Expr(value=ast.Call() as call):
            is_refusal = _called(call).rpartition(".")[2].startswith(_REFUSALS)
            yield "refusal" if is_refusal else "call", ast.Pass()
        case ast.Return(value=None):
            yield "return", ast.Pass()
        case ast.Return(value=ast.Constant(value=bool() as value)):
            yield "return", _with(node, value=ast.Constant(not value))
        case ast.Return():
            yield "return", ast.Return(ast.Constant(None))
            yield "return", ast.Pass()
        case ast.Slice(lower=lower, upper=upper):
            yield from (("bound", _with(node, lower=new)) for new in _moved(lower, 1))
            yield from (("bound", _with(node, upper=new)) for new in _moved(upper, -1))
    if isinstance(node, ast.Call):
        args = node.args
        if _called(node) == "range":
            for index, argument in enumerate(args):
                yield from (
                    ("bound", _with(node, args=_replaced(args, index, new))) for new in _moved(argument, 1)
                )
        commutes = _called(node).rpartition(".")[2] in _COMMUTATIVE
        for index, (one, other) in enumerate(() if commutes else itertools.pairwise(args)):
            if ast.dump(one) != ast.dump(other) and not any(
                isinstance(each, ast.Starred) for each in (one, other)
            ):
                yield "arguments", _with(node, args=[*args[:index], other, one, *args[index + 2 :]])


def _moved(bound: ast.expr | None, missing: int) -> list[ast.expr]:
    """A bound that is one off; a number is a constant's slip."""
    if bound is None:
        return [ast.Constant(missing)]
    if _is_number(bound) or isinstance(bound, ast.Starred):
        return []
    return [ast.BinOp(bound, op, ast.Constant(1)) for op in (ast.Add(), ast.Sub())]
