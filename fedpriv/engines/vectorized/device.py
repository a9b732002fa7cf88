"""Where the vectorized engine computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedpriv.errors import RunError


def device_named(name: str) -> torch.device:
    """The device as torch names it; RunError if it cannot be used here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f'run.device = {name!r} cannot be used here: {reason}; try "cpu"') from None
    return device


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """The cores draw noise meanwhile; torch's threads, waiting for each other in a busy loop, would stop both."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
