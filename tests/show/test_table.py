"""Rendered tables, character by character where that is what people read."""

import csv
import dataclasses
import io
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fedpriv.claims.claim import EXACT_ASSUMPTIONS
from fedpriv.claims.ledger import ReleaseStream, stream_to_data
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.participation.secret import PoissonSampling
from fedpriv.show.summary import (
    METRICS,
    compare_with_published,
    describe_incomplete,
    format_value,
    missing_seeds,
    short_names,
    summarize,
)
from fedpriv.show.table import render_tables
from fedpriv.study.results import Results

Make = Callable[..., Results]
LOSS, ACCURACY, *_ = METRICS


def without(*gone: tuple[float, int, int]) -> Callable[[Mapping[str, Any], int], tuple[float, float] | None]:
    """The same figures everywhere, but none for the given (rho, silos, seed)."""
    return lambda point, seed: None if (*point.values(), seed) in gone else (2.256, 0.7)


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_markdown_beside_a_paper(make_table: Make) -> None:
    # fmt: off
    expected = """\
## A small run

**test loss: measured [published, measured - published]**

| ρ \\ silos |                                1 |                               10 |
| --------- | -------------------------------: | -------------------------------: |
| 4         | 2.2560 ± 0.0010 [2.256, +0.0000] | 2.2660 ± 0.0010 [2.267, -0.0010] |
| 8         | 2.2520 ± 0.0010 [2.253, -0.0010] | 2.2620 ± 0.0010 [2.250, +0.0120] |

**test accuracy (%): measured [published, measured - published]**

| ρ \\ silos |                       1 |                      10 |
| --------- | ----------------------: | ----------------------: |
| 4         | 70.0 ± 1.0 [69.9, +0.1] | 69.0 ± 1.0 [69.4, -0.4] |
| 8         | 74.0 ± 1.0 [70.2, +3.8] | 73.0 ± 1.0 [70.0, +3.0] |

Metrics are means ± sample standard deviations over 3 seeds, computed on engine vectorized. The largest differences to published values are 0.0120 in test loss and 3.8 in test accuracy (%). Cells of one seed share the order of records and, scaled, their noise: compare rows seed by seed, and compute the spread from paired differences.

Privacy: one record of a silo, replace-one neighbours, untrusted server: μ-GDP exactly with μ = 4 to 8 (zCDP 8 to 32); (ε, δ) = (24 to 48, 1e-05) exact, (28 to 56, 1e-05) by the paper's formula, rounded up; simulation noise (seeded, not for release).

ε = 48 is above 20: it lets the odds about a record grow more than 10^8-fold, which is next to no protection.
"""  # noqa: E501
    # fmt: on
    assert render_tables(make_table(), "markdown") == expected


def test_markdown_without_a_paper(make_results: Make) -> None:
    results = make_results({"federation.silos": [1, 100]}, [7, 8], lambda point, seed: (2.25 + 0.01 * seed, 0.5))
    assert render_tables(results, "markdown").split("\n\n")[1] == "\n".join(
        [
            "| silos | rounds |   μ |      ε at δ |       test loss | test accuracy (%) "
            "| gradients | sent by a silo (MB) | clipped (%) | seconds, all seeds |",
            "| ----- | -----: | --: | ----------: | --------------: | ----------------: "
            "| --------: | ------------------: | ----------: | -----------------: |",
            "| 1     |    600 |   4 | 24 at 1e-05 | 2.3250 ± 0.0071 |        50.0 ± 0.0 "
            "|   119,900 |                18.8 |        1.25 |                2.5 |",
            "| 100   |    600 |   4 | 24 at 1e-05 | 2.3250 ± 0.0071 |        50.0 ± 0.0 "
            "|   119,900 |                18.8 |        1.25 |                2.5 |",
        ]
    )


def test_one_seed_has_no_spread(make_table: Make) -> None:
    text = render_tables(make_table(seeds=[1]), "markdown")
    assert "| 4         | 2.2560 [2.256, +0.0000] | 2.2660 [2.267, -0.0010] |" in text
    assert "±" not in text
    assert lines_of(text, "Metrics are of one seed, computed on engine vectorized. The largest differences to ")


