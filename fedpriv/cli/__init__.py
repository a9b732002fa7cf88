"""Command line: `fedpriv COMMAND`.

`main` is the script, which ends with a message and an exit code on errors that it knows.  `Progress` shows a run,
and `expand_option_groups` makes options from a dataclass.

Imports: rooms from `show` down.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EACCES, EEXIST, EISDIR, ENOENT, ENOTDIR, EPERM, EROFS

from fedpriv.core.errors import FedprivError, InputError, RunError, sanitize_lines
from fedpriv.core.extensions import load_add_on_parts

INTERRUPTED = 130
"""Exit code of a process that was interrupted."""

_PATH_ERRORS = {EACCES, EEXIST, EISDIR, ENOENT, ENOTDIR, EPERM, EROFS}
_UNIX_MODULES, _UNIX_ONLY = (
    ("fcntl", "resource", "pwd", "termios"),
    "this command needs Linux, because guards, services and audits use locks and limits that this system lacks; "
    "simulations, accounting, tables and reports run here",
)
_PATH_REMEDY = "; give another path, which this user may write and read"


def main() -> None:
    """Run the `fedpriv` script, and end the process with a message and an exit code on a known error.

    Exit codes of errors:

    * 2: bad input, a path that is missing, of the wrong kind or not permitted, a number that is too large, an
      import that Flower (`flwr`) lacks, or a module of Unix that this system lacks.
    * 1: a run that failed, another error of the operating system such as a full disk, or a MemoryError.
    * 3: a claim that an audit refuted.
    * 130: an interrupt (Ctrl-C), which may end the process without a message.
    """
    try:
        from fedpriv.cli.app import app  # imported late: add-ons' options, which it imports, import this package

        with _translate_torch_errors():
            _refuse_key_options(sys.argv[1:])
            app()
    except FedprivError as error:
        _end(sanitize_lines(str(error)), error.exit_code)
    except OSError as error:  # a folder that cannot be written, a full disk
        has_path_error = error.filename is not None and error.errno in _PATH_ERRORS
        message = f"{_format_path(error)}{error.strerror or error}{_PATH_REMEDY if has_path_error else ''}"
        _end(message, InputError.exit_code if has_path_error else RunError.exit_code)
    except ImportError as error:
        if not (error.name or "").startswith(("flwr", *_UNIX_MODULES)):
            raise
        _end(_UNIX_ONLY if error.name in _UNIX_MODULES else _describe_missing_name(error), InputError.exit_code)
    except MemoryError:
        _end("out of memory; run fewer cells at a time, smaller batches or a smaller model", RunError.exit_code)
    except OverflowError as error:
        # The last argument is the message, also behind an error number.
        _end(f"a number that was given is too large to compute with ({error.args[-1]})", InputError.exit_code)
    except KeyboardInterrupt:
        _end("stopped", INTERRUPTED)


_OPTION_KEYS = {
    "--epsilon": "privacy.epsilon",
    "--eps": "privacy.epsilon",
    "--delta": "privacy.delta",
    "--mu": "privacy.mu",
    "--rounds": "federation.rounds",
    "--epochs": "federation.epochs",
    "--silos": "federation.silos",
    "--clients": "federation.clients",
    "--batch": "federation.batch",
    "--batch-size": "federation.batch",
    "--lr": "algorithm.step",
    "--learning-rate": "algorithm.step",
    "--step": "algorithm.step",
    "--clip": "algorithm.clip",
    "--algorithm": "algorithm.name",
    "--trust": "algorithm.trust",
    "--data": "data.name",
    "--model": "model.name",
    "--seed": "seeds=[VALUE]",
    "--seeds": "seeds",
    "--device": "run.device",
    "--gpu": "run.device=cuda",
    "--cuda": "run.device=cuda",
}
"""Keys of a scenario, or whole assignments, by options that `fedpriv run` does not have.

The user's value takes the place of "VALUE" in an assignment.
"""


def _refuse_key_options(arguments: Sequence[str]) -> None:
    """Refuse an option that `fedpriv run` lacks and that is a key of a scenario, such as --epsilon.

    The message names the option --set that is meant, with the user's value if there is one: the text behind "=",
    or else the next word if it does not begin with "-".  For --gpu and --cuda it names the whole assignment.

    Args:
        arguments: Words of the command line behind `fedpriv`.

    Raises:
        InputError: The command is `run`, and a word is such an option.
    """
    for index, argument in enumerate(arguments if arguments[:1] == ["run"] else ()):
        option, _, value = argument.partition("=")
        if (key := _OPTION_KEYS.get(option)) is not None:
            next_value = next(
                (word for word in arguments[index + 1 : index + 2] if not word.startswith("-")), "VALUE"
            )
            assignment = (key if "=" in key else f"{key}=VALUE").replace("VALUE", value or next_value)
            raise InputError(
                f"{option}: no option of `fedpriv run`, which sets keys of the scenario: --set {assignment}"
            )


def _end(message: str, code: int) -> None:
    sys.stderr.write(f"fedpriv: {message}\n")
    sys.exit(code)


@contextmanager
def _translate_torch_errors() -> Iterator[None]:
    """Convert torch's RuntimeError for an overflow or a lack of memory, by the words of its message."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "without overflow" in text:
            raise OverflowError(text) from None
        if "allocate memory" in text or "out of memory" in text:
            raise MemoryError(text) from None
        raise


def _describe_missing_name(error: ImportError) -> str:
    """Describe the names that are missing in Flower, or repeat the error if no check finds any."""
    try:
        for check_names in load_add_on_parts("Flower").values():
            check_names()
    except FedprivError as fault:
        return str(fault)
    return str(error)


def _format_path(error: OSError) -> str:
    """Format the path of the error with a colon, or "" without a path.

    For a rename it is the target, not the temporary file.
    """
    name = error.filename2 or error.filename
    return "" if name is None else f"{name}: "
