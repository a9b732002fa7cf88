"""`fedpriv privacy`: what it prints is what the library computes; bad input is one line; no torch."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting import renyi as rdp
from fedpriv.accounting import renyi as zcdp
from fedpriv.core.errors import InputError
from fedpriv.noise.buffered import LambdaCgd
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.series import Workload
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import FixedOrder
from fedpriv.study.setting import AccountingSetting
from tests.cli.command import answer_of, output_of
from tests.parts import in_parts


def text_of(line: str) -> str:
    return output_of("privacy", *line.split())


def asked(line: str) -> dict[str, Any]:
    answer: dict[str, Any] = answer_of("privacy", *line.split())
    return answer


def mechanisms_of(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["mechanism"]: row for row in answer["mechanisms"]}


def test_convert_prints_every_privacy_measure_with_relation_and_unit() -> None:
    assert asked("convert --mu 0.7 --delta 1e-6 --relation zero-out") == {
        "mu": 0.7,
        "zcdp": zcdp.zcdp_of(0.7),
        "delta": 1e-6,
        "epsilon": gdp.epsilon_of(0.7, 1e-6),
        "epsilon_rdp": rdp.epsilon_of(0.7, 1e-6),
        "epsilon_paper": zcdp.paper_epsilon(0.7, 1e-6),
        "relation": "zero-out",
        "unit": "one record of a silo",
    }


def test_convert_prints_the_exact_epsilon_and_that_of_the_papers_formula() -> None:
    text = text_of("convert --mu 1")
    assert "one record of a silo is right with probability at most 69.2 % (μ = 1: moderate protection)." in text
    for part in ("ε, exact", "4.37717", "papers' formula", "5.29852", "replace-one", "one record of a silo"):
        assert part in text


@pytest.mark.parametrize(
    ("target", "mu"),
    [("--zcdp 0.5", 1.0), ("--epsilon 2 --delta 1e-6", 0.448335), ("--epsilon 1 --delta 1e-5", 0.268051)],
)
def test_convert_accepts_zcdp_and_epsilon_as_input(target: str, mu: float) -> None:
    assert asked(f"convert {target}")["mu"] == pytest.approx(mu, abs=5e-7)


def test_the_noise_command_matches_the_papers_formula_for_both_trust_settings() -> None:
    """σ² = 4S²T/ρ² untrusted, 4S²T/(ρ²M²) trusted (Reshef & Levy)."""
    line = "noise --rounds 600 --mu 4 --clip 118.1 --silos 100"
    untrusted, trusted = asked(f"{line} --trust untrusted"), asked(f"{line} --trust trusted")
    expected = 2 * 118.1 * np.sqrt(600) / 4
    assert untrusted["noise_std"] == pytest.approx(expected)
    assert untrusted["error_in_mean"] == pytest.approx(expected / 10)
    assert trusted["noise_std"] == pytest.approx(expected / 100)
    assert trusted["error_in_mean"] == pytest.approx(expected / 100)
    assert "not the server" in trusted["protects"]


def test_zero_out_halves_the_noise_and_a_batch_divides_it_by_its_size() -> None:
    plain = asked("noise --rounds 50 --mu 1")["noise_std"]
    assert asked("noise --rounds 50 --mu 1 --relation zero-out")["noise_std"] == pytest.approx(plain / 2)
    assert asked("noise --rounds 50 --mu 1 --batch 5")["noise_std"] == pytest.approx(plain / 5)


@pytest.mark.parametrize("mechanism", ["independent", "tree", "banded --set bands=7"])
@pytest.mark.parametrize("participation", ["", "--epochs 5", "--max-participations 3 --min-separation 4"])
@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_the_spent_command_inverts_the_noise_command(mechanism: str, participation: str, trust: str) -> None:
    setting = f"--rounds 60 --decay 0.9 --clip 2 --batch 3 --silos 4 --mechanism {mechanism} --trust {trust}"
    setting = f"{setting} {participation}"
    noise = asked(f"noise {setting} --epsilon 2 --delta 1e-6")
    spent = asked(f"spent {setting} --std {noise['noise_std']!r} --delta 1e-6")
    assert spent["mu"] == pytest.approx(noise["mu"], rel=1e-12)
    assert spent["epsilon"] == pytest.approx(2.0, rel=1e-9)


@pytest.mark.slow
def test_the_compare_command_lists_every_mechanism_with_the_librarys_numbers() -> None:
    answer = asked("compare --rounds 300 --decay 0.95 --mu 0.5 --clip 3 --epochs 3 --silos 4")
    rows = mechanisms_of(answer)
    workload = Workload(FixedOrder(300, 100), 0.95, np.full(300, 3.0))
    members = {
        "independent": IndependentGaussian(),
        "tree": BinaryTree(0.95),
        "banded (8)": BandedSquareRoot(0.95, 8),
        "square root": BandedSquareRoot(0.95, 300),
    }
    for name, mechanism in members.items():
        row, variance = rows[name], mechanism.variance(workload)
        std = 2 * mechanism.sensitivity(workload) / 0.5
        errors = {"rms": np.mean(variance), "last": variance[-1], "worst": np.max(variance)}
        expected = {f"error_{kind}": std * np.sqrt(value) for kind, value in errors.items()}
        expected |= {"noise_std": std, "error_in_mean": expected["error_rms"] / 2}
        assert {key: row[key] for key in expected} == pytest.approx(expected)
        assert row["memory_vectors"] == mechanism.memory_vectors(workload)
        assert row["sensitivity_exact"] is True
    (auto,) = (row for row in answer["mechanisms"] if row["auto"])
    assert auto["queries"] <= 1.01 * min(row["queries"] for row in rows.values() if row["memory_vectors"] <= 4)
    assert all(row["queries"] >= answer["least"]["queries"] for row in answer["mechanisms"])
    assert answer["participation"] == "3 epochs in a fixed order"


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("line", "auto", "most"),
    [
        ("accelerated-dp-srgd --rounds 60", "lambda-cgd", 1.015),
        ("dp-mu2-fl --rounds 16", "lambda-cgd", 1.015),
        ("unaccelerated-dp-srgd --rounds 60", "blt", 1.01),
        ("dp-ftrl --set momentum=0.9 --rounds 60", "blt", 1.21),
    ],
)
def test_the_compare_command_shows_the_noise_in_an_algorithms_output_against_the_optimum(
    line: str, auto: str, most: float
) -> None:
    """The specification's ratios to the least that any mechanism leaves in the output."""
    answer = asked(f"compare --algorithm {line} --mu 1 --dimension 0 --silos 4 --clip 3")
    rows = answer["mechanisms"]
    (chosen,) = (row for row in rows if row["auto"])
    assert chosen["mechanism"].startswith(auto)
    assert chosen["output_over_least"] <= most
    assert all(row["output_over_least"] >= 1.0 - 1e-9 for row in rows)
    for row in rows:
        assert row["output"] == pytest.approx(row["output_over_least"] * answer["least"]["output"])
        assert row["error_in_mean"] == pytest.approx(row["error_rms"] / 2)
        assert row["seconds_per_round"] is None


