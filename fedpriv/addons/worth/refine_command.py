"""`fedpriv silo refine`: a silo's own comparison, on its own terminal."""

import sys
from pathlib import Path

from fedpriv.addons.worth.refine import Home, home_of, learning_curve, read_released, refined, write_model
from fedpriv.cli.shown import print_table
from fedpriv.core.errors import InputError
from fedpriv.core.files import scenario_file
from fedpriv.scenario.load import load_scenario
from fedpriv.silo.policy import read_policy


def print_refined(
    policy: Path, scenario: Path, model: Path | None, held_out: Path | None, out: Path | None, *, alone: bool
) -> None:
    """Print the scores on the silo's own test records, and write the personal model where a folder is given."""
    if (model is None) != alone:
        raise InputError(
            "--model FILE compares with a released model, --alone draws the curve without one: give one"
        )
    if alone and (out is not None or held_out is not None):
        raise InputError("--alone: writes no model and needs no other records; leave out --out and --held-out")
    home = home_of(read_policy(policy), load_scenario(scenario_file(scenario)).points[0].cell, held_out)
    if model is None:
        _print_curve(home)
        return
    released = read_released(model, home)
    found = refined(home, released)
    shown = {
        "this silo alone, nothing released": found.alone,
        "released": found.released,
        "released, recalibrated at home": found.recalibrated,
        "personal": found.personal,
        "a constant": found.constant,
    }
    print_table([["", _metric(home)], *([name, _text(home, value)] for name, value in shown.items())])
    judged = "records that the release has not read"
    if found.model.judged == "folds":
        judged = "folds, all of which the release has read: that favours it"
        judged += ", and --held-out has fewer than 10 records" * (held_out is not None)
    sys.stdout.write(
        f"personal: pulled with lambda = {found.model.pull:g} (0 is alone, inf the released model), chosen on "
        f"{judged}, one standard error towards alone.\n"
        f"{len(home.held.test.labels):,} test records: differences below {_noise(home)} tell nothing.\n"
        "All of this is of this silo's records without noise, lambda and scores too: keep it to yourself.  "
        "Leaving or staying after a look tells others a little of it.\n"
    )
    if out is not None:
        sys.stdout.write(f"wrote {write_model(out, 'personal', found.model.point)}\n")


def _print_curve(home: Home) -> None:
    rows = [[f"{size:,}", _text(home, score), _text(home, even)] for size, score, even in learning_curve(home)]
    print_table([["training records", f"alone, {_metric(home)}", "classes alike"], *rows])
    sys.stdout.write(
        "A curve that still rises is where records of others can help.  Compare with what simulations of similar "
        "federations gained: docs/worth.md.\n"
    )


def _metric(home: Home) -> str:
    return "-loss" if home.held.train.labels.is_floating_point() else "accuracy"


def _text(home: Home, value: float) -> str:
    return f"{value:.4f}" if _metric(home) == "-loss" else f"{100.0 * value:.1f}"


def _noise(home: Home) -> str:
    """Two standard errors of a difference between two models that decide a tenth of the records differently."""
    if _metric(home) == "-loss":
        return "their spread over records"
    return f"{200.0 * (0.1 / len(home.held.test.labels)) ** 0.5:.1f} points"
