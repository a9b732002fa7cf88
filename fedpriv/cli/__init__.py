"""The command line: `fedpriv COMMAND`.

`main` is the script, whose exit code is 0 for done, 1 for a run that failed, and 2 for bad input. `Progress`
shows a run, and `expand_option_groups` makes options of a dataclass.

Imports: rooms from `show` down.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EEXIST, EISDIR, ENOENT, ENOTDIR, EPERM, EROFS

from fedpriv.core.errors import FedprivError, InputError, RunError, sanitize_lines
from fedpriv.core.extensions import load_add_on_parts

INTERRUPTED = 130

_PATH_ERRORS = {EACCES, EEXIST, EISDIR, ENOENT, ENOTDIR, EPERM, EROFS}
_PATH_REMEDY = "; give another path, which this user may write and read"


def main() -> None:
    """Run the `fedpriv` script."""
    from fedpriv.cli.app import app  # which imports the add-ons' options, and these import this package

    try:
        with _translate_torch_errors():
            app()
    except FedprivError as error:
        _end(sanitize_lines(str(error)), error.exit_code)
    except OSError as error:  # a folder that cannot be written, a full disk
        given = error.filename is not None and error.errno in _PATH_ERRORS
        words = f"{_format_path(error)}{error.strerror or error}{_PATH_REMEDY if given else ''}"
        _end(words, InputError.exit_code if given else RunError.exit_code)
    except ImportError as error:
        if not (error.name or "").startswith("flwr"):
            raise
        _end(_describe_missing_name(error), InputError.exit_code)
    except MemoryError:
        _end("out of memory; run fewer cells at a time, smaller batches or a smaller model", RunError.exit_code)
    except OverflowError as error:
        _end(f"a number that was given is too large to compute with ({error.args[-1]})", InputError.exit_code)
    except KeyboardInterrupt:
        _end("stopped", INTERRUPTED)


def _end(words: str, code: int) -> None:
    sys.stderr.write(f"fedpriv: {words}\n")
    sys.exit(code)


@contextmanager
def _translate_torch_errors() -> Iterator[None]:
    """Raise what torch calls a RuntimeError as Python's own OverflowError and MemoryError."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if "without overflow" in said:
            raise OverflowError(said) from None
        if "allocate memory" in said:
            raise MemoryError(said) from None
        raise


def _describe_missing_name(error: ImportError) -> str:
    """Say which name of Flower's is gone."""
    try:
        for check_names in load_add_on_parts("Flower").values():
            check_names()
    except FedprivError as fault:
        return str(fault)
    return str(error)


def _format_path(error: OSError) -> str:
    """Name the file that could not be used: the one that was meant, not the draft of it."""
    name = error.filename2 or error.filename
    return "" if name is None else f"{name}: "
