"""Errors with messages for users, such as `InputError` (unusable input) and `RunError` (failed run).

A message says what was wrong and, as far as it is known, where, and what would be right.
"""

import difflib
import unicodedata
from collections.abc import Iterable, Mapping


class FedprivError(Exception):
    """Base of fedpriv's errors with a message for users."""

    exit_code = 1
    """Exit code of a command that fails by this error."""


class InputError(FedprivError):
    """Input that cannot be used: a scenario key, a file, a cache, an option."""

    exit_code = 2


class CodeError(InputError):
    """Failure of code or weights that are not fedpriv's, such as an extension.

    The whole message is for the operator.  Everybody may see `public_message`, which has no words of that code.
    """

    def __init__(self, public: str, detail: str = "") -> None:  # pickle passes the whole message alone
        super().__init__(f"{public} ({detail})" if detail else public)
        self.public_message = public


class RunError(FedprivError):
    """Failure of a run or of another operation, such as a refusal by a silo."""


def refuse(refusals: Mapping[str, object], error: type[Exception] = InputError) -> None:
    """Raise `error` with the first message whose condition is true.

    Args:
        refusals: Conditions by message, in the order in which they are checked.
        error: Class of the error.

    Raises:
        InputError: A condition is true.  The class is `error`, if another one is given.

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

    Characters of Unicode's categories C and Z other than " ", such as control characters, line ends and marks that
    change the direction of writing, become escapes (\x1b).  A text of more than `longest` characters is cut, and
    " …" marks the cut.

    Args:
        text: Text of another party.
        longest: Most characters of `text` that are kept, before they become escapes.

    Example:
        >>> sanitize_line("two\nlines")
        'two\\nlines'
    """
    characters = (
        c if c == " " or unicodedata.category(c)[0] not in "CZ" else ascii(c)[1:-1] for c in text[:longest]
    )
    return "".join(characters) + (" …" if len(text) > longest else "")


def sanitize_lines(text: str) -> str:
    """Sanitize each line of a text as `sanitize_line` does, without a cut, and keep the line feeds."""
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

    Upper and lower case do not matter.

    Args:
        name: Name that is not known.
        names: Known names.

    Example:
        >>> suggestion("mnst", ["mnist", "adult"])
        "; did you mean 'mnist'?"
    """
    name_by_lower_case = {candidate.lower(): candidate for candidate in names}
    return "".join(
        f"; did you mean {name_by_lower_case[match]!r}?"
        for match in difflib.get_close_matches(name.lower(), list(name_by_lower_case), n=1)
    )
