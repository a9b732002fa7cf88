"""Who adds how much noise, silo sizes and weights as they come."""

import pytest

from fedpriv.privacy.trust import trust_named


def test_noise_covers_the_record_that_weighs_most() -> None:
    """p_i / B_i is largest in silo 1; a mean that weighs silos by anything but size has such a silo."""
    noise = trust_named("trusted").noise(2.0, (10, 4), (0.5, 0.5), "zero-out", 1.5)
    (server,) = noise.sources
    assert server.std == pytest.approx(2.0 / 1.5 * 0.5 / 4)
    own = trust_named("untrusted").noise(2.0, (10, 4), (0.5, 0.5), "replace-one", 1.5)
    assert [source.std for source in own.sources] == pytest.approx([2 * 2.0 / 1.5 / 10, 2 * 2.0 / 1.5 / 4])
    assert [source.weight for source in own.sources] == [0.5, 0.5]
