"""Where the vectorized engine computes."""

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