@pytest.mark.slow
def test_the_compare_command_matches_golden_values_of_output_noise() -> None:
    """At 1-GDP under zero-out with steps of 1, one silo and clip 1, figures are those of sensitivity 1."""
    answer = asked("compare --algorithm dp-ftrl --set momentum=0.9 --rounds 60 --mu 1 --relation zero-out")
    tree = mechanisms_of(answer)["tree"]
    assert tree["output"] == pytest.approx(32.7777786, rel=1e-8)
    assert answer["least"]["output"] == pytest.approx(9.982029897, rel=1e-9)
    assert tree["seconds_per_round"] > 0.0
    assert asked("compare --algorithm momentum-tree --rounds 20 --mu 1")["least"]["output"] is None


@pytest.mark.slow
def test_the_compare_command_plots_its_mechanisms(tmp_path: Path) -> None:
    text_of(f"compare --rounds 20 --mu 1 --plot {tmp_path / 'sums.svg'}")
    text_of(f"compare --algorithm dp-ftrl --rounds 12 --mu 1 --dimension 100 --plot {tmp_path / 'row.png'}")
    drawing = (tmp_path / "sums.svg").read_text()
    assert "tree, 5 vectors" in drawing or len(drawing) > 5000
    assert (tmp_path / "row.png").read_bytes().startswith(b"\x89PNG")


