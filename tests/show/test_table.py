"""Rendered tables, character by character where that is what people read."""

import csv
import dataclasses
import io
import math
import re
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
from tests.show.builders import PAPER, results_of, table_of

LOSS, ACCURACY, *_ = METRICS


def without(*gone: tuple[float, int, int]) -> Callable[[Mapping[str, Any], int], tuple[float, float] | None]:
    """The same figures everywhere, but none for the given (rho, silos, seed)."""
    return lambda point, seed: None if (*point.values(), seed) in gone else (2.256, 0.7)


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_markdown_tables_with_published_values_match_the_expected_text() -> None:
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

Metrics are means ± sample standard deviations over 3 seeds, computed on engine vectorized. The largest differences to published values are 0.0120 in test loss and 3.8 in test accuracy (%). Cells of one seed can share the order of records and, scaled, their noise: compare rows seed by seed, and compute the spread from paired differences.

Privacy: one record of a silo, replace-one neighbours, untrusted server: μ-GDP exactly with μ = 4 to 8 (zCDP 8 to 32); (ε, δ) = (24 to 48, 1e-05) exact, (28 to 56, 1e-05) by the paper's formula, rounded up; simulation noise (seeded, not for release).

ε = 48 is above 20: it lets the odds about a record grow more than 10^8-fold, which is next to no protection.
"""  # noqa: E501
    # fmt: on
    assert render_tables(table_of(), "markdown") == expected


def test_markdown_tables_without_published_values_match_the_expected_text() -> None:
    results = results_of({"federation.silos": [1, 100]}, [7, 8], lambda point, seed: (2.25 + 0.01 * seed, 0.5))
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


def test_a_table_of_one_seed_has_no_standard_deviation() -> None:
    text = render_tables(table_of(seeds=[1]), "markdown")
    assert "| 4         | 2.2560 [2.256, +0.0000] | 2.2660 [2.267, -0.0010] |" in text
    assert "±" not in text
    assert lines_of(text, "Metrics are of one seed, computed on engine vectorized. The largest differences to ")


def test_a_table_of_an_unfinished_run_is_marked_incomplete_and_lists_missing_seeds() -> None:
    results = table_of(figures=without((4.0, 1, 2), (8.0, 10, 0), (8.0, 10, 1), (8.0, 10, 2)))
    text = render_tables(results, "markdown")
    missing = "Missing: ρ = 4, silos 1, seed 2; ρ = 8, silos 10, seeds 0, 1, 2."
    assert lines_of(text, "**INCOMPLETE") == [f"**INCOMPLETE: 8 of 12 cells are finished.** {missing}"]
    for entry in ("2.2560 ± 0.0000 (2 of 3 seeds) [2.256, +0.0000]", "missing [2.250]", "missing [70.0]"):
        assert entry in text
    assert "INCOMPLETE: 8 of 12 cells" in render_tables(results, "latex")


def test_a_complete_run_is_not_called_incomplete() -> None:
    assert describe_incomplete(table_of()) == ""
    assert missing_seeds(table_of()) == []
    assert "INCOMPLETE" not in render_tables(table_of(), "markdown") + render_tables(table_of(), "latex")


def test_a_table_of_a_run_before_its_first_cell_is_marked_incomplete() -> None:
    text = render_tables(table_of(figures=lambda point, seed: None), "markdown")
    assert "**INCOMPLETE: 0 of 12 cells are finished.**" in text
    assert "largest" not in text
    plain = render_tables(results_of({}, figures=lambda point, seed: None), "markdown")
    assert "**INCOMPLETE: 0 of 1 cells are finished.** Missing: seed 0." in plain
    assert len({len(line) for line in lines_of(plain, "|")}) == 1


def test_no_more_than_ten_missing_points_are_listed() -> None:
    results = results_of({"federation.silos": list(range(1, 15))}, [0], lambda point, seed: None)
    (line,) = lines_of(render_tables(results, "markdown"), "**INCOMPLETE")
    assert line.endswith("; silos 10, seed 0; and 4 more points.")


def test_each_value_of_a_third_swept_key_has_its_own_table() -> None:
    trusts = ["untrusted", "trusted"]
    axes = {"privacy.rho": [4.0, 8.0], "algorithm.trust": trusts, "federation.silos": [1, 10]}
    text = render_tables(table_of(axes=axes), "markdown")
    assert [line.partition(":")[0] for line in lines_of(text, "**")] == [
        f"**{metric}, {trust}" for metric in ("test loss", "test accuracy (%)") for trust in trusts
    ]
    assert [line.split(", ")[2].split(" server:")[0] for line in lines_of(text, "Privacy")] == trusts


def test_only_published_metrics_have_tables() -> None:
    loss_only = {key: value for key, value in PAPER.items() if key != "test_accuracy"}
    text = render_tables(table_of(paper=loss_only), "markdown")
    assert len(lines_of(text, "**")) == 1
    assert "accuracy" not in text


def test_settings_without_a_published_value_show_only_the_measured_one() -> None:
    axes = {"privacy.rho": [4.0, 16.0], "federation.silos": [1]}
    text = render_tables(table_of(axes=axes, seeds=[1]), "markdown")
    assert "| 4         | 2.2560 [2.256, +0.0000] |" in text
    assert "| 16        |                  2.2560 |" in text


def test_difference_is_measured_minus_published() -> None:
    below, above = (
        compare_with_published(table_of(), LOSS, {"privacy.rho": rho, "federation.silos": 10})
        for rho in (4.0, 8.0)
    )
    assert below.published == 2.267
    assert below.difference == pytest.approx(2.266 - 2.267)
    assert above.difference == pytest.approx(2.262 - 2.250)


def test_the_largest_difference_is_chosen_and_printed_by_absolute_value() -> None:
    text = render_tables(table_of(figures=lambda point, seed: (2.25, 0.7)), "markdown")
    # 2.25 - 2.267, 70 - 69.4
    assert "differences to published values are 0.0170 in test loss and 0.6 in test accuracy (%)." in text


def test_a_tiny_negative_difference_has_no_minus_sign() -> None:
    text = render_tables(table_of(figures=lambda point, seed: (2.256 - 1e-6, 0.7)), "markdown")
    assert "[2.256, +0.0000]" in text
    assert "-0.0000" not in text


def test_the_printed_standard_deviation_is_that_of_a_sample() -> None:
    summary = summarize([{"test_accuracy": value} for value in (0.5, 0.6, 0.8)], ACCURACY)
    assert summary is not None
    assert summary.std == pytest.approx(100 * statistics.stdev([0.5, 0.6, 0.8]))
    assert summary.mean == pytest.approx(190 / 3)
    assert summarize([], ACCURACY) is None


def test_a_csv_table_parses_back_to_all_figures_of_its_rows() -> None:
    rows = list(csv.DictReader(io.StringIO(render_tables(table_of(), "csv"))))
    assert len(rows) == 8
    row = rows[2]
    measured = {key: float(row[key]) for key in ("mean", "std", "difference")}
    assert measured == pytest.approx({"mean": 2.266, "std": 0.001, "difference": -0.001}, abs=1e-12)
    assert list({**row, **dict.fromkeys(measured, "")}.items()) == [
        ("privacy.rho", "4.0"), ("federation.silos", "10"), ("metric", "test loss"), ("mean", ""), ("std", ""),
        ("seeds", "3"), ("published", "2.267"), ("difference", ""), ("mu", "4.0"), ("epsilon", "24.0"),
        ("delta", "1e-05"), ("relation", "replace-one"), ("trust", "untrusted"), ("ledger", "ok"),
    ]  # fmt: skip
    assert rows[3]["metric"] == "test accuracy (%)"
    assert float(rows[3]["mean"]) == pytest.approx(69.0)


def test_csv_rows_are_marked_if_the_claim_of_any_seed_differs_from_the_ledger() -> None:
    """Before: "ok" unless the cell of the first seed was the one that differs."""
    results = dataclasses.replace(table_of(), differs=(4,))
    rows = list(csv.DictReader(io.StringIO(render_tables(results, "csv"))))
    assert [row["ledger"] for row in rows] == ["ok"] * 2 + ["DIFFERS"] * 2 + ["ok"] * 4


def test_csv_of_a_missing_point_has_no_figures() -> None:
    gone = without(*((8.0, 10, seed) for seed in (0, 1, 2)))
    rows = list(csv.DictReader(io.StringIO(render_tables(table_of(figures=gone), "csv"))))
    assert len(rows) == 8
    entries = [rows[-1][key] for key in ("seeds", "mean", "std", "published", "difference", "mu")]
    assert entries == ["0", "", "", "70.0", "", ""]


def test_latex_tables_use_booktabs_rules() -> None:
    first, second = render_tables(table_of(), "latex").split("\n\n")
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
    assert first.splitlines()[4:] == expected


def test_a_latex_caption_states_seeds_unit_relation_trust_and_privacy_without_the_engine() -> None:
    """Before, it had no δ, unit, relation, trust and label, and named the engine."""
    first, second = render_tables(table_of(), "latex").split("\n\n")
    caption, label = first.splitlines()[2:4]
    for words in (
        "A small run. test loss: measured",
        r"Metrics are means $\pm$ sample standard deviations over 3 seeds.",
        "one record of a silo, replace-one neighbours, untrusted server",
        r"$\mu$-GDP exactly with $\mu$ = 4 to 8",
        r"($\varepsilon$, $\delta$) = (24 to 48, 1e-05) exact",
        "simulation noise (seeded, not for release).",
        r"$\varepsilon$ = 48 is above 20: it lets the odds about a record grow more than $10^{8}$-fold",
    ):
        assert words in caption
    assert r"test accuracy (\%)" in second.splitlines()[2]
    assert "engine" not in caption
    assert ".." not in caption
    assert (label, second.splitlines()[3]) == (r"\label{tab:small}", r"\label{tab:small-2}")


def test_latex_rows_have_the_published_titles_of_algorithms_and_trust_settings() -> None:
    axes = {"algorithm.name": ["dp-mu2-fl", "mine"], "algorithm.trust": ["untrusted", "secure-aggregation"]}
    text = render_tables(results_of(axes), "latex")
    assert r"DP-$\mu$$^2$-FL & untrusted server & 100" in text
    assert "mine & untrusted server, secure aggregation & 100" in text
    assert "dp-mu2-fl" not in text.split("midrule")[1]
    assert "dp-mu2-fl & 100" in render_tables(results_of({"model.kind": ["dp-mu2-fl"]}), "latex")


def test_latex_tables_consist_of_ascii_characters_only() -> None:
    """Guarantee: sentences on privacy have no letter that pdflatex stops at."""
    text = render_tables(
        table_of(facts=lambda point: {"noise": "release", "holds": EXACT_ASSUMPTIONS, "attained": False}), "latex"
    )
    assert text.isascii(), sorted({letter for letter in text if not letter.isascii()})


def test_latex_escapes_text() -> None:
    text = render_tables(results_of({"model.some_key": ["a_b & c%", "{x}~\\"]}), "latex")
    assert r"a\_b \& c\% & 100 & 600" in text
    assert r"\{x\}\textasciitilde{}\textbackslash{} & 100" in text
    assert r"some\_key & silos & rounds" in text


def test_a_latex_row_that_begins_with_a_bracket_is_no_argument() -> None:
    text = render_tables(results_of({"model.shape": [[64, 32], [8]]}), "latex")
    rows = [line for line in text.splitlines() if "[64" in line or "[8" in line]
    assert rows
    assert all(row.startswith("{}[") for row in rows)


def test_a_table_has_one_privacy_line_for_private_and_one_for_noise_free_cells() -> None:
    def facts(point: Mapping[str, Any]) -> dict[str, Any]:
        return {} if point["privacy.mode"] == "gaussian" else {"mu": None, "epsilon": None, "noise": "none"}

    text = render_tables(results_of({"privacy.mode": ["gaussian", "none"]}, facts=facts), "markdown")
    assert lines_of(text, "Privacy") == [
        "Privacy: one record of a silo, replace-one neighbours, untrusted server: μ-GDP exactly with μ = 4 "
        "(zCDP 8); (ε, δ) = (24, 1e-05) exact, (28, 1e-05) by the paper's formula, rounded up; simulation noise "
        "(seeded, not for release).",
        "Privacy: none, untrusted server: the run adds no noise.",
    ]
    assert "| no noise |        none |" in lines_of(text, "| none")[0]


def test_the_privacy_line_of_integer_releases_states_mu_as_an_upper_bound() -> None:
    """They are within 2^-60 of what is claimed, so nothing about them is exactly μ-GDP."""
    facts = {"holds": EXACT_ASSUMPTIONS, "attained": False, "noise": "release"}
    results = results_of({"privacy.rho": [4.0]}, facts=lambda point: facts)
    (line,) = lines_of(render_tables(results, "markdown"), "Privacy")
    assert "μ-GDP with μ at most 4 " in line
    assert line.endswith(f"by the paper's formula, rounded up; release noise, {EXACT_ASSUMPTIONS}.")


def test_key_names_are_shortened_unless_two_swept_keys_share_the_short_name() -> None:
    for names in (
        {"privacy.rho": "ρ", "seed": "seed"},
        {"data.name": "data", "algorithm.name": "algorithm", "privacy.mu": "μ"},
        {"algorithm.step": "algorithm.step", "model.step": "model.step"},
    ):
        assert short_names(list(names)) == names


@pytest.mark.parametrize(
    ("value", "text"), [(4.0, "4"), (0.5, "0.5"), (1e-5, "1e-05"), (10, "10"), ("1.0", "1.0")]
)
def test_swept_values_are_formatted_as_papers_print_them(value: Any, text: str) -> None:
    assert format_value(value) == text


def test_a_poisson_sampled_run_shows_its_epsilon_and_is_not_called_noise_free() -> None:
    """Poisson sampling: no μ, and everywhere its ε; "no noise" is said of runs without any."""
    sampling = PoissonSampling(8, 8)
    sampled = ReleaseStream("server", IndependentGaussian(), sampling, 0.0, (1.0,) * 8, 1.0, "zero-out", 1.0)
    facts: dict[str, Any] = dict.fromkeys(["mu", "rho", "zcdp", "epsilon_paper"])
    facts |= {"guarantee": "subsampled-gaussian", "releases": [stream_to_data(sampled)]}
    results = table_of(paper=None, facts=lambda point: facts if point["federation.silos"] == 10 else {})
    text = render_tables(results, "markdown")
    entries = [cell.strip() for cell in lines_of(text, "| 4 ")[1].split("|")[2:6]]
    assert entries == ["10", "600", "none", "24 at 1e-05"]
    assert "no noise" not in text
    gaussian, poisson = lines_of(text, "Privacy:")
    assert "μ-GDP exactly with μ = 4 to 8" in gaussian
    assert "Poisson sampling, which no μ describes; (ε, δ) = (24 to 48, 1e-05), an upper bound" in poisson
    rows = list(csv.DictReader(io.StringIO(render_tables(results, "csv"))))
    figures = {(row["mu"], row["epsilon"]) for row in rows if row["federation.silos"] == "10"}
    assert figures == {("", "24.0"), ("", "48.0")}
    assert "& none & 24 at 1e-05 &" in render_tables(results, "latex")


def test_html_in_a_title_is_escaped_in_a_markdown_table() -> None:
    """A page that shows table.md would run it: a label is somebody's who may be none of ours."""
    text = render_tables(replace(table_of(), title="<img src=x onerror=alert(1)>"), "markdown")
    assert "&lt;img src=x" in text
    assert "<" not in text


