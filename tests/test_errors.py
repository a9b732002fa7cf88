"""Names that nobody knows are answered with those that are known, and the closest of them."""

import pickle
from collections.abc import Callable

import pytest

from fedpriv.core.errors import CodeError, InputError, sanitize_line, suggestion
from fedpriv.data.fetch import check_data_name
from fedpriv.loss.models import find_model
from fedpriv.papers.table import find_algorithm
from fedpriv.protocol.messages import Refusal, read_refusal, refusal_content


@pytest.mark.parametrize(
    ("named", "wrong", "right"),
    [
        (find_algorithm, "accelerated-dp-sgd", "accelerated-dp-srgd"),
        (find_model, "mpl", "mlp"),
        (check_data_name, "MNITS", "mnist"),
    ],
)
def test_a_misspelt_name_gets_the_closest_known_name(
    named: Callable[[str], object], wrong: str, right: str
) -> None:
    with pytest.raises(InputError, match=f"; did you mean '{right}'\\?$"):
        named(wrong)


def test_a_misspelt_name_with_capitals_gets_the_closest_known_name() -> None:
    assert suggestion("Salery", ["AGE", "SALARY"]) == "; did you mean 'SALARY'?"


def test_an_error_of_foreign_code_survives_the_way_from_another_process() -> None:
    error = pickle.loads(pickle.dumps(CodeError("model.name = 'm:F': fails", "a division by zero")))
    assert isinstance(error, CodeError)
    assert str(error) == "model.name = 'm:F': fails (a division by zero)"
    assert error.public_message == "model.name = 'm:F': fails"


def test_a_name_far_from_all_gets_no_suggestion() -> None:
    with pytest.raises(InputError, match=r"'dp-adamw'; for one of your own give its file with --import$"):
        find_algorithm("zzz")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the budget is 2 μ", "the budget is 2 μ"),
        ("\x1b]0;title\x07\x1b[2J", r"\x1b]0;title\x07\x1b[2J"),
        ("one\nfedpriv: two\r", r"one\nfedpriv: two\r"),
        ("\u202egnp.exe\u2028\x9b1m", r"\u202egnp.exe\u2028\x9b1m"),
        ("a" * 600, "a" * 500 + " …"),
    ],
)
def test_text_of_another_party_is_printed_as_one_line_without_control_characters(text: str, shown: str) -> None:
    assert sanitize_line(text) == shown


def test_control_characters_in_a_received_refusal_are_escaped() -> None:
    """Would give a silo the server's terminal: its title, its screen, a forged line of ours."""
    refusal = read_refusal(refusal_content(Refusal("\x1b[2Jfedpriv: all is well\n", is_final=True)))
    assert refusal is not None
    assert refusal.reason == r"\x1b[2Jfedpriv: all is well\n"
