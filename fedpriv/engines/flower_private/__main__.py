"""Run one of Flower's programs, mended: see `fedpriv.engines.flower_private`."""

import sys
from collections.abc import Sequence
from functools import partial
from unittest import mock

from fedpriv.engines.flower_private import NO_BELL, SERVERAPP, SOON


def main(program: str, words: list[str]) -> None:
    match program:
        case "superexec":
            from fedpriv.engines.flower_private.executor import run_superexec

            run_superexec(words[1:], None if words[0] == NO_BELL else int(words[0]))
        case "supernode":
            from fedpriv.engines.flower_private.supernode import run_supernode

            run_supernode(words[1:], int(words[0]))
        case _ if program == SERVERAPP:
            run_serverapp(words)
        case _:
            sys.exit(f"{program}: no such program")


def run_serverapp(options: Sequence[str]) -> None:
    """`flwr-serverapp OPTIONS`: messages with their objects, and a shorter wait for one that came without.

    Such a reply is announced before its objects are there, after which Flower looks again a second later.
    """
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.superlink.cli.flwr_serverapp import flwr_serverapp
    from flwr.superlink.grid import http_grid

    from fedpriv.engines.flower_private.carried import send_contents, take_contents

    take_contents(RuntimeHttpClient)
    send_contents(http_grid)
    with (
        mock.patch.object(http_grid, "pull_objects", partial(pull_objects, initial_backoff=SOON)),
        mock.patch.object(sys, "argv", [SERVERAPP, *options]),
    ):
        flwr_serverapp()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