def test_summaries_of_nan_or_infinite_metrics_have_a_nan_standard_deviation() -> None:
    for values in ([math.nan, 1.0], [math.inf, 1.0], [math.inf, -math.inf]):
        summary = summarize([{LOSS.key: value} for value in values], LOSS)
        assert summary is not None
        assert summary.std is not None
        assert math.isnan(summary.std)
        assert not math.isfinite(summary.mean)
    assert summarize([{LOSS.key: math.nan}], LOSS) is not None


def test_a_diverged_seed_is_shown_as_nan() -> None:
    results = table_of(figures=lambda point, seed: (math.nan if seed == 0 else 2.0, 0.5))
    assert "nan ± nan" in render_tables(results, "markdown")


def test_commas_bars_and_line_breaks_in_a_site_name_do_not_break_its_table() -> None:
    sites = {
        "test_loss_mean_of_silos": 1.5,
        "test_loss_worst_silo": 2.0,
        "test_loss_at_St. Mary, York": 1.0,
        "test_loss_at_a|b": 2.0,
        "test_loss_at_two\nlines": 2.0,
    }
    text = render_tables(results_of({"privacy.rho": [4.0]}, facts=lambda point: sites), "markdown")
    assert "**test loss by silo, on its own test records**" in text
    head, rule, row = text.split("own test records**")[1].split("\n\n")[1].splitlines()
    assert [cell.strip() for cell in re.split(r"(?<!\\)\|", head)[2:-1]] == [
        "mean of silos", "worst silo", "St. Mary, York", r"a\|b", "two lines",
    ]  # fmt: skip
    assert len(head) == len(rule) == len(row)


def test_a_killed_run_whose_cells_are_all_finished_is_not_called_incomplete() -> None:
    """Before: "INCOMPLETE: 12 of 12 cells are finished. Missing: .", if results.json was not rewritten."""
    text = render_tables(dataclasses.replace(table_of(), complete=False), "markdown")
    assert "INCOMPLETE" not in text
