"""Reference tables made from the code when the site is built, so that they cannot be stale.

A line `<!-- generated: NAME -->` in a page is replaced by what `GENERATED[NAME]` returns.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from fedpriv.data.schema import FeatureColumn, TableSchema
from fedpriv.loss.models import MODELS
from fedpriv.papers.table import ALGORITHMS
from fedpriv.scenario.schema import Cell

_TYPES = {"integer": "a whole number", "number": "a number", "string": "a text", "boolean": "true or false"}
_BOUNDS = {
    "exclusiveMinimum": "above {:g}",
    "minimum": "at least {:g}",
    "exclusiveMaximum": "below {:g}",
    "maximum": "at most {:g}",
}


def scenario_reference() -> str:
    """List every key of every section of a scenario, with its values, default and meaning."""
    parts = []
    own = {name: field for name, field in Cell.model_fields.items() if not _is_section(field.annotation)}
    parts.append(f"### At the top\n\n{_table(Cell, own)}")
    for name, field in Cell.model_fields.items():
        if _is_section(field.annotation):
            section: Any = field.annotation
            parts.append(f"### [{name}]\n\n{_table(section, section.model_fields)}")
    for title, section in (("data.table", TableSchema), ("data.table.columns.NAME", FeatureColumn)):
        parts.append(f"### [{title}]\n\n{_table(section, section.model_fields)}")
    for name, model in MODELS.items():
        if model.settings.model_fields:
            title = f'### [model] with name = "{name}"'
            parts.append(f"{title}\n\n{_table(model.settings, model.settings.model_fields)}")
    return "\n\n".join(parts)


def algorithms_reference() -> str:
    """List every algorithm with its source and the keys that it adds to [algorithm]."""
    parts = []
    for name, row in ALGORITHMS.items():
        keys = _table(row.settings, row.settings.model_fields)
        parts.append(f"### {row.title}: `{name}`\n\n{row.source}.\n\n{keys}")
    return "\n\n".join(parts)


def commands_reference() -> str:
    """List every command with its help."""
    from typer.main import get_command

    from fedpriv.cli.app import app

    return "\n\n".join(_commands(get_command(app), "fedpriv"))


def _commands(command: Any, path: str) -> Iterator[str]:
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(inner, f"{path} {name}")
    if not hasattr(command, "commands"):
        yield f"### {path}\n\n{_help(command)}"


def _help(command: Any) -> str:
    options = [
        f"| `{_name(parameter)}` | {_cell(parameter.help or '')} |"
        for parameter in command.params
        if parameter.name != "help"
    ]
    text = inspect.cleandoc(command.help or "")
    return "\n".join([text, "", "| argument or option | |", "|---|---|", *options])


def _name(parameter: Any) -> str:
    """Write an option by its names, an argument as its usage line shows it."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return " ".join([*parameter.opts, *parameter.secondary_opts])


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _table(model: type[BaseModel], fields: Mapping[str, Any]) -> str:
    schema = model.model_json_schema()
    lines = ["| key | accepts | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        accepted = _accepted(schema["properties"][name])
        default = "**must be given**" if field.is_required() else _default(field.default)
        lines.append(f"| `{name}` | {_cell(accepted)} | {default} | {_cell(field.description or '')} |")
    return "\n".join(lines) if fields else "No keys of its own."


def _accepted(schema: Mapping[str, Any]) -> str:
    """Say from its JSON schema which values a key accepts."""
    if "anyOf" in schema:
        return " or ".join(_accepted(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema:
        return " or ".join(f'"{value}"' for value in schema["enum"])
    if "const" in schema:
        return f'"{schema["const"]}"'
    if schema.get("type") == "array":
        return f"a list, each {_accepted(schema.get('items', {}))}"
    bounds = [text.format(schema[bound]) for bound, text in _BOUNDS.items() if bound in schema]
    return " ".join([_TYPES.get(str(schema.get("type")), "any value"), ", ".join(bounds)]).strip()


def _default(value: Any) -> str:
    if value is None or value == "":
        return "none"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


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
