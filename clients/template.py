"""A policy file to start from: every key with what it means, made from the keys themselves."""

import json
import textwrap
from pathlib import Path

from pydantic import BaseModel

from fedpriv.clients.policy import Allowed, Evaluated, Policy
from fedpriv.clients.writers import keep_to_owner
from fedpriv.errors import InputError

_EXAMPLES: dict[str, object] = {
    "silo": 0,
    "shard": "shard.npz",
    "classes": 10,
    "ledger": "ledger.sqlite",
    "socket": "silo.sock",
    "relation": "replace-one",
    "clip": 1.0,
    "rounds": 100,
    "budget": 1.0,
}
"""Of keys that a policy over images needs: a value to be replaced."""
_WIDTH = 100


def write_template(path: Path) -> None:
    """Write a policy file to be edited; InputError if there is a file."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(template())
        keep_to_owner(path)
    except FileExistsError:
        raise InputError(f"{path} exists; a template is written to a new file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error}") from None


def template() -> str:
    """Keys that have to be chosen have an example, the others are commented out at their default."""
    evaluated = "".join(f"# {line}\n" for line in ["[evaluation]", *_section(Evaluated).splitlines()])
    return f"{_section(Policy)}\n[allow]\n{_section(Allowed)}\n{evaluated}"


def _section(model: type[BaseModel]) -> str:
    lines: list[str] = []
    for name, field in model.model_fields.items():
        if name in ("allow", "evaluation"):
            continue
        lines += textwrap.wrap(field.description or "", _WIDTH, initial_indent="# ", subsequent_indent="# ")
        if name in _EXAMPLES:
            lines.append(f"{name} = {json.dumps(_EXAMPLES[name])}  # choose")
        else:
            lines.append(f"# {name} = {'(none)' if field.default is None else json.dumps(field.default)}")
    return "\n".join(lines) + "\n"
