"""Claims as they are shown: exact only where they are, the strongest named, and never what somebody wrote."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.api.results import load_results
from fedpriv.claims.claim import describe_group_privacy
from fedpriv.cli.app import app
from fedpriv.core.errors import FedprivError, RunError
from fedpriv.core.figures import format_upper
from fedpriv.scenario.load import parse_scenario, resolve_cell
from fedpriv.show.page import render_fragment
from fedpriv.show.plots import plot_title
from fedpriv.show.statement import Statement, make_statements
from fedpriv.show.summary import privacy_lines
from fedpriv.show.verdict import describe_run
from fedpriv.study.results import Results, read_claims
from fedpriv.study.stored import privacy_data
from fedpriv.study.sweep import RunOptions, run_sweep
from tests.conftest import small_tree
from tests.show.builders import results_of_records, results_with, streams_of


def said_of(**changes: Any) -> tuple[str, Statement]:
    """The line of privacy in a terminal, and the statement, of a small run."""
    cell = resolve_cell(small_tree(**changes), "test")
    results = results_of_records(privacy_data(cell, streams_of(cell)))
    (statement,) = make_statements(results)
    return privacy_lines(results)[0], statement


def test_the_word_exactly_appears_only_for_guarantees_that_the_mechanism_attains() -> None:
    line, statement = said_of()
    assert "μ-GDP exactly with μ = 4 " in line
    assert statement.attained
    reduced = {"name": "momentum-tree-reduced", "trust": "untrusted", "alpha": 0.5, "step": 0.1}
    line, statement = said_of(algorithm=reduced, privacy={"relation": "zero-out", "mu": 1.0})
    assert "exact" not in line
    assert "μ-GDP with μ at most 1 " in line
    assert not statement.attained


def test_calibration_by_a_papers_constants_reports_its_charged_mu_and_the_exact_mu() -> None:
    """Before: "μ-GDP exactly with μ = 0.5016" where the noise gives 0.083 by counting every node."""
    tree = {"name": "momentum-tree", "trust": "untrusted", "clip": 1.0, "alpha": 0.5, "step": 0.1}
    privacy = {"relation": "zero-out", "epsilon": 2.0, "delta": 1e-5}
    line, statement = said_of(algorithm={**tree, "calibration": "paper"}, privacy=privacy)
    assert "exactly" not in line
    assert "μ at most 0.5016, as the paper's constants charge it, and by exact counting 0.0829 " in line
    (charge,) = [text for text in statement.assumptions if text.startswith("Charged is")]
    exact, paper = (
        streams_of(resolve_cell(small_tree(algorithm={**tree, "calibration": name}, privacy=privacy), "test"))[0]
        for name in ("exact", "paper")
    )
    assert f"by exact counting μ is at most {format_upper(exact.mu * exact.std / paper.std)}, ε = " in charge


def test_noise_under_a_quantile_clip_is_stated_in_units_of_the_current_clip() -> None:
    (plain,) = make_statements(results_with(1.0))[0].mechanisms
    assert "units" not in plain
    scenario = {"algorithm": {"name": "dp-fedavg", "clip_quantile": 0.5}}
    (named,) = make_statements(results_with(1.0, scenario=scenario))[0].mechanisms
    assert named.startswith(plain)
    assert "in units of the clip of the moment" in named


def two(**second: Any) -> Results:
    """Two sweep points, the second of which says other things of itself than the first."""
    facts = {"point": {"x": 1}}, {"point": {"x": 2}, "cell": 1, **second}
    cells = [results_with(1.0, **more).cells[0] for more in facts]
    return dataclasses.replace(results_of_records(*cells), axes={"x": [1, 2]})


@pytest.mark.parametrize(
    ("second", "named"),
    [
        ({"trust": "trusted", "test_accuracy": 0.9}, ["x 1"]),  # before: the trusted cell, by its accuracy
        ({"relation": "zero-out", "test_accuracy": 0.9}, ["x 1"]),
        ({"trust": "trusted", "epsilon": 0.5, "mu": 0.2}, ["x 1", "x 2"]),  # neither is stronger
        ({"epsilon": 0.5, "mu": 0.2}, ["x 2"]),
        ({"epsilon": None, "mu": None}, []),
    ],
)
def test_the_most_private_setting_is_ranked_by_trust_and_relation_before_epsilon(
    second: dict[str, Any], named: list[str]
) -> None:
    pattern = r"(?:most private setting|other neighbours,) it is [\d.]+ % \((x \d)"
    assert re.findall(pattern, describe_run(two(**second))) == named


def test_a_range_of_mu_names_both_protection_levels_and_group_privacy_of_the_largest() -> None:
    """Two levels, two words; the sentence on persons is of the run that protects least; floats are no integers."""
    strong, weak = results_with(0.3).cells[0], results_with(4.0).cells[0]
    both = results_of_records(strong, weak)
    assert "(μ = 0.3: strong protection) to 97.8 % (μ = 4: next to no protection)" in describe_run(both)
    persons = [line for line in make_statements(both)[0].assumptions if line.startswith("One person")]
    assert persons == [describe_group_privacy([GaussianDP(weak["mu"])], 1e-5)]


def test_one_floating_point_cell_makes_the_whole_statement_assume_real_arithmetic() -> None:
    cell = resolve_cell(small_tree(), "test")
    records = [privacy_data(cell, streams_of(cell, for_release=released)) for released in (True, False)]
    for count, floats in ((2, True), (1, False)):
        (statement,) = make_statements(results_of_records(*records[:count]))
        for start, expected in (
            ("The noise is Gaussian in real arithmetic", floats),
            ("Records enter as integers", not floats),
        ):
            assert any(line.startswith(start) for line in statement.assumptions) == expected


@pytest.fixture(scope="module")
def doctored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and the same after somebody wrote smaller figures into results.json."""
    tree = small_tree(federation__rounds=2, run__evaluations=2)
    del tree["seed"]
    options = RunOptions(out=tmp_path_factory.mktemp("runs") / "run")
    run = run_sweep(parse_scenario(tree, "test"), options)
    other = run.parent / "doctored"
    shutil.copytree(run, other)
    written = json.loads((other / "results.json").read_text())
    written["cells"][0] |= {"mu": 0.001, "rho": 0.001, "zcdp": 5e-7, "epsilon": 0.0, "epsilon_paper": 0.001}
    (other / "results.json").write_text(json.dumps(written))
    return run, other


