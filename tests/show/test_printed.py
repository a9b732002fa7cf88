"""What is printed is true: leakage rounded up, noise down, "exactly" where it is exact, from what was released."""

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.budget import ApproximateGDP, LifetimeBudget
from fedpriv.accounting.curves import Curve, delta_at
from fedpriv.accounting.gaussian import delta_of, epsilon_of
from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.api.results import CellResults, Privacy
from fedpriv.claims.claim import PrivacyClaim, Style, describe_evaluation, group_epsilons
from fedpriv.core.errors import InputError
from fedpriv.core.figures import (
    best_guess,
    format_count,
    format_lower,
    format_lower_range,
    format_upper,
    format_upper_epsilon,
    format_upper_percent,
    format_upper_range,
    privacy_caveats,
)
from fedpriv.scenario.load import resolve_cell
from fedpriv.show.charts import make_charts
from fedpriv.show.statement import make_statements
from fedpriv.show.summary import privacy_lines
from fedpriv.show.table import render_tables
from fedpriv.show.verdict import describe_run
from fedpriv.silo.admission import format_price
from fedpriv.study.results import Results
from tests.conftest import small_tree
from tests.show.builders import results_with

ROOT = Path(__file__).resolve().parents[2]
POSITIVE = st.floats(1e-300, 1e300)


@settings(max_examples=300)
@given(value=POSITIVE, digits=st.integers(2, 12))
def test_guarantee_printed_privacy_loss_rounds_up_and_noise_rounds_down_by_less_than_one_digit(
    value: float, digits: int
) -> None:
    exact = Decimal(repr(value))
    unit = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    assert exact <= Decimal(format_upper(value, digits)) < exact + unit
    assert exact - unit < Decimal(format_lower(value, digits)) <= exact


@pytest.mark.parametrize(
    ("value", "up", "down"),
    [
        (0.1, "0.1", "0.1"),
        (4.0, "4", "4"),
        (9.99991, "10", "9.999"),
        (1e-5, "1e-05", "1e-05"),
        (7.99936575, "8", "7.999"),
    ],
)
def test_directed_rounding_prints_exact_numbers_unchanged_and_others_up_or_down(
    value: float, up: str, down: str
) -> None:
    assert (format_upper(value), format_lower(value)) == (up, down)
    assert format_upper_range([value, value]) == up
    assert format_lower_range([value / 2, value]) == f"{format_lower(value / 2)} to {down}"
    assert (format_upper(math.inf), format_upper(0.0), format_lower(math.nan)) == ("inf", "0", "nan")


@settings(max_examples=200)
@given(mu=st.floats(1e-12, 40.0))
def test_guarantee_the_printed_best_guess_probability_is_an_upper_bound_above_50_percent(mu: float) -> None:
    """Before: "50.0 %" for every mu below .0025, which is what blind guessing is right in."""
    assert best_guess(mu) > 0.5
    shown = format_upper_percent(best_guess(mu))
    assert shown != "50.0 %"
    if shown != "over 99.9 %":
        assert float(shown.removesuffix(" %")) / 100.0 >= 0.5 * math.erfc(-mu / math.sqrt(8.0))
    assert format_upper_percent(0.5) == "50.0 %"
    assert format_upper_percent(0.9991) == "over 99.9 %"  # never certainty
    assert best_guess(math.nan) == 1.0  # a μ that is no number protects nobody


@pytest.mark.slow
def test_the_printed_epsilon_and_delta_of_a_poisson_sampled_run_are_a_valid_bound() -> None:
    """Before: (7.999, 1e-05) for 7.99937, at which δ is above 1.0003e-5 by an independent lower bound."""
    run = PoissonGaussian(0.514864, 1 / 20, 10)
    shown = re.search(r"= \(([\d.]+), ", PrivacyClaim(run, "zero-out").format_sentence("line", 1e-5))
    assert shown is not None
    assert run.delta_of(float(shown[1])) <= 1e-5
    assert run.delta_of(7.999) > 1e-5