def test_an_unfinished_run_says_so_loudly(make_table: Make) -> None:
    results = make_table(figures=without((4.0, 1, 2), (8.0, 10, 0), (8.0, 10, 1), (8.0, 10, 2)))
    text = render_tables(results, "markdown")
    assert lines_of(text, "**INCOMPLETE") == [
        "**INCOMPLETE: 8 of 12 cells are finished.** "
        "Missing: ρ = 4, silos 1, seed 2; ρ = 8, silos 10, seeds 0, 1, 2."
    ]
    assert "2.2560 ± 0.0000 (2 of 3 seeds) [2.256, +0.0000]" in text
    assert "missing [2.250]" in text
    assert "missing [70.0]" in text
    assert "INCOMPLETE: 8 of 12 cells" in render_tables(results, "latex")


def test_a_complete_run_is_not_called_incomplete(make_table: Make) -> None:
    assert describe_incomplete(make_table()) == ""
    assert missing_seeds(make_table()) == []
    assert "INCOMPLETE" not in render_tables(make_table(), "markdown") + render_tables(make_table(), "latex")


def test_a_run_before_its_first_cell(make_table: Make, make_results: Make) -> None:
    nothing = make_table(figures=lambda point, seed: None)
    assert "**INCOMPLETE: 0 of 12 cells are finished.**" in render_tables(nothing, "markdown")
    assert "largest" not in render_tables(nothing, "markdown")
    plain = make_results({}, [0], lambda point, seed: None)
    assert "**INCOMPLETE: 0 of 1 cells are finished.** Missing: seed 0." in render_tables(plain, "markdown")
    assert len({len(line) for line in lines_of(render_tables(plain, "markdown"), "|")}) == 1


def test_no_more_than_ten_missing_points_are_listed(make_results: Make) -> None:
    results = make_results({"federation.silos": list(range(1, 15))}, [0], lambda point, seed: None)
    (line,) = lines_of(render_tables(results, "markdown"), "**INCOMPLETE")
    assert line.endswith("; silos 10, seed 0; and 4 more points.")


def test_another_axis_gets_a_table_a_value(make_table: Make) -> None:
    axes = {
        "privacy.rho": [4.0, 8.0],
        "algorithm.trust": ["untrusted", "trusted"],
        "federation.silos": [1, 10],
    }
    text = render_tables(make_table(axes=axes), "markdown")
    assert [line.partition(":")[0] for line in lines_of(text, "**")] == [
        "**test loss, untrusted",
        "**test loss, trusted",
        "**test accuracy (%), untrusted",
        "**test accuracy (%), trusted",
    ]
    assert [line.split(", ")[2][:15] for line in lines_of(text, "Privacy")] == [
        "untrusted serve",
        "trusted server:",
    ]


def test_only_published_metrics_have_tables(make_table: Make) -> None:
    paper = {
        "rows": "privacy.rho",
        "columns": "federation.silos",
        "test_loss": [[2.256, 2.267], [2.253, 2.25]],
        "row_values": [4.0, 8.0],
        "column_values": [1, 10],
    }
    text = render_tables(make_table(paper=paper), "markdown")
    assert len(lines_of(text, "**")) == 1
    assert "accuracy" not in text


def test_values_the_paper_does_not_have_stand_alone(make_table: Make) -> None:
    axes = {"privacy.rho": [4.0, 16.0], "federation.silos": [1]}
    text = render_tables(make_table(axes=axes, seeds=[1]), "markdown")
    assert "| 4         | 2.2560 [2.256, +0.0000] |" in text
    assert "| 16        |                  2.2560 |" in text


def test_difference_is_measured_minus_published(make_table: Make) -> None:
    results = make_table()
    below = compare_with_published(results, LOSS, {"privacy.rho": 4.0, "federation.silos": 10})
    above = compare_with_published(results, LOSS, {"privacy.rho": 8.0, "federation.silos": 10})
    assert below.published == 2.267
    assert below.difference == pytest.approx(2.266 - 2.267)
    assert above.difference == pytest.approx(2.262 - 2.250)


def test_the_largest_difference_may_be_negative(make_table: Make) -> None:
    text = render_tables(make_table(figures=lambda point, seed: (2.25, 0.7)), "markdown")
    # 2.25 - 2.267, 70 - 69.4
    assert "differences to published values are 0.0170 in test loss and 0.6 in test accuracy (%)." in text


def test_a_tiny_negative_difference_has_no_minus_sign(make_table: Make) -> None:
    text = render_tables(make_table(figures=lambda point, seed: (2.256 - 1e-6, 0.7)), "markdown")
    assert "[2.256, +0.0000]" in text
    assert "-0.0000" not in text


