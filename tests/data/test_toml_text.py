"""Texts of TOML that are written by hand: whatever a column or a class is called, the file reads back the same."""

import tomllib

import pytest

from fedpriv.data.schema import FeatureColumn, TableSchema
from fedpriv.data.tables import format_schema_toml, format_toml_value
from fedpriv.silo.demo import format_toml

NAMES = ["plain", "two words", 'a"b', "back\\slash", "tab\tnew\nline", "delete\x7f", "nul\x00", "é µ 𝔐", "a.b", ""]


@pytest.mark.parametrize("name", NAMES)
def test_every_column_and_class_name_survives_a_toml_round_trip(name: str) -> None:
    """Before, U+007F stood raw in the file, which is no TOML then."""
    assert tomllib.loads(format_toml({"key": [name, {"inner": name}]})) == {"key": [name, {"inner": name}]}
    if name:
        schema = TableSchema(
            public=True, target="t", classes=(name, "other"), columns={name: FeatureColumn(values=(name, "b"))}
        )
        read = tomllib.loads(format_schema_toml(schema, "data.table"))["data"]["table"]
        assert TableSchema.model_validate(read) == schema


@pytest.mark.parametrize(
    "value", [0.1, -1e-320, 1e300, 3, True, [], [1, [2.5, "x"]], {"a": [1], "b": {"c": False}}]
)
def test_every_toml_value_is_written_in_one_line_and_survives_a_round_trip(value: object) -> None:
    text = format_toml_value(value)
    assert "\n" not in text
    assert tomllib.loads(f"key = {text}") == {"key": value}