@pytest.mark.parametrize("command", ["show", "table", "table --format csv", "table --format latex", "report"])
def test_every_view_of_a_run_with_an_edited_claim_says_that_it_differs_from_the_ledger(
    doctored: tuple[Path, Path], command: str
) -> None:
    """Before: show and table said "μ-GDP exactly with μ = 0.001", with exit code 0."""
    for folder, differs in zip(doctored, (False, True), strict=True):
        name, *options = command.split()
        done = CliRunner().invoke(app, [name, str(folder), *options], terminal_width=200)
        assert isinstance(done.exception, Exception) == differs, done.output
        text = (folder / "report.html").read_text() if command == "report" else done.output
        assert ("DIFFERS" in text) == differs
        assert "0.001" not in re.sub(r"0\.001\d", "", text)
    assert "the claim of cell 0 is not what the ledger gives" in str(done.exception)


def test_an_integer_too_large_for_a_float_in_the_results_is_refused_without_a_traceback(
    doctored: tuple[Path, Path], tmp_path: Path
) -> None:
    """Before: an integer of 400 digits ended `show` and `privacy ledger` in an OverflowError."""
    text = (doctored[0] / "results.json").read_text()
    for key in re.findall(r'"(mu|std|sensitivity|delta|epsilon|per_record)": [0-9.e-]+', text):
        folder = Path(shutil.copytree(doctored[0], tmp_path / key, dirs_exist_ok=True))
        huge = re.sub(rf'"{key}": [0-9.e-]+', f'"{key}": {10**400}', text)
        (folder / "results.json").write_text(huge)
        for command in ("show", "privacy ledger"):
            done = CliRunner().invoke(app, [*command.split(), str(folder)])
            assert isinstance(done.exception, FedprivError), (key, done.exception)


def test_plots_of_a_run_with_an_edited_claim_say_that_it_differs_from_the_ledger(
    doctored: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, differs in zip(doctored, (False, True), strict=True):
        results = read_claims(folder)
        assert ("DIFFERS" in plot_title(results)) == differs
        assert "0.001" not in plot_title(results)
        monkeypatch.setattr("fedpriv.show.plots.plot_run", lambda folder, *_, **__: [folder / "curves.png"])
        done = CliRunner().invoke(app, ["plot", str(folder)])
        assert isinstance(done.exception, RunError) == differs


def test_an_edited_claim_is_replaced_by_figures_recomputed_from_the_releases(doctored: tuple[Path, Path]) -> None:
    run, other = doctored
    true, read = read_claims(run), read_claims(other)
    assert (true.differs, read.differs) == ((), (0,))
    for name in ("mu", "rho", "zcdp", "epsilon", "epsilon_paper"):
        assert read.cells[0][name] == true.cells[0][name]
    shown = load_results(other)
    assert shown[0].privacy.mu == pytest.approx(4.0)
    assert "DIFFERS" in repr(shown)
    assert "DIFFERS" not in repr(load_results(run))
    assert "DIFFERS" in shown._repr_html_()


def test_a_notebook_view_shows_the_claim_and_the_caveats_of_every_delta() -> None:
    """Before: no claim, and caveats for the δ of the first cell alone."""
    cells = [results_with(1.0, delta, cell=index).cells[0] for index, delta in enumerate((1e-5, 0.1))]
    fragment = render_fragment(results_of_records(*cells))
    assert "Privacy: one record of a silo, replace-one neighbours" in fragment
    assert "δ = 0.1 is not below 1/n" in fragment
