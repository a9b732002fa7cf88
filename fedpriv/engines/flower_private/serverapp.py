"""`flwr-serverapp` with a shorter wait between looks for a reply's objects."""

import sys
from collections.abc import Sequence
from functools import partial
from unittest import mock

from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.superlink.cli.flwr_serverapp import flwr_serverapp
from flwr.superlink.grid import http_grid

from fedpriv.engines.flower_private import SERVERAPP, SOON


def run_serverapp(options: Sequence[str]) -> None:
    """A reply is announced before its objects are there, after which Flower looks again a second later."""
    with (
        mock.patch.object(http_grid, "pull_objects", partial(pull_objects, initial_backoff=SOON)),
        mock.patch.object(sys, "argv", [SERVERAPP, *options]),
    ):
        flwr_serverapp()
