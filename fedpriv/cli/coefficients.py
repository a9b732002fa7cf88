"""`fedpriv coefficients`: a table of weights with intervals that contain the noise."""

import json
import sys
from pathlib import Path

from fedpriv.cli.shown import print_table
from fedpriv.show.summary import value_text
from fedpriv.study.coefficients import coefficients_of
from fedpriv.study.results import check_claims, read_claims


def coefficients(folder: Path, *, as_json: bool) -> None:
    """Print those of every finished cell; InputError for a run of another model."""
    results = read_claims(folder)
    found = [(cell, coefficients_of(cell, folder)) for cell in results.cells]
    if as_json:
        told = [
            {
                "point": cell["point"],
                "seed": cell["seed"],
                "coefficients": {name: each._asdict() for name, each in own},
            }
            for cell, own in found
        ]
        sys.stdout.write(json.dumps(told) + "\n")
        return
    for cell, own in found:
        point = "".join(f"{key} = {value_text(value)}, " for key, value in cell["point"].items())
        lines = [[f"{point}seed {cell['seed']}", "weight", "95 %"]]
        for name, each in own:
            star = "" if each.low <= 0.0 <= each.high else "  *"
            lines.append([name, f"{each.value:.3f}", f"{each.low:.3f} – {each.high:.3f}{star}"])
        print_table(lines)
        sys.stdout.write("\n")
    sys.stdout.write(
        "features are scaled to -1 … 1; intervals have sampling and noise in them, of the population's weights "
        "under the same penalty; * has no 0 in it\n"
    )
    check_claims(folder, results)
