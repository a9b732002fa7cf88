"""Names that nobody knows are answered with those that are known, and the closest of them."""

from collections.abc import Callable

import pytest

from fedpriv.algorithms import algorithm_named
from fedpriv.data.fetch import check_name
from fedpriv.errors import InputError
from fedpriv.models import model_named


@pytest.mark.parametrize(
    ("named", "wrong", "right"),
    [
        (algorithm_named, "accelerated-dp-sgd", "accelerated-dp-srgd"),
        (model_named, "mpl", "mlp"),
        (check_name, "MNITS", "mnist"),
    ],
)
def test_a_misspelt_name_gets_the_closest(named: Callable[[str], object], wrong: str, right: str) -> None:
    with pytest.raises(InputError, match=f"; did you mean '{right}'\\?$"):
        named(wrong)


def test_a_name_far_from_all_gets_no_suggestion() -> None:
    with pytest.raises(InputError, match=r"'phased-sgd'$"):
        algorithm_named("zzz")
