"""`fedpriv privacy` on records that take part in secret: the published noises, charges and errors."""

import math
from dataclasses import replace

import pytest

from fedpriv.core.errors import InputError
from fedpriv.rounds.setting import Setting
from tests.cli.test_privacy import ask, asked
from tests.parts import in_parts

EPSILON_03, EPSILON_1 = 1.1318, 4.3772


GOLDEN = [
    ("--rounds 60 --sampling allocation --relation zero-out", EPSILON_03, 0.9205),
    ("--rounds 240 --sampling allocation --relation zero-out", 0.5, 0.8964),
    ("--rounds 64 --epochs 4 --sampling allocation --relation zero-out", EPSILON_03, 1.8202),
    ("--rounds 60 --sampling poisson --relation zero-out", EPSILON_1, 0.6098),
    ("--rounds 60 --sampling poisson --relation replace-one", EPSILON_03, 1.0411),
    ("--rounds 60 --sampling allocation --relation replace-one", EPSILON_1, 0.6644),
]


@pytest.mark.parametrize(("line", "epsilon", "golden"), in_parts(GOLDEN, [GOLDEN[2], GOLDEN[4]]))
def test_golden_noise(line: str, epsilon: float, golden: float) -> None:
    """z to 1e-3, for a clip of 2 and a batch of 5; `spent` says what was asked for."""
    setting = f"--decay 0 --clip 2 --batch 5 {line}"
    noise = asked(f"noise --epsilon {epsilon} --delta 1e-5 {setting}")
    assert noise["noise_multiplier"] == pytest.approx(golden, rel=1e-3)
    assert noise["noise_std"] == pytest.approx(noise["noise_multiplier"] * 2 / 5, rel=1e-9)
    assert 0.995 * epsilon < noise["epsilon_at_most"] <= epsilon
    spent = asked(f"spent {setting} --std {noise['noise_std']!r}")
    assert spent["epsilon_at_most"] == pytest.approx(noise["epsilon_at_most"], rel=1e-6)
    assert "mu" not in spent


@pytest.mark.parametrize(
    ("line", "at_6", "at_7", "at_8"),
    [
        ("--sampling allocation --rounds 60 --multiplier 0.9205", 0.325, 0.373, 0.416),
        ("--sampling allocation --rounds 600 --epochs 10 --multiplier 1.546", 0.296, 0.296, 0.297),
        ("--sampling poisson --rounds 60 --multiplier 0.9639", 0.317, 0.358, 0.396),
    ],
)
def test_convert_says_what_a_lifetime_budget_is_charged(line: str, at_6: float, at_7: float, at_8: float) -> None:
    """The table's values are rounded points of the curve; what is charged is certified above them."""
    found = asked(f"convert {line} --relation zero-out")
    for slack, value in (("1e-06", at_6), ("1e-07", at_7), ("1e-08", at_8)):
        assert value * 0.998 < found[f"mu_with_slack_{slack}"] < value * 1.01


def test_compare_lists_groups_with_the_worst_errors_of_the_table() -> None:
    """Prefix sums of one pass, T = 60: 7.13, 5.32 and 5.33 for 1, 6 and 12 bands at ε = 1.13."""
    answer = asked("compare --rounds 60 --epsilon 1.1318 --delta 1e-5 --sampling allocation --relation zero-out")
    errors = {row["mechanism"]: row["error_worst"] for row in answer["mechanisms"]}
    assert errors["banded (1), 1 groups"] == pytest.approx(7.13, abs=0.01)
    assert errors["banded (6), 6 groups"] == pytest.approx(5.32, abs=0.01)
    assert errors["banded (12), 12 groups"] == pytest.approx(5.33, abs=0.01)
    assert len(errors) == 8
    (one,) = asked(
        "compare --rounds 60 --epsilon 4.3772 --delta 1e-5 --sampling allocation --relation zero-out --groups 12"
    )["mechanisms"]
    assert one["error_worst"] == pytest.approx(2.37, abs=0.01)


@pytest.mark.parametrize(
    "line",
    [
        "convert --mu 1",
        "noise --rounds 12 --mu 1",
        "compare --rounds 12 --mu 1",
        "compare --rounds 4 --mu 1 --sampling allocation --relation zero-out",
    ],
)
def test_every_command_names_the_unit_that_was_asked_for(line: str) -> None:
    persons = asked(f"{line} --unit user --records 8")
    assert persons["unit"] == "all records of one person in one silo, at most 8 a round"
    assert asked(line)["unit"] == "one record of a silo"


def test_text_says_how_records_take_part() -> None:
    text = ask("noise --rounds 12 --mu 1 --sampling allocation --relation zero-out --decay 0")
    assert "a record takes part in one of 12 rounds, drawn at random, and in which one stays secret" in text
    assert "mu with slack 1e-06" in text
    assert math.isclose(float(text.split("noise multiplier")[1].split()[0]), 0.75, abs_tol=0.1)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("noise --rounds 12 --mu 1 --sampling shuffled", "'fixed', 'poisson', 'allocation'"),
        ("noise --rounds 12 --mu 1 --sampling poisson", "what a record moves has no end there"),
        ("noise --rounds 12 --mu 1 --sampling poisson --decay 0 --groups 5", "groups = 5"),
        ("noise --rounds 12 --mu 1 --groups 2", "groups = 2: groups are for records that take part in secret"),
        ("noise --rounds 12 --mu 1 --sampling poisson --max-participations 2", "give only one of them"),
        ("noise --rounds 12 --mu 1 --sampling poisson --mechanism banded --groups 4", "12 bands"),
        ("convert --multiplier 1 --sampling poisson", "--rounds"),
        ("convert --mu 1 --unit household", "'record', 'user', 'client'"),
        ("convert --mu 1 --records 8", "a record is one in one silo"),
        ("convert --multiplier 1 --rounds 12", "for a public order ask"),
        ("convert --multiplier 0 --rounds 12 --sampling poisson", "noise_multiplier = 0"),
    ],
)
def test_bad_input_is_one_line_that_names_it(line: str, named: str) -> None:
    with pytest.raises(InputError) as caught:
        ask(line)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_of_groups_that_are_compared_divide_an_epoch_unless_one_is_asked_for() -> None:
    setting = Setting(rounds=24, epochs=2, sampling="allocation", relation="zero-out")
    groups = [own.groups for _, own, _ in setting._amplified()]
    assert groups == [1, 2, 3, 4, 6, 12]
    assert [own.groups for _, own, _ in replace(setting, groups=2)._amplified()] == [2]
