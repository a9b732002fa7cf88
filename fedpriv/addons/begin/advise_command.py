"""`fedpriv advise`: which row, clip, step, rounds and trust to take, and the scenario file with them."""

import json
import sys
from pathlib import Path
from typing import Any

from fedpriv.addons.begin.advise import Advice, advise
from fedpriv.cli.explore import Column, print_plain, print_rich
from fedpriv.core.errors import InputError
from fedpriv.core.figures import epsilon_words
from fedpriv.core.files import write_text


def advise_on(
    silos: int, records: str, others: dict[str, Any], data: str | None, out: Path | None, *, as_json: bool
) -> None:
    """Print the advice, and write its scenario to `out`; InputError for facts that no federation has."""
    if out is not None and out.exists():
        raise InputError(f"--out {out}: exists; give another name")
    found = advise(silos=silos, records=_counts(records), data=None if data is None else {"name": data}, **others)
    if as_json:
        sys.stdout.write(json.dumps(_as_data(found)) + "\n")
    else:
        _print(found)
    if out is not None:
        write_text(out, found.text)
        if not as_json:
            of = "" if data is not None else ". Put your records into records.npz (docs/adding-data.md)"
            print_plain(f"written: {out}{of}; run it with: fedpriv run {out}")


def _counts(text: str) -> int | tuple[int, ...]:
    """One number, or one for each silo, with commas between."""
    try:
        numbers = tuple(int(each) for each in text.split(","))
    except ValueError:
        raise InputError(
            f"--records {text!r}: expected a whole number, or one for each silo: 120,80,300"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def _as_data(found: Advice) -> dict[str, Any]:
    return {
        "scenario": found.tree,
        "reasons": {one.key: one.why for one in found.chosen},
        "forecast": {**vars(found.forecast), "sentence": found.forecast.sentence},
        "epsilon": found.epsilon,
        "others": found.others,
    }


def _print(found: Advice) -> None:
    rows = [[one.key, _short(one.value), one.why] for one in found.chosen]
    print_rich("What to take", [Column("key"), Column("value"), Column("why", wrap=True)], rows)
    print_plain(f"It costs {epsilon_words(found.epsilon, found.facts.delta)}.")
    for line in (found.forecast.sentence, *found.others):
        print_plain(line)


def _short(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    low, high = min(value), max(value)
    return f"{low:,} each" if low == high else f"{low:,} to {high:,}"
