"""`fedpriv worth`: each silo alone beside the models of a run, and whether joining gains."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedpriv.cli.shown import print_table
from fedpriv.core.errors import InputError
from fedpriv.core.files import scenario_file
from fedpriv.scenario.load import load_scenario
from fedpriv.study.references import References, spread
from fedpriv.study.results import check_claims, read_claims
from fedpriv.study.worth import Row, gains_of, pooled, references, rows_of

_ONE_CLASS = 0.9
"""The share of one class above which accuracy alone says little of a silo."""


def worth(given: Path, overrides: Sequence[str], *, with_pooled: bool, as_json: bool) -> None:
    """Print the references of a scenario, or those of a run's cells with what its models gain.

    InputError as `references` and `rows_of` raise it, and for overrides of a run that is over.
    """
    if (given / "results.json").exists():
        if overrides:
            raise InputError("--set: a run is compared as it ran; give the scenario for another one")
        results = read_claims(given)
        rows = rows_of(given, results, _say)
        if as_json:
            _print_json({"rows": [_row_data(row) for row in rows]})
        else:
            _print_run(rows)
        check_claims(given, results)
        return
    cell = load_scenario(scenario_file(given), list(overrides)).points[0].cell
    known = references(cell, say=_say)
    united = gains_of(cell, known, pooled(cell)) if with_pooled else None
    if as_json:
        _print_json({"alone": dataclasses.asdict(known), "pooled": united and dataclasses.asdict(united)})
        return
    lines = [["", known.metric, "spread over silos", "silos"], _alone_line(known), _constant_line(known)]
    if united is not None:
        lines.append(_line("pooled, no noise", united.released, known))
        lines.append(_line("pooled, recalibrated", united.recalibrated, known))
    print_table(lines)
    sys.stdout.writelines(_notes(known))


def _say(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{line}")


def _print_json(tree: object) -> None:
    sys.stdout.write(json.dumps(tree) + "\n")


def _row_data(row: Row) -> dict[str, object]:
    return {
        "point": dict(row.point),
        "seeds": row.seeds,
        "gain": row.gain,
        "standard_error": row.standard_error,
        "by_silo": row.by_silo,
        "references": [dataclasses.asdict(known) for known in row.references],
        "gains": [dataclasses.asdict(gains) for gains in row.gains],
    }


def _print_run(rows: Sequence[Row]) -> None:
    known = rows[0].references[0]
    scale = _scale(known)
    print_table(
        [["", known.metric, "spread over silos", "silos"], _alone_line(known), _constant_line(known)],
    )
    sys.stdout.write("\n")
    axes = list(rows[0].point) or ["run"]
    head = [*axes, "released", "recalibrated", "gain over alone", "s.e.", "worst silo", "best silo", "seeds"]
    table = [head]
    for row in rows:
        released, own = (
            float(np.mean([np.mean(getattr(each, name)) for each in row.gains]))
            for name in ("released", "recalibrated")
        )
        error, silos = row.standard_error, row.by_silo.values()
        table.append(
            [
                *(str(row.point[axis]) if axis in row.point else "-" for axis in axes),
                *(f"{scale * value:.1f}" for value in (released, own)),
                f"{scale * row.gain:+.1f}",
                "-" if error is None else f"{scale * error:.1f}",
                *(f"{scale * value:+.1f}" for value in (min(silos), max(silos))),
                str(len(row.seeds)),
            ]
        )
    print_table(table)
    sys.stdout.writelines([*_notes(known), *_verdict(rows)])


def _verdict(rows: Sequence[Row]) -> list[str]:
    """A sentence for the points that gain, one for those that lose, one for those within two standard errors."""
    told: dict[str, list[str]] = {"gains": [], "loses": [], "is not told apart from staying alone": []}
    for row in rows:
        kind = "is not told apart from staying alone"
        if row.standard_error is not None and abs(row.gain) > 2.0 * row.standard_error:
            kind = "gains" if row.gain > 0.0 else "loses"
        told[kind].append(", ".join(f"{key} = {value}" for key, value in row.point.items()) or "this setting")
    said = [f"On these records joining {kind}: {'; '.join(there)}.\n" for kind, there in told.items() if there]
    return [
        *said,
        "The s.e. is over seeds (noise and partition); other records of the same silos would add to it.\n",
    ]


def _notes(known: References) -> list[str]:
    notes = []
    if len(known.silos) < known.of:
        notes.append(f"{len(known.silos)} of {known.of} silos, drawn by a public seed.\n")
    if skewed := [silo.name for silo in known.silos if silo.majority > _ONE_CLASS]:
        share = f"{_ONE_CLASS:.0%}".replace("%", " %")
        notes.append(
            f"More than {share} of one class at {', '.join(skewed)}: accuracy alone decides nothing there.\n"
        )
    return notes


def _scale(known: References) -> float:
    return 100.0 if known.metric == "accuracy" else 1.0


def _alone_line(known: References) -> list[str]:
    return _line("each silo alone, nothing released", [silo.score for silo in known.silos], known)


def _constant_line(known: References) -> list[str]:
    return _line("a constant", [silo.constant for silo in known.silos], known)


def _line(name: str, scores: Sequence[float], known: References) -> list[str]:
    scale = _scale(known)
    return [name, f"{scale * float(np.mean(scores)):.1f}", f"{scale * spread(scores):.1f}", str(len(scores))]