def test_standard_deviation_is_the_sample_one() -> None:
    summary = summarize([{"test_accuracy": value} for value in (0.5, 0.6, 0.8)], ACCURACY)
    assert summary is not None
    assert summary.std == pytest.approx(100 * statistics.stdev([0.5, 0.6, 0.8]))
    assert summary.mean == pytest.approx(190 / 3)
    assert summarize([], ACCURACY) is None


def test_csv_parses_back(make_table: Make) -> None:
    rows = list(csv.DictReader(io.StringIO(render_tables(make_table(), "csv"))))
    assert len(rows) == 8
    row = rows[2]
    assert list(row) == [
        *("privacy.rho", "federation.silos", "metric", "mean", "std", "seeds", "published", "difference"),
        *("mu", "epsilon", "delta", "relation", "trust", "ledger"),
    ]
    assert (row["privacy.rho"], row["federation.silos"], row["metric"]) == ("4.0", "10", "test loss")
    assert float(row["mean"]) == pytest.approx(2.266, abs=1e-12)
    assert float(row["std"]) == pytest.approx(0.001, rel=1e-9)
    assert float(row["published"]) == 2.267
    assert float(row["difference"]) == pytest.approx(-0.001, rel=1e-9)
    assert [row[key] for key in ("seeds", "mu", "epsilon", "delta")] == ["3", "4.0", "24.0", "1e-05"]
    assert (row["relation"], row["trust"]) == ("replace-one", "untrusted")
    assert rows[3]["metric"] == "test accuracy (%)"
    assert float(rows[3]["mean"]) == pytest.approx(69.0)


def test_csv_names_a_difference_of_any_seed(make_table: Make) -> None:
    """Before: "ok" unless the cell of the first seed was the one that differs."""
    results = dataclasses.replace(make_table(), differs=(4,))
    rows = list(csv.DictReader(io.StringIO(render_tables(results, "csv"))))
    assert [row["ledger"] for row in rows] == ["ok"] * 2 + ["DIFFERS"] * 2 + ["ok"] * 4


def test_csv_of_a_missing_point_has_no_figures(make_table: Make) -> None:
    gone = without(*((8.0, 10, seed) for seed in (0, 1, 2)))
    rows = list(csv.DictReader(io.StringIO(render_tables(make_table(figures=gone), "csv"))))
    assert len(rows) == 8
    assert [rows[-1][key] for key in ("seeds", "mean", "std", "published", "difference", "mu")] == [
        *("0", "", "", "70.0", "", "")
    ]


