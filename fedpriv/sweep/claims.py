"""RUN_DIR as it is shown: claims of privacy are those that its releases give, whatever is written beside them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedpriv.errors import InputError, RunError
from fedpriv.privacy.entries import differing_words, entry_of
from fedpriv.sweep.results import Results, read_results


def read_claims(folder: Path) -> Results:
    """`read_results` for whatever is shown: every figure of privacy is computed from what was released.

    Guarantee: a figure that somebody wrote into results.json is not shown, and its cell is in `differs`.
    InputError also for releases that cannot be accounted for.
    """
    stored = read_results(folder)
    try:
        entries = list(map(entry_of, stored.cells))
        shown: list[Mapping[str, Any]] = [entry.recomputed for entry in entries]
        return replace(stored, cells=shown, differs=tuple(each.cell for each in entries if not each.agrees))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: not a ledger of fedpriv ({type(error).__name__}: {error})") from None


def check_claims(folder: Path, results: Results) -> None:
    """RunError, exit code 1, for a folder that claims something else than it released: after it was shown."""
    if results.differs:
        raise RunError(f"{folder}: {differing_words(results.differs)}")