def test_correlated_noise_is_fitted_to_running_sums_unless_its_parameters_are_given() -> None:
    """Without numbers "blt" and "auto" serve the mean noise of running sums; with them they are taken as given."""
    fitted = asked("noise --rounds 100 --mu 1 --mechanism blt")
    assert fitted["error_rms"] < asked("noise --rounds 100 --mu 1 --mechanism tree")["error_rms"]
    given = asked("noise --rounds 100 --mu 1 --mechanism lambda-cgd --set theta=[0.96]")
    workload = Workload(FixedOrder(100, 100), 1.0, np.ones(100))
    assert given["sensitivity_value"] == pytest.approx(LambdaCgd(1.0, (0.96,), (0.0,)).sensitivity(workload))


@pytest.mark.slow
def test_the_compare_table_marks_only_upper_bounds_with_a_less_or_equal_sign() -> None:
    lines = text_of("compare --rounds 1000 --mu 1 --max-participations 10 --min-separation 100").splitlines()
    assert lines[0].split()[:3] == ["mechanism", "noise", "std"]
    tree = next(line for line in lines if line.startswith("tree"))
    assert "≤" in tree
    assert not any("≤" in line for line in lines if line.startswith(("independent", "banded", "square root")))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("convert", "exactly one"),
        ("convert --mu 1 --zcdp 1", "exactly one"),
        ("convert --epsilon 1", "together with a delta"),
        ("convert --mu -1", "mu = -1"),
        ("convert --mu 1 --delta 2", "delta = 2"),
        ("convert --mu 1 --relation add-one", "'replace-one', 'zero-out'"),
        # Before: one of the two was ignored in silence.
        ("convert --mu 1 --multiplier 2 --sampling poisson --rounds 60", "leave out --mu, --zcdp and --epsilon"),
        ("convert --mu 1 --sampling poisson --rounds 60", "are for --multiplier; leave them out"),
        ("convert --mu 1 --epochs 3", "are for --multiplier; leave them out"),
        ("noise --rounds 10 --mu 0", "mu = 0"),
        ("noise --rounds 10 --mu 1 --mechanism bst", "'independent', 'scheduled', 'tree', 'banded'"),
        ("noise --rounds 10 --mu 1 --mechanism blt --set theta=[0.5]", "theta has 1 roots and phi 0"),
        ("noise --rounds 10 --mu 1 --mechanism tree --set theta=[0.5]", 'theta is for mechanism = "blt"'),
        ("noise --rounds 10 --mu 1 --mechanism blt --set theta=[0.5,0.6] --set phi=[0.4,0.1]", "θ_1 > φ_1"),
        ("noise --rounds 10 --mu 1 --mechanism blt --set max_vectors=0", "max_vectors = 0 are too few"),
        ("noise --rounds 10 --epochs 2 --mu 1 --mechanism blt --set scale=true", "one pass with equal clips"),
        ("compare --rounds 10 --mu 1 --set momentum=0.5", "give --algorithm"),
        ("compare --rounds 10 --mu 1 --algorithm dp-ftrl --decay 0.5", "a decay of its own"),
        # Before: ignored in silence, so that the noise was a fifth of that for clip 5.
        ("compare --rounds 10 --mu 1 --algorithm dp-ftrl --set clip=5", "for the norm of --clip"),
        ("compare --rounds 4 --mu 1 --sampling allocation --set momentum=0.5", "give --algorithm"),
        ("compare --rounds 4 --mu 1 --sampling allocation --dimension 10", "nor --dimension"),
        ("compare --rounds 10 --mu 1 --algorithm dp-sgd", "cannot be fitted"),
        ("compare --rounds 10 --mu 1 --algorithm goldstein-erm", "cannot be fitted"),
        ("compare --rounds 10 --mu 1 --algorithm dp-ftrl --set momentum=2", "momentum = 2"),
        ("compare --rounds 10 --mu 1 --algorithm dp-ftrl --dimension 0 --plot a.txt", "--plot a.txt"),
        ("compare --rounds 10 --mu 1 --plot /nowhere/a.png", "cannot be written"),
        ("noise --rounds 10 --mu 1 --decay 2", "decay = 2"),
        ("noise --rounds 10 --mu 1 --clip 0", "clip = 0"),
        ("noise --rounds 10 --mu 1 --trust maybe", "trust"),
        ("noise --rounds 10 --mu 1 --epochs 3", "multiple of epochs = 3"),
        ("noise --rounds 10 --mu 1 --epochs 2 --max-participations 2", "only one of them"),
        ("noise --rounds 10 --mu 1 --min-separation 2", "together with max_participations"),
        ("noise --rounds 12 --mu 1 --sampling shuffled", "'fixed', 'poisson', 'allocation'"),
        ("noise --rounds 12 --mu 1 --sampling poisson", "a record's influence is unbounded there"),
        ("noise --rounds 12 --mu 1 --sampling poisson --decay 0 --groups 5", "groups = 5"),
        ("noise --rounds 12 --mu 1 --groups 2", "groups = 2: groups are for records that take part in secret"),
        ("noise --rounds 12 --mu 1 --sampling poisson --max-participations 2", "give only one of them"),
        ("noise --rounds 12 --mu 1 --sampling poisson --mechanism banded --groups 4", "12 bands"),
        ("convert --multiplier 1 --sampling poisson", "--rounds"),
        ("convert --mu 1 --unit household", "'record', 'user', 'client'"),
        ("convert --mu 1 --records 8", "a record is one in one silo"),
        ("convert --multiplier 1 --rounds 12", "for a public order use"),
        ("convert --multiplier 0 --rounds 12 --sampling poisson", "noise_multiplier = 0"),
        ("spent --rounds 10 --std 0", "std = 0"),
    ],
)
def test_invalid_privacy_options_are_refused_by_name_in_one_line(line: str, named: str) -> None:
    with pytest.raises(InputError) as caught:
        text_of(line)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "heavy"),
    [
        ("convert --mu 1", ["torch", "pydantic", "cryptography"]),
        ("compare --rounds 500 --mu 1", ["torch"]),
        ("--help", ["torch", "scipy", "numpy", "pydantic"]),
    ],
)
def test_privacy_commands_import_no_heavy_module_that_they_do_not_need(line: str, heavy: list[str]) -> None:
    """Each would take from a tenth to three seconds of a command that takes half of one."""
    code = (
        "import sys; from typer.testing import CliRunner; from fedpriv.cli.privacy import app; "
        f"code = CliRunner().invoke(app, {line.split()!r}, catch_exceptions=False).exit_code; "
        f"sys.exit(code or ', '.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", ["ledger", "ledger --json"])
