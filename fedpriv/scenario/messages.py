"""Messages for users on faults in a scenario or a policy, mostly made from pydantic's findings.

A finding is pydantic's record of one fault of one key: the path of the key, the type of the fault and the value.
"""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedpriv.core.errors import InputError, sanitize_line

_EXPECTED_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": 'a text in quotes, such as "mnist"',
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "model_type": "a table of keys",
    "dict_type": "a table of keys",
}


_SYNONYMS = {
    **dict.fromkeys(("lr", "learning_rate", "eta", "step_size"), "algorithm.step"),
    **dict.fromkeys(("max_grad_norm", "clip_norm", "clipping_norm", "l2_norm_clip"), "algorithm.clip"),
    **dict.fromkeys(("batch_size", "batchsize"), "federation.batch"),
    **dict.fromkeys(("num_rounds", "n_rounds", "iterations", "steps"), "federation.rounds"),
    **dict.fromkeys(("num_clients", "n_clients", "num_silos", "parties"), "federation.silos"),
    **dict.fromkeys(("eps", "target_epsilon"), "privacy.epsilon"),
    **dict.fromkeys(("target_delta",), "privacy.delta"),
    **dict.fromkeys(("gpu", "cuda"), "run.device"),
    **dict.fromkeys(
        ("noise_multiplier", "sigma", "noise"),
        "privacy.epsilon, from which the noise follows (`fedpriv privacy spent` goes from noise to ε)",
    ),
}
"""Key of a scenario for names that other libraries have for it."""
_VALUE_NOTES = {
    **dict.fromkeys(
        ("add-remove", "add_remove", "add-or-remove", "add_or_remove_one"),
        "; 'zero-out' is the relation of records that are there or not: one is replaced by zeros, and counts stay",
    ),
    **dict.fromkeys(("replace_one", "substitute", "replace", "swap"), "; one record is exchanged: 'replace-one'"),
}
"""End of a message on a value that other libraries have."""


SectionModel = TypeVar("SectionModel", bound=BaseModel)