def test_latex_is_booktabs(make_table: Make) -> None:
    first, second = render_tables(make_table(), "latex").split("\n\n")
    assert second.startswith(r"\begin{table}")
    expected = [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"& \multicolumn{2}{c}{silos} \\",
        r"\cmidrule(lr){2-3}",
        r"$\rho$ & 1 & 10 \\",
        r"\midrule",
        r"4 & 2.2560 $\pm$ 0.0010 [2.256, $+$0.0000] & 2.2660 $\pm$ 0.0010 [2.267, $-$0.0010] \\",
        r"8 & 2.2520 $\pm$ 0.0010 [2.253, $-$0.0010] & 2.2620 $\pm$ 0.0010 [2.250, $+$0.0120] \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    assert first.splitlines()[3:] == expected


def test_latex_escapes_text(make_results: Make) -> None:
    results = make_results({"model.some_key": ["a_b & c%", "{x}~\\"]}, [0], lambda point, seed: (2.3, 0.1))
    text = render_tables(results, "latex")
    assert r"a\_b \& c\% & 100 & 600" in text
    assert r"\{x\}\textasciitilde{}\textbackslash{} & 100" in text
    assert r"some\_key & silos & rounds" in text


def test_privacy_lines(make_results: Make) -> None:
    def facts(point: Mapping[str, Any]) -> dict[str, Any]:
        return {} if point["privacy.mode"] == "gaussian" else {"mu": None, "epsilon": None, "noise": "none"}

    results = make_results({"privacy.mode": ["gaussian", "none"]}, [0], lambda p, s: (2.3, 0.1), facts=facts)
    text = render_tables(results, "markdown")
    assert lines_of(text, "Privacy") == [
        "Privacy: one record of a silo, replace-one neighbours, untrusted server: μ-GDP exactly with μ = 4 "
        "(zCDP 8); (ε, δ) = (24, 1e-05) exact, (28, 1e-05) by the paper's formula, rounded up; simulation noise "
        "(seeded, not for release).",
        "Privacy: none, untrusted server: the run adds no noise.",
    ]
    assert "| no noise |        none |" in lines_of(text, "| none")[0]


def test_a_line_of_exact_releases_says_up_to_what_they_hold(make_results: Make) -> None:
    """They are within 2^-60 of what is claimed, so nothing about them is exactly μ-GDP."""
    facts = {"holds": EXACT_ASSUMPTIONS, "attained": False, "noise": "release"}
    results = make_results({"privacy.rho": [4.0]}, [0], lambda p, s: (2.3, 0.1), facts=lambda point: facts)
    (line,) = lines_of(render_tables(results, "markdown"), "Privacy")
    assert "μ-GDP with μ at most 4 " in line
    assert line.endswith(f"by the paper's formula, rounded up; release noise, {EXACT_ASSUMPTIONS}.")


def test_names_are_short_unless_two_axes_share_one() -> None:
    assert short_names(["privacy.rho", "seed"]) == {"privacy.rho": "ρ", "seed": "seed"}
    assert short_names(["data.name", "algorithm.name", "privacy.mu"]) == {
        "data.name": "data",
        "algorithm.name": "algorithm",
        "privacy.mu": "μ",
    }
    assert short_names(["algorithm.step", "model.step"]) == {
        "algorithm.step": "algorithm.step",
        "model.step": "model.step",
    }


@pytest.mark.parametrize(
    ("value", "text"), [(4.0, "4"), (0.5, "0.5"), (1e-5, "1e-05"), (10, "10"), ("1.0", "1.0")]
)
def test_values_as_papers_print_them(value: Any, text: str) -> None:
    assert format_value(value) == text


def test_a_guarantee_without_mu_is_none_the_less_a_guarantee(make_table: Make) -> None:
    """Poisson sampling: no μ, and everywhere its ε; "no noise" is said of runs without any."""
    drawn = ReleaseStream(
        "server", IndependentGaussian(), PoissonSampling(8, 8), 0.0, (1.0,) * 8, 1.0, "zero-out", 1.0
    )
    facts: dict[str, Any] = {
        "mu": None,
        "rho": None,
        "zcdp": None,
        "epsilon_paper": None,
        "guarantee": "subsampled-gaussian",
    }
    facts["releases"] = [stream_to_data(drawn)]
    results = make_table(paper=None, facts=lambda point: facts if point["federation.silos"] == 10 else {})
    text = render_tables(results, "markdown")
    assert [cell.strip() for cell in lines_of(text, "| 4 ")[1].split("|")[2:6]] == [
        "10",
        "600",
        "none",
        "24 at 1e-05",
    ]
    assert "no noise" not in text
    gaussian, sampled = lines_of(text, "Privacy:")
    assert "μ-GDP exactly with μ = 4 to 8" in gaussian
    assert "Poisson sampling, which no μ describes; (ε, δ) = (24 to 48, 1e-05), an upper bound" in sampled
    rows = [
        row
        for row in csv.DictReader(io.StringIO(render_tables(results, "csv")))
        if row["federation.silos"] == "10"
    ]
    assert {(row["mu"], row["epsilon"]) for row in rows} == {("", "24.0"), ("", "48.0")}
    assert "& none & 24 at 1e-05 &" in render_tables(results, "latex")


def test_markup_in_a_label_is_no_markup_of_the_table(make_table: Make) -> None:
    """A page that shows table.md would run it: a label is somebody's who may be none of ours."""
    text = render_tables(replace(make_table(), title="<img src=x onerror=alert(1)>"), "markdown")
    assert "&lt;img src=x" in text
    assert "<" not in text


def test_metrics_that_are_no_numbers_have_no_spread_and_are_shown_as_such() -> None:
    for values in ([math.nan, 1.0], [math.inf, 1.0], [math.inf, -math.inf]):
        found = summarize([{LOSS.key: value} for value in values], LOSS)
        assert found is not None
        assert found.std is not None
        assert math.isnan(found.std)
        assert not math.isfinite(found.mean)
    assert summarize([{LOSS.key: math.nan}], LOSS) is not None


def test_a_diverged_seed_is_shown_as_nan(make_table: Make) -> None:
    def figures(point: Mapping[str, Any], seed: int) -> tuple[float, float]:
        return (math.nan if seed == 0 else 2.0, 0.5)

    assert "nan ± nan" in render_tables(make_table(figures=figures), "markdown")