def test_the_ledger_command_refuses_a_run_without_a_finished_cell(tmp_path: Path, words: str) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"cells": []}))
    with pytest.raises(InputError, match="no finished cell whose claim could be compared yet; wait for one"):
        text_of(f"{words} {tmp_path}")


EPSILON_03, EPSILON_1 = 1.1318, 4.3772

GOLDEN = [
    ("--rounds 60 --sampling allocation --relation zero-out", EPSILON_03, 0.9205),
    ("--rounds 240 --sampling allocation --relation zero-out", 0.5, 0.8964),
    ("--rounds 64 --epochs 4 --sampling allocation --relation zero-out", EPSILON_03, 1.8202),
    ("--rounds 60 --sampling poisson --relation zero-out", EPSILON_1, 0.6098),
    ("--rounds 60 --sampling poisson --relation replace-one", EPSILON_03, 1.0411),
    ("--rounds 60 --sampling allocation --relation replace-one", EPSILON_1, 0.5892),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "epsilon", "golden"), in_parts(GOLDEN, [GOLDEN[2], GOLDEN[4]]))
def test_noise_multipliers_match_golden_values_and_the_spent_command_inverts_them(
    line: str, epsilon: float, golden: float
) -> None:
    """z to 1e-3, for a clip of 2 and a batch of 5; `spent` says what was asked for."""
    setting = f"--decay 0 --clip 2 --batch 5 {line}"
    noise = asked(f"noise --epsilon {epsilon} --delta 1e-5 {setting}")
    assert noise["noise_multiplier"] == pytest.approx(golden, rel=1e-3)
    assert noise["noise_std"] == pytest.approx(noise["noise_multiplier"] * 2 / 5, rel=1e-9)
    assert 0.995 * epsilon < noise["epsilon_at_most"] <= epsilon
    spent = asked(f"spent {setting} --std {noise['noise_std']!r}")
    assert spent["epsilon_at_most"] == pytest.approx(noise["epsilon_at_most"], rel=1e-6)
    assert "mu" not in spent


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("line", "at_6", "at_7", "at_8"),
    [
        ("--sampling allocation --rounds 60 --multiplier 0.9205", 0.325, 0.373, 0.416),
        ("--sampling allocation --rounds 600 --epochs 10 --multiplier 1.546", 0.296, 0.296, 0.297),
        ("--sampling poisson --rounds 60 --multiplier 0.9639", 0.317, 0.358, 0.396),
    ],
)
def test_convert_prints_the_mu_charged_to_a_lifetime_budget_at_several_slacks(
    line: str, at_6: float, at_7: float, at_8: float
) -> None:
    """The table's values are rounded points of the curve; what is charged is certified above them."""
    charges = asked(f"convert {line} --relation zero-out")
    for slack, value in (("1e-06", at_6), ("1e-07", at_7), ("1e-08", at_8)):
        assert value * 0.998 < charges[f"mu_with_slack_{slack}"] < value * 1.01


