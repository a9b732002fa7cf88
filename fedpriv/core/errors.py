"""Errors that users see: `InputError` for unusable input, `RunError` for a run that failed.

Both carry one line that a person can act on, which says what was wrong, where, and what would be right.  The
command line prints this line and exits with `exit_code`.  A traceback means a bug in fedpriv.
"""

import difflib
import unicodedata
from collections.abc import Iterable, Mapping


class FedprivError(Exception):
    """Base of every error with a message for users."""

    exit_code = 1


class InputError(FedprivError):
    """Input that cannot be used: a scenario key, a file, a cache, an option.  Exit code 2."""

    exit_code = 2


class CodeError(InputError):
    """Failure of code that is not fedpriv's, such as an extension.

    The operator sees the whole message.  Everybody may see `public_message`, which has no words of that code.
    """

    def __init__(self, public: str, detail: str) -> None:
        super().__init__(f"{public} ({detail})")
        self.public_message = public


class RunError(FedprivError):
    """Run that started correctly and could not be finished correctly.  Exit code 1."""


def refuse(refusals: Mapping[str, object], error: type[Exception] = InputError) -> None:
    """Raise `error` with the first message whose condition is true.

    Args:
        refusals: Conditions by message, in the order in which they are checked.
        error: Class of the error.

    Example:
        >>> refuse({"rounds = 3: at most 2": True})
        Traceback (most recent call last):
            ...
        fedpriv.core.errors.InputError: rounds = 3: at most 2
    """
    for message, condition in refusals.items():
        if condition:
            raise error(message)


def sanitize_line(text: str, longest: int = 500) -> str:
    r"""Make another party's text one line that a terminal only displays.

    Every text of another party has to pass through this function where it is received.  Control characters, line
    ends, spaces other than " " and characters that change the direction of writing become escapes (\x1b).  A text
    of more than `longest` characters is cut, and " …" marks the cut.

    Args:
        text: Text of another party.
        longest: Most characters of `text` that are read, each of which may become an escape of several characters.

    Example:
        >>> sanitize_line("two\nlines")
        'two\\nlines'
    """
    characters = (
        c if c == " " or unicodedata.category(c)[0] not in "CZ" else ascii(c)[1:-1] for c in text[:longest]
    )
    return "".join(characters) + (" …" if len(text) > longest else "")


def sanitize_lines(text: str) -> str:
    """Escape the characters of a text that a terminal does not only display, and keep its line feeds.

    The characters are those of `sanitize_line`.  No line is cut.
    """
    return "\n".join(sanitize_line(line, len(line)) for line in text.split("\n"))


def suggest_name_or_import(name: str, names: Iterable[str]) -> str:
    """Return a suffix for an error message: a close name, or the hint that users' own names need --import.

    Args:
        name: Name that is not known.
        names: Known names.
    """
    return suggestion(name, names) or "; for one of your own give its file with --import"


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return a suffix for an error message that suggests the closest name, or "" if no name is close.

    Args:
        name: Name that is not known.
        names: Known names.

    Example:
        >>> suggestion("mnst", ["mnist", "adult"])
        "; did you mean 'mnist'?"
    """
    matches = difflib.get_close_matches(name.lower(), list(names), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