def texts_of(results: Results, mu: float, delta: float) -> Iterator[str]:
    """Every style in which a run's privacy is printed."""
    guarantee = GaussianDP(mu)
    (said,) = make_statements(results)
    claim = PrivacyClaim(guarantee, "zero-out")
    yield from (claim.format_sentence(style, delta) for style in get_args(Style))
    yield from privacy_lines(results)
    yield describe_run(results)
    yield render_tables(results, "markdown")
    yield describe_evaluation(results.cells[0]["evaluation"], delta)
    yield format_price(ApproximateGDP(mu, delta / 3))
    yield str(LifetimeBudget(mu / 2.0).why_over_budget([], ApproximateGDP(mu)))
    yield from said.mechanisms
    for line in (line for chart in make_charts(results, [], None) for line in chart.series):
        yield from (line.name, *(mark.tooltip for mark in line.marks))


_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"


@pytest.mark.slow
@settings(max_examples=40)
@given(mu=st.floats(1e-3, 12.0), delta=st.floats(1e-9, 0.05))
def test_guarantee_every_printed_privacy_figure_is_rounded_in_the_conservative_direction(
    mu: float, delta: float
) -> None:
    """Figures are parsed back and compared with the truth; half of them were below it."""
    results = results_with(mu, delta)
    mu = results.cells[0]["mu"]
    epsilon, several = epsilon_of(mu, delta), group_epsilons(GaussianDP(mu), delta)
    seen = set[str]()

    def least(kind: str, pattern: str, text: str, truth: float) -> None:
        for found in re.findall(pattern, text):
            seen.add(kind)
            assert Decimal(found) >= Decimal(repr(truth)), (kind, text)

    for text in texts_of(results, mu, delta):
        own = text.replace("One person's records together", "")
        least("mu", rf"(?:μ = |μ at most |exactly with μ = |mu = ){_NUMBER}", own, mu)
        least("gdp", rf"(?<!\()\b{_NUMBER}-GDP", own, mu)
        least("zcdp", rf"zCDP {_NUMBER}", own, mu * mu / 2)
        least("zcdp", rf"\b{_NUMBER}-zCDP", own, mu * mu / 2)
        least("delta", rf"(?:at δ = |at delta = ){_NUMBER}", own, delta)
        if own == text:
            least("epsilon", rf"ε = {_NUMBER} at δ", own, epsilon)
            least("pair", rf"(?:\(ε, δ\) = \(|\(ε, δ\) at most \(){_NUMBER},", own, epsilon)
        for size, found in re.findall(rf"(\d) records: ε = {_NUMBER}", text):
            assert Decimal(found) >= Decimal(repr(several[int(size)]))
        for found in re.findall(rf"standard deviation (?:of )?{_NUMBER}", text):
            seen.add("noise")
            assert Decimal(found) <= Decimal(repr(float(results.cells[0]["releases"][0]["std"])))
        least("clip", rf"clipped to norm {_NUMBER}", text, 1.2345678)
        least("guess", rf"at most {_NUMBER} %", text, 100.0 * 0.5 * math.erfc(-mu / math.sqrt(8.0)))
    (level,) = make_statements(results)[0].levels
    for shown, truth in ((level.mu, mu), (level.zcdp, mu * mu / 2), (level.delta, delta)):
        assert Decimal(shown) >= Decimal(repr(truth))
    assert {"mu", "gdp", "zcdp", "delta", "noise", "clip"} <= seen
    assert "epsilon" in seen or epsilon == 0.0


def test_no_unlisted_module_formats_privacy_or_noise_figures_itself() -> None:
    """One home: a figure that is formatted beside it rounds to the nearest, and half of the time down."""
    pattern = re.compile(r"\{[^{}\"]*(?:mu|epsilon|delta|slack|zcdp|std|multiplier)[^{}\"]*:\.?\d*[gf]\}")
    echoes = {
        *("plan/calibration.py", "scenario/sections.py", "accounting/poisson.py", "accounting/guarantees.py"),
        *("papers/tran_cutkosky.py", "integers/claim.py", "silo/policy.py", "data/public.py"),
        *("tune/tune.py", "rates/rates.py", "rates/momentum.py", "silo/guards.py"),
    }  # what a person gave, in the message that refuses it, and test data
    paths = [path for folder in ("fedpriv", "clients", "server") for path in (ROOT / folder).rglob("*.py")]
    formatting = [path for path in paths if pattern.search(path.read_text(encoding="utf-8"))]
    assert {"/".join(path.parts[-2:]) for path in formatting} <= echoes