def test_convert_prints_group_privacy_of_several_records_of_one_person() -> None:
    """k·μ in a public order; by coins no more than if everybody knew the rounds, and more than one record has."""
    public = asked("convert --mu 1 --together 2 --together 5")
    for size in (2, 5):
        assert public[f"epsilon_of_{size}_records_together"] == pytest.approx(gdp.epsilon_of(float(size), 1e-5))
    line = "convert --sampling poisson --rounds 20 --multiplier 2 --relation zero-out --unit user --together 3"
    secret = asked(line)
    one, three = secret["epsilon_at_most"], secret["epsilon_of_3_users_together"]
    assert 3.0 * one < three < gdp.epsilon_of(3.0 * math.sqrt(20) / 2.0, 1e-5)
    assert "ε of 3 users together" in text_of(line)


@pytest.mark.slow
def test_the_compare_command_lists_banded_noise_by_groups_with_their_worst_errors() -> None:
    """Prefix sums of one pass, T = 60: 7.13, 5.32 and 5.33 for 1, 6 and 12 bands at ε = 1.13."""
    setting = "--rounds 60 --delta 1e-5 --sampling allocation --relation zero-out"
    rows = mechanisms_of(asked(f"compare {setting} --epsilon 1.1318"))
    for count, error in ((1, 7.13), (6, 5.32), (12, 5.33)):
        assert rows[f"banded ({count}), {count} groups"]["error_worst"] == pytest.approx(error, abs=0.01)
    assert len(rows) == 8
    (one,) = asked(f"compare {setting} --epsilon 4.3772 --groups 12")["mechanisms"]
    assert one["error_worst"] == pytest.approx(2.37, abs=0.01)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "line",
    [
        "convert --mu 1",
        "noise --rounds 12 --mu 1",
        "compare --rounds 12 --mu 1",
        "compare --rounds 4 --mu 1 --sampling allocation --relation zero-out",
    ],
)
def test_every_privacy_command_names_the_requested_unit_of_protection(line: str) -> None:
    persons = asked(f"{line} --unit user --records 8")
    assert persons["unit"] == "all records of one person in one silo, at most 8 a round"
    assert asked(line)["unit"] == "one record of a silo"


@pytest.mark.parametrize(("unit", "noun"), [("record", "record"), ("user", "person"), ("client", "client")])
def test_caveats_of_a_guarantee_name_the_unit_of_protection(unit: str, noun: str) -> None:
    text = text_of(f"convert --mu 8 --delta 0.01 --unit {unit}")
    assert f"silos of 100 {noun}s or more: publishing one {noun} picked at random" in text
    assert f"lets the odds about a {noun} grow" in text


@pytest.mark.slow
def test_the_noise_command_describes_random_allocation_in_words() -> None:
    text = text_of("noise --rounds 12 --mu 1 --sampling allocation --relation zero-out --decay 0")
    assert "a record takes part in one of 12 rounds, drawn at random, and in which one stays secret" in text
    assert "mu with slack 1e-06" in text
    assert math.isclose(float(text.split("noise multiplier")[1].split()[0]), 0.75, abs_tol=0.1)


def test_compared_group_counts_divide_the_rounds_of_an_epoch_unless_one_is_given() -> None:
    setting = AccountingSetting(rounds=24, epochs=2, sampling="allocation", relation="zero-out")
    for compared, groups in ((setting, [1, 2, 3, 4, 6, 12]), (replace(setting, groups=2), [2])):
        assert [amplified.groups for _, amplified, _ in compared._amplified_mechanisms()] == groups


@pytest.mark.parametrize("epochs", [0, -2])
def test_a_setting_without_a_pass_is_refused(epochs: int) -> None:
    with pytest.raises(InputError, match=f"rounds = 4 must be a multiple of epochs = {epochs}"):
        AccountingSetting(rounds=4, epochs=epochs)
