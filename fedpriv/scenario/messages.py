"""Pydantic's findings as lines a person can act on: the key, the value, and what would be accepted."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedpriv.core.errors import InputError

_EXPECTED_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": 'a text in quotes, such as "mnist"',
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "model_type": "a table of keys",
    "dict_type": "a table of keys",
}


SectionModel = TypeVar("SectionModel", bound=BaseModel)


def validate_section(
    kind: type[SectionModel], given: Any, source: str, section: str = "", beside: type[BaseModel] | None = None
) -> SectionModel:
    """`given` as a section of that kind; InputError in one line, with its `source`, if it is malformed.

    `beside` has the keys of the section that are read elsewhere, for suggestions.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise InputError(f"{source}: {format_validation_error(error, kind, section, beside)}") from None


def format_validation_error(
    error: ValidationError, model: type[BaseModel], prefix: str = "", beside: type[BaseModel] | None = None
) -> str:
    """The first finding (of several keys, how many more) in one line; `prefix` is put before its key."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for finding in error.errors(include_url=False):
        by_key.setdefault(".".join(_key_path(finding)), []).append(finding)
    unknown = [key for key, findings in by_key.items() if findings[0]["type"] == "extra_forbidden"]
    first = unknown[0] if unknown else next(iter(by_key))  # what was mistyped, before what is missing without it
    line = _format_findings(by_key[first], model, prefix, beside)
    missing = {key for key, findings in by_key.items() if findings[0]["type"] == "missing"}
    more = len(by_key) - 1 - len(_intended_keys(by_key[first][0], model) & missing)
    return f"{line} (and {more} more)" if more else line


def _intended_keys(finding: ErrorDetails, model: type[BaseModel]) -> set[str]:
    """The key that an unknown one may have been meant for, which is then missing for that reason alone."""
    path = _key_path(finding)
    if finding["type"] != "extra_forbidden" or not (close := _close_keys(path, model)[0]):
        return set()
    return {".".join([*path[:-1], close[0]])}


def _key_path(finding: ErrorDetails) -> list[str]:
    return [str(part) for part in finding["loc"] if not _is_union_branch(part)]


def _format_findings(
    findings: list[ErrorDetails], model: type[BaseModel], prefix: str, beside: type[BaseModel] | None
) -> str:
    """One line for all findings on one key: a key that admits several types has one for each."""
    first = findings[0]
    path = _key_path(first)
    key = ".".join(filter(None, [prefix, *path]))
    kind = first["type"]
    if kind == "extra_forbidden":
        return f"{key}: unknown key{_format_suggestion(path, model, beside)}"
    if kind == "missing":
        return f"{key}: this key is missing{_format_description(path, model)}"
    if kind == "value_error":
        return f"{key}: {first['ctx']['error']}" if key else str(first["ctx"]["error"])
    return f"{key} = {first['input']!r}: expected {' or '.join(map(_format_expectation, findings))}"


def _format_expectation(finding: ErrorDetails) -> str:
    context: Mapping[str, Any] = finding.get("ctx", {})
    bounds = {
        "greater_than": ("gt", "a number above {:g}"),
        "greater_than_equal": ("ge", "a number of at least {:g}"),
        "less_than": ("lt", "a number below {:g}"),
        "less_than_equal": ("le", "a number of at most {:g}"),
        "literal_error": ("expected", "{}"),
        "string_pattern_mismatch": ("pattern", "a text of the form {}"),
    }
    if finding["type"] in bounds:
        name, text = bounds[finding["type"]]
        return text.format(context[name])
    return _EXPECTED_TYPES.get(finding["type"], finding["msg"])


def _is_union_branch(part: str | int) -> bool:
    """Pydantic names the member of a union in the path ("literal['paper']", "float"); users never wrote it."""
    if not isinstance(part, str):
        return False
    return part in {"float", "int", "str", "bool"} or part.startswith(
        ("literal[", "constrained-", "tuple[", "function-")
    )


def _find_section(path: list[str], model: type[BaseModel]) -> type[BaseModel]:
    for part in path[:-1]:
        field = model.model_fields.get(part)
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return model
        model = annotation
    return model


def _close_keys(
    path: list[str], model: type[BaseModel], beside: type[BaseModel] | None = None
) -> tuple[list[str], list[str]]:
    """The known keys that an unknown one is close to, and all that are known."""
    known = [*(beside.model_fields if beside is not None else ()), *_find_section(path, model).model_fields]
    if len(path) == 1:  # a key that belongs into a section
        sections = list(_find_section(path, model).model_fields)
        known += [
            f"{name}.{path[0]}" for name in sections if path[0] in _find_section([name, *path], model).model_fields
        ]
    close = [key for key in known if key.endswith(f".{path[-1]}")] or difflib.get_close_matches(
        path[-1], known, n=1
    )
    return close, known


def _format_suggestion(path: list[str], model: type[BaseModel], beside: type[BaseModel] | None) -> str:
    close, known = _close_keys(path, model, beside)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys here: {', '.join(known) or 'none'}"


def _format_description(path: list[str], model: type[BaseModel]) -> str:
    field = _find_section(path, model).model_fields.get(path[-1])
    return f" ({field.description})" if field is not None and field.description else ""


def format_fitting_batches(records: int, batches: int, batch: int) -> str:
    """Say what so many training records are enough for: fewer batches, or smaller ones; and by which keys."""
    fewer, smaller = records // batch, records // batches
    fitting = [f"{fewer} batches of {batch}"] * (fewer > 0) + [f"{batches} of {smaller}"] * (smaller > 0)
    enough = f"enough for {', or '.join(fitting)}" if fitting else "too few for either"
    return f"{records} training records: {enough}; change federation.rounds, silos, samples or batch"