def test_an_epsilon_of_zero_is_always_printed_with_a_note_on_delta() -> None:
    assert format_upper_epsilon(0.0) == "0 (all in δ)"
    results = results_with(0.001, 0.04)
    assert results.cells[0]["epsilon"] == 0.0
    said = "\n".join(texts_of(results, 0.001, 0.04)) + make_statements(results)[0].levels[0].epsilon
    assert not re.search(r"ε = 0(?! \(all)(?![.\d])", said)
    assert "0 (all in δ)" in render_tables(results, "markdown")
    privacy = Privacy("untrusted", "zero-out", "one record of a silo", "simulation", 0.04, 0.001, 5e-7, 0.0, 0.01)
    cell = CellResults({}, 0, 1, 1, {}, None, None, None, 1.0, privacy, (), {}, Path("x"))
    assert "epsilon=0 (all in delta=0.04)" in repr(cell)


def test_a_large_epsilon_or_delta_gets_a_caveat_of_one_sentence() -> None:
    assert privacy_caveats(4.0, 1e-5, 1000) == []
    (large,) = privacy_caveats(20.01, 1e-5, 1000)
    assert "ε = 20.01 is above 20" in large
    (often,) = privacy_caveats(1.0, 1e-3, 1000)
    assert "δ = 0.001 is not below 1/n for the n = 1,000 records of the smallest silo" in often
    (anywhere,) = privacy_caveats(1.0, 0.01)
    assert "silos of 100 records or more" in anywhere
    assert len(privacy_caveats(30.0, 0.01, 1000, "client", slack=True)) == 2
    assert all("client" in line for line in privacy_caveats(30.0, 0.01, 1000, "client"))


def test_a_caveat_states_slack_that_is_not_negligible_beside_delta() -> None:
    """2^-60 in total variation adds (1 + e^ε) 2^-60 to δ: 8.3e-3 at ε = 36.6, beside a printed 1e-5."""
    (*_, line) = privacy_caveats(36.6, 1e-5, slack=True)
    assert "adds (1 + e^ε) · 2^-60 to δ" in line
    assert "0.0069" in line
    assert math.exp(36.6) * 2.0**-60 == pytest.approx(0.0068, rel=0.02)
    assert len(privacy_caveats(21.0, 1e-5, slack=True)) == 1  # 1e-9 of it: no digit of 1e-5 moves
    results = results_with(5.0, 1e-5, holds="up to", attained=False)
    assert any("2^-60 to δ: at ε = 33" in line for line in privacy_lines(results))


@pytest.mark.parametrize(
    ("delta", "size", "told"), [(0.005, 199, False), (0.005, 200, True), (1e-5, 60_000, False)]
)
def test_a_delta_not_below_one_over_the_smallest_silo_gets_a_caveat_in_table_and_report(
    delta: float, size: int, told: bool
) -> None:
    results = results_with(0.5, delta, smallest_silo=size)
    for said in (render_tables(results, "markdown"), " ".join(make_statements(results)[0].caveats)):
        assert ("is not below 1/n" in said) == told


def test_a_delta_of_a_tenth_is_refused_at_load() -> None:
    """Before: δ = .5 ran, and its repr said epsilon=0."""
    for delta in (0.1, 0.5):
        with pytest.raises(InputError, match=r"privacy.delta: publishing all records"):
            resolve_cell(small_tree(privacy={"relation": "replace-one", "rho": 4.0, "delta": delta}), "test")
    assert resolve_cell(small_tree(privacy={"relation": "replace-one", "rho": 4.0, "delta": 0.09}), "test")


def test_counts_of_one_are_printed_in_the_singular() -> None:
    counts = (1, "release"), (2, "release"), (0, "run")
    assert [format_count(*count) for count in counts] == ["1 release", "2 releases", "0 runs"]
    assert "; 1 release; each record" in make_statements(results_with(1.0))[0].mechanisms[0]


def test_the_privacy_curve_at_the_printed_epsilon_is_at_most_the_stated_delta() -> None:
    for run in (AllocatedGaussian(0.9205, 60), PoissonGaussian(2.0, 0.05, 100, "replace-one")):
        shown = re.search(r"= \(([\d.]+), ", PrivacyClaim(run, "zero-out").format_sentence("line", 1e-6))
        assert shown is not None
        curve: Curve = run.curve
        assert delta_at(curve, float(shown[1])) <= 1e-6 * (1 + 1e-3)  # allocation: a grid of its own for one δ
        assert float(shown[1]) >= run.epsilon_of(1e-6)
    assert delta_of(1.0, float(format_upper(epsilon_of(1.0, 1e-6), 6))) <= 1e-6
    assert np.isfinite(run.known_mu)
