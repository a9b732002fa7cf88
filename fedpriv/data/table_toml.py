"""A table's public description as TOML, as scenarios and policies have it."""

import json
from collections.abc import Mapping
from typing import Any

from fedpriv.data.table_schema import TableSchema


def schema_toml(schema: TableSchema, header: str) -> str:
    """[header] and [header.columns], a line a column; defaults are left out."""
    tree = schema.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    columns: Mapping[str, Mapping[str, Any]] = tree.pop("columns")
    lines = [
        f"[{header}]",
        *(f"{key} = {_value(value)}" for key, value in tree.items()),
        "",
        f"[{header}.columns]",
    ]
    for name, column in sorted(columns.items()):
        inside = ", ".join(f"{key} = {_value(value)}" for key, value in column.items())
        lines.append(f"{_value(name)} = {{ {inside} }}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """JSON's spelling of numbers, texts, booleans and lists is TOML's too, but for characters beyond 16 bits."""
    return json.dumps(value, ensure_ascii=False)
