"""The two ways in which fedpriv says no.

Both carry one line a person can act on: what was wrong, where, and what would be right.  The command
line prints that line and exits with `exit_code`; a traceback means a bug in fedpriv.
"""


class FedprivError(Exception):
    """Base of every error that is raised on purpose."""

    exit_code = 1


class InputError(FedprivError):
    """What the user gave cannot be used: a scenario key, a file, a cache, an option.  Exit code 2."""

    exit_code = 2


class RunError(FedprivError):
    """A run that started correctly could not be finished correctly.  Exit code 1."""
