"""What a tuning leaves: the scenario with the chosen settings, and a table of where they stand in the grid."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError
from fedpriv.figures import caveats, delta_figure, upper_figure
from fedpriv.files import write_json, write_text
from fedpriv.scenario import Scenario
from fedpriv.scenario.load import scenario_of
from fedpriv.scenario.tree import parsed_assignment
from fedpriv.scenario.tuned import Tuned
from fedpriv.tuning.grids import Place, places
from fedpriv.tuning.problem import HeldOut
from fedpriv.tuning.search import Choice

HEADER = ("row", "setting", "score", "next best", "place in the grid")


def tuned_text(
    text: str, choices: Sequence[Choice], tuned: Tuned, overrides: Sequence[str], source: str
) -> tuple[str, Scenario]:
    """The file `text` with a rule for every choice and [tuned], and its scenario; InputError if there is none."""
    blocks = [text.rstrip("\n"), ""]
    blocks += [
        f"# Settings by `fedpriv tune`, {tuned.settings} for every row, on {tuned.held_out} held-out records."
    ]
    for choice in choices:
        if choice.setting is not None:
            blocks += ["[[where]]", f"when = {_inline(choice.row.when)}", f"set = {_inline(choice.setting)}", ""]
    blocks += ["[tuned]"]
    blocks += [
        f"{key} = {_value(value)}"
        for key, value in tuned.model_dump(mode="json", exclude_none=True).items()
        if key != "rows"
    ]
    for row in tuned.rows:
        mu = "" if row.mu is None else f"\nmu = {_value(row.mu)}"
        blocks += ["", "[[tuned.rows]]", f"when = {_inline(row.when)}{mu}"]
    written = "\n".join(blocks) + "\n"
    try:
        return written, scenario_of(tomllib.loads(written), source, overrides)
    except (tomllib.TOMLDecodeError, InputError) as error:
        raise InputError(f"{source}: the chosen settings cannot be written into it: {error}") from None


def not_chosen(overrides: Sequence[str], choices: Sequence[Choice]) -> list[str]:
    """The KEY=VALUE of keys for which nothing was chosen: an override would outrank the choice."""
    chosen = {key for choice in choices for key in choice.setting or {}}
    return [each for each in overrides if parsed_assignment(each)[0] not in chosen]


def write_tuning(
    out: Path, text: str, choices: Sequence[Choice], tuned: Tuned, held_out: HeldOut, delta: float
) -> None:
    """scenario.toml, tuning.json and tuning.md in `out`."""
    write_text(out / "scenario.toml", text)
    write_text(out / "tuning.md", markdown(choices, held_out, tuned, delta))
    write_json(
        out / "tuning.json",
        {
            "format": 1,
            "tuned": tuned.model_dump(mode="json"),
            "held_out": {
                "count": held_out.count,
                "of": held_out.of,
                "by_silo": held_out.runs[0],
                "words": held_out.words,
            },
            "choices": [_as_data(choice, delta) for choice in choices],
        },
    )


def lines(choices: Sequence[Choice]) -> list[tuple[str, ...]]:
    """A line for every row, under `HEADER`."""
    return [
        (
            ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in choice.row.when.items()),
            "the scenario's own"
            if choice.setting is None
            else ", ".join(f"{key.removeprefix('algorithm.')} {value}" for key, value in choice.setting.items()),
            _figure(choice.score),
            _figure(choice.next_best),
            ", ".join(f"{place.number} of {place.of}" for place in _places(choice)) or "-",
        )
        for choice in choices
    ]


def edges(choices: Sequence[Choice]) -> list[str]:
    """A warning for every key whose chosen value has no neighbour on one side."""
    warned: dict[tuple[str, Any], int] = {}
    for choice in choices:
        for place in _places(choice):
            if place.edge:
                warned[place.key, place.value] = warned.get((place.key, place.value), 0) + 1
    return [
        f"{key} = {value}: at the edge of its grid in {count} row{'s' if count > 1 else ''}; widen the grid there"
        for (key, value), count in warned.items()
    ]


def costs(choices: Sequence[Choice], delta: float) -> list[str]:
    """What the choice of every row costs, and together with one run of it; in words where nothing is charged."""
    if all(choice.selection is None for choice in choices):
        return [
            "The choice is not private: it compared runs on held-out records without noise, and no ε covers it. "
            "Claims of runs with these settings hold for settings that are given."
        ]
    found = []
    for choice in choices:
        if (one := choice.selection) is not None:
            alone, both = one.epsilon_of(delta), type(one)(one.mu, one.law, one.mu).epsilon_of(delta)
            found.append((one.mu, one.law.words, alone, both))
    return [
        f"The best of {words}, each {upper_figure(mu)}-GDP: the choice of one row costs ε = {upper_figure(alone)} "
        f"at delta = {delta_figure(delta)}, the choice and a run with it ε = {upper_figure(both)}."
        for mu, words, alone, both in dict.fromkeys(found)
    ] + caveats(max((both for *_, both in found), default=0.0), delta)


def markdown(choices: Sequence[Choice], held_out: HeldOut, tuned: Tuned, delta: float) -> str:
    """The table with what it rests on."""
    rows = [HEADER, tuple("---" for _ in HEADER), *lines(choices)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    notes = [
        f"{tuned.settings} settings for every row, by {tuned.metric}; {held_out.words}.",
        *costs(choices, delta),
        *edges(choices),
    ]
    return f"{table}\n\n" + "\n\n".join(notes) + "\n"


def _as_data(choice: Choice, delta: float) -> dict[str, Any]:
    return {
        "when": dict(choice.row.when),
        "set": None if choice.setting is None else dict(choice.setting),
        "score": choice.score,
        "next_best": choice.next_best,
        "grid": {key: list(values) for key, values in choice.row.grid.items()},
        "edge": [place.key for place in _places(choice) if place.edge],
        "delta": delta,
        "epsilon": None if choice.selection is None else choice.selection.epsilon_of(delta),
    }


def _places(choice: Choice) -> list[Place]:
    return [] if choice.setting is None else places(choice.row.grid, choice.setting)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _inline(table: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f"{json.dumps(key)} = {_value(value)}" for key, value in table.items()) + " }"


def _value(value: Any) -> str:
    """JSON of numbers, texts, truth values and lists is TOML."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
