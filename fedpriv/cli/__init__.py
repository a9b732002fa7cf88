"""The command line: `fedpriv COMMAND`, exit code 0 for done, 1 for a run that failed, 2 for bad input."""

import sys

from fedpriv.cli.app import app
from fedpriv.errors import FedprivError


def main() -> None:
    """Entry point of the `fedpriv` script."""
    try:
        app()
    except FedprivError as error:
        sys.stderr.write(f"fedpriv: {error}\n")
        sys.exit(error.exit_code)
