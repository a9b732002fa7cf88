"""The settings around a setting, as `benchmarks.refining` tries them."""

import pytest

from benchmarks.refining import fresh_seeds, neighbours


@pytest.mark.parametrize(("key", "longer"), [("algorithm.step", 2.0**0.5), ("algorithm.beta", 0.5**0.5)])
def test_five_settings_of_which_two_have_the_same_product(key: str, longer: float) -> None:
    """Steps are 1/β; a clip that falls by √2 goes with a step that is √2 longer."""
    centre = {"algorithm.clip": 4.0, key: 8.0, "algorithm.radius": 30.0}
    first, *others = neighbours(centre)
    assert first == centre
    assert [each["algorithm.radius"] for each in others] == [30.0] * 4
    clips, steps = ([each[name] for each in others] for name in ("algorithm.clip", key))
    assert clips == pytest.approx([4.0, 4.0, 4.0 / 2**0.5, 4.0 * 2**0.5], rel=2e-3)
    assert steps == pytest.approx([8.0 * longer, 8.0 / longer, 8.0 * longer, 8.0 / longer], rel=2e-3)


def test_neighbours_are_compared_on_seeds_of_their_own() -> None:
    assert fresh_seeds([100]) == [101, 102]
    assert fresh_seeds([7, 3]) == [8, 9]
