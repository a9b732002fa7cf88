"""The two errors of fedpriv: `InputError` for what was asked, `RunError` for what happened.

Both carry one line a person can act on: what was wrong, where, and what would be right.  The command
line prints that line and exits with `exit_code`; a traceback means a bug in fedpriv.
"""

import difflib
import unicodedata
from collections.abc import Iterable, Mapping


class FedprivError(Exception):
    """Base of every error that is raised on purpose."""

    exit_code = 1


class InputError(FedprivError):
    """Input that cannot be used: a scenario key, a file, a cache, an option.  Exit code 2."""

    exit_code = 2


class CodeError(InputError):
    """Code that is none of fedpriv's failed: its own words are the operator's, `public` everybody's."""

    def __init__(self, public: str, said: str) -> None:
        super().__init__(f"{public} ({said})")
        self.public_message = public


class RunError(FedprivError):
    """A run that started correctly could not be finished correctly.  Exit code 1."""


def refuse(refusals: Mapping[str, object], error: type[Exception] = InputError) -> None:
    """Raise `error` with the first words whose condition holds."""
    for words, holds in refusals.items():
        if holds:
            raise error(words)


def sanitize_line(text: str, longest: int = 500) -> str:
    """Make another party's text one line that a terminal only shows: to be called where such text comes in.

    Control characters, line ends and characters that change the direction of writing become escapes (\\x1b), and
    what is beyond `longest` characters is cut.
    """
    shown = (c if c == " " or unicodedata.category(c)[0] not in "CZ" else ascii(c)[1:-1] for c in text[:longest])
    return "".join(shown) + (" …" if len(text) > longest else "")


def sanitize_lines(text: str) -> str:
    """Make each line of a text one that a terminal only shows, whoever wrote what is in it."""
    return "\n".join(sanitize_line(line, len(line)) for line in text.split("\n"))


def suggest_name_or_import(name: str, known: Iterable[str]) -> str:
    """`suggestion`, and how a row of one's own becomes known where no name is close."""
    return suggestion(name, known) or "; for one of your own give its file with --import"


def suggestion(name: str, known: Iterable[str]) -> str:
    """ "; did you mean …?" where a known name is close to `name`, else nothing."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