def validate_section(
    model: type[SectionModel],
    values: Any,
    source: str,
    section: str = "",
    other_model: type[BaseModel] | None = None,
) -> SectionModel:
    """Validate values as a section.

    Args:
        model: Type of the section.
        values: Parsed TOML of the section.
        source: Name of the file in messages, or "" where it is not known.
        section: Dotted name of the section, put before its keys.
        other_model: Model of keys of the same section that are read elsewhere, for suggestions.

    Raises:
        InputError: The section is malformed.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InputError(
            f"{source}{': ' if source else ''}{format_validation_error(error, model, section, other_model)}"
        ) from None


def format_validation_error(
    error: ValidationError, model: type[BaseModel], prefix: str = "", other_model: type[BaseModel] | None = None
) -> str:
    """Format the findings on one key in a line, with the number of other keys that have findings.

    An unknown key goes before all others.  A missing key that it resembles is not counted.

    Args:
        error: Error of pydantic, with one finding at least.
        model: Type of the section.
        prefix: Dotted name of the section, put before the key.
        other_model: Model of keys of the same section that are read elsewhere, for suggestions.
    """
    # Keys in pydantic's order, each with its findings.
    by_key: dict[str, list[ErrorDetails]] = {}
    for finding in error.errors(include_url=False):
        by_key.setdefault(".".join(_key_path(finding)), []).append(finding)
    unknown_keys = [key for key, findings in by_key.items() if findings[0]["type"] == "extra_forbidden"]
    # A mistyped key comes first, since another key may be missing for this reason alone.
    first = unknown_keys[0] if unknown_keys else next(iter(by_key))
    line = _format_findings(by_key[first], model, prefix, other_model)
    # The missing key that was mistyped is not counted.
    missing = {key for key, findings in by_key.items() if findings[0]["type"] == "missing"}
    remaining = len(by_key) - 1 - len(_intended_keys(by_key[first][0], model) & missing)
    return f"{line} (and {remaining} more)" if remaining else line


def _intended_keys(finding: ErrorDetails, model: type[BaseModel]) -> set[str]:
    """Return the dotted known key that an unknown one resembles, as a set of one, or an empty set."""
    path = _key_path(finding)
    if finding["type"] != "extra_forbidden" or not (close := _close_keys(path, model)[0]):
        return set()
    return {".".join([*path[:-1], close[0]])}


def _key_path(finding: ErrorDetails) -> list[str]:
    return [str(part) for part in finding["loc"] if not _is_union_branch(part)]


def _format_findings(
    findings: list[ErrorDetails], model: type[BaseModel], prefix: str, other_model: type[BaseModel] | None
) -> str:
    """Format all findings on one key in one line.

    A key that may have one of several types may have a finding for each type.  The line has a suggestion for an
    unknown key, any description of a missing key, the message of a validator of fedpriv, or otherwise the value,
    what each type accepts, and a note if other libraries have the value.

    The arguments after `findings` are those of `format_validation_error`.
    """
    first_finding = findings[0]
    path = _key_path(first_finding)
    key = sanitize_line(".".join(filter(None, [prefix, *path])))
    error_type = first_finding["type"]
    if error_type == "extra_forbidden":
        return f"{key}: unknown key{_format_suggestion(path, model, other_model)}"
    if error_type == "missing":
        return f"{key}: this key is missing{_format_description(path, model)}"
    if error_type == "value_error":
        return f"{key}: {first_finding['ctx']['error']}" if key else str(first_finding["ctx"]["error"])
    note = _VALUE_NOTES.get(str(first_finding["input"]), "")
    return f"{key} = {first_finding['input']!r}: expected {' or '.join(map(_format_expectation, findings))}{note}"


def _format_expectation(finding: ErrorDetails) -> str:
    """Describe the values that a finding would accept, as in "a number above 0".

    Bounds, choices and patterns come from the finding's context.  A type of finding in `_EXPECTED_TYPES` has its
    text there, and any other finding has pydantic's own message.
    """
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
    """Whether a part of pydantic's path looks like the member of a union, as a user's key "int" does, too."""
    if not isinstance(part, str):
        return False
    return part in {"float", "int", "str", "bool"} or part.startswith(
        ("literal[", "constrained-", "tuple[", "function-")
    )


def _find_section(path: list[str], model: type[BaseModel]) -> type[BaseModel]:
    """Return the model of the section that holds the last key of a path.

    If a part of the path is no section, the result is the model of the section in which this part stands.

    Args:
        path: Keys from `model` to the key, the key last.
        model: Type of the section at which the path begins.
    """
    for part in path[:-1]:
        field = model.model_fields.get(part)
        types = (field.annotation, *get_args(field.annotation)) if field else ()  # of X | None, also X
        if not (sections := [kind for kind in types if isinstance(kind, type) and issubclass(kind, BaseModel)]):
            return model
        model = sections[0]
    return model


def _close_keys(
    path: list[str], model: type[BaseModel], other_model: type[BaseModel] | None = None
) -> tuple[list[str], list[str]]:
    """Return the known keys that resemble an unknown one, and all known keys.

    Known keys are those of the section in which the unknown one stands, and of `other_model`.  For a key at the
    top of `model` they are also the keys SECTION.KEY of this name.

    Args:
        path: Keys from `model` to the unknown key, the key last.
        model: Type of the section at which the path begins.
        other_model: Model of keys of the same section that are read elsewhere, or None.

    Returns:
        Two lists.  The first has the keys SECTION.KEY of the same name, or else the closest known key if one is
        close.  The second has all known keys.
    """
    known_keys = [
        *(other_model.model_fields if other_model is not None else ()),
        *_find_section(path, model).model_fields,
    ]
    if len(path) == 1:  # the key may belong to a section
        sections = list(_find_section(path, model).model_fields)
        known_keys += [
            f"{name}.{path[0]}" for name in sections if path[0] in _find_section([name, *path], model).model_fields
        ]
    close = [key for key in known_keys if key.endswith(f".{path[-1]}")] or difflib.get_close_matches(
        path[-1], known_keys, n=1
    )
    return close, known_keys


def _format_suggestion(path: list[str], model: type[BaseModel], other_model: type[BaseModel] | None) -> str:
    close, known_keys = _close_keys(path, model, other_model)
    section, _, key = (synonym := _SYNONYMS.get(path[-1].lower(), "")).partition(".")
    # A policy has none of these sections, and not every algorithm has a step and a clip.
    is_key = bool(other_model and section) and (section != "algorithm" or key in known_keys)
    return (
        f"; the key is {synonym}"
        if is_key or section in model.model_fields
        else f"; did you mean {close[0]!r}?"
        if close
        else f"; known keys here: {', '.join(known_keys) or 'none'}"
    )


def _format_description(path: list[str], model: type[BaseModel]) -> str:
    field = _find_section(path, model).model_fields.get(path[-1])
    return f" ({field.description})" if field is not None and field.description else ""


def format_fitting_batches(records: int, batches: int, batch: int) -> str:
    """Describe the batches for which the training records suffice, and the keys that change them.

    Args:
        records: Number of training records.
        batches: Number of batches of one pass.
        batch: Number of records of each of them.
    """
    batch_count, batch_size = records // batch, records // batches
    fitting = [f"{batch_count} batches of {batch}"] * (batch_count > 0) + [f"{batches} of {batch_size}"] * (
        batch_size > 0
    )
    text = f"enough for {', or '.join(fitting)}" if fitting else "too few for either"
    return f"{records} training records: {text}; change federation.rounds, silos, samples or batch"
