"""The report: one file that stands alone, says what the ledger says, and escapes what it was given."""

import json
import math
import re
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path

import pytest

import fedpriv
from fedpriv.core.errors import InputError
from fedpriv.core.figures import best_guess
from fedpriv.noise.trust import TRUSTED, UNTRUSTED
from fedpriv.show.page import _prevent_breaks, write_report
from fedpriv.show.statement import make_statements
from fedpriv.study.results import read_results
from tests.conftest import small_tree

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Text, attributes and nesting of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = {
        **small_tree(),
        "title": "Silos & <servers>",
        "sweep": {"privacy.rho": [1.0, 4.0], "algorithm.trust": ["untrusted", "trusted"], "seeds": 2},
    }
    return fedpriv.run(tree, out=tmp_path_factory.mktemp("report") / "run").folder


@pytest.fixture(scope="module")
def source(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def test_the_report_is_well_formed_html_that_loads_nothing_external(source: str) -> None:
    page = Page(source)
    assert page.open == []
    assert not {"iframe", "img", "object"} & set(page.tags)
    assert page.tags.count("script") == 1
    assert source.count('class="chart"') == 6
    assert "default-src 'none'" in source
    for name, value in page.attributes:
        assert not name.startswith("on"), name
        if name in {"href", "src", "xlink:href"}:
            assert value.startswith(("#", "data:,"))
    assert "@import" not in source
    assert not re.search(r"url\((?!#)", source)


def test_text_of_a_scenario_is_escaped_in_the_report(source: str) -> None:
    assert "Silos &amp; &lt;servers&gt;" in source
    assert "<servers>" not in source


def test_the_report_has_every_section_with_protection_sentences_and_mean_test_loss(
    source: str, folder: Path
) -> None:
    text = Page(source).text
    losses = [cell.test_loss for cell in fedpriv.load(folder).cells[:2]]
    for part in (
        *("What ran", "What is protected", "What came out", "How to run it again", "All settings"),
        *(UNTRUSTED.protection, TRUSTED.protection, "This was a simulation", "one record of a silo"),
        *("partition iid", f"{sum(losses) / 2:.4f} ±", f"fedpriv {metadata.version('fedpriv')}"),
    ):
        assert part in text


def test_the_reported_mu_is_recomputed_from_the_noise_of_the_releases(folder: Path, tmp_path: Path) -> None:
    """What was claimed is not believed: halve the recorded noise, and the report says μ = 2, not 1."""
    tree = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for cell in tree["cells"]:
        for release in cell["releases"]:
            release["std"] /= 2
    tmp_path.joinpath("results.json").write_text(json.dumps(tree), encoding="utf-8")
    honest, halved = (
        [(each.trust, [level.mu for level in each.levels]) for each in make_statements(read)]
        for read in map(read_results, (folder, tmp_path))
    )
    assert honest == [("untrusted", ["1", "4"]), ("trusted", ["1", "4"])]
    assert halved == [("untrusted", ["2", "8"]), ("trusted", ["2", "8"])]


def test_the_report_of_a_run_without_noise_says_that_it_protects_nothing(tmp_path: Path) -> None:
    tree = small_tree(privacy={"relation": "replace-one", "mode": "none"})
    text = Page(fedpriv.run(tree, out=tmp_path / "run").report().read_text(encoding="utf-8")).text
    assert "Nothing: the run adds no noise" in text
    assert "best guess right" not in text
    assert "This was a simulation" not in text


def test_the_best_guess_probability_matches_the_total_variation_of_two_shifted_gaussians() -> None:
    """Against the definition: ½ (1 + total variation of N(0, 1) and N(μ, 1))."""
    for mu in (0.1, 1.0, 4.0):
        width = 1e-4
        density = [
            abs(math.exp(-(x**2) / 2) - math.exp(-((x - mu) ** 2) / 2)) / math.sqrt(2 * math.pi)
            for x in (-10 + width * k for k in range(int((20 + mu) / width)))
        ]
        assert best_guess(mu) == pytest.approx(0.5 + sum(density) * width / 4, abs=1e-6)
    assert best_guess(0.0) == 0.5


def test_the_report_of_an_incomplete_run_counts_its_finished_cells(folder: Path, tmp_path: Path) -> None:
    tree = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    tree["cells"], tree["complete"] = tree["cells"][:3], False
    tree["rerun"] = None  # as a program's own run
    tmp_path.joinpath("results.json").write_text(json.dumps(tree), encoding="utf-8")
    tmp_path.joinpath("history.jsonl").write_text((folder / "history.jsonl").read_text(encoding="utf-8"))
    text = Page(write_report(tmp_path, tmp_path / "deep" / "a.html").read_text(encoding="utf-8")).text
    assert "INCOMPLETE: 3 of 8 cells" in text
    assert "The command was not recorded" in text


def test_the_report_shows_the_recorded_command_verbatim(folder: Path, tmp_path: Path) -> None:
    tree = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    tree["rerun"] = "fedpriv run a.toml --set 'title=<b>'"
    tmp_path.joinpath("results.json").write_text(json.dumps(tree), encoding="utf-8")
    tmp_path.joinpath("history.jsonl").write_text((folder / "history.jsonl").read_text(encoding="utf-8"))
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "fedpriv run a.toml --set 'title=<b>'" in page.text


def test_a_report_of_a_run_without_a_finished_cell_is_refused(tmp_path: Path, folder: Path) -> None:
    tree = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    tmp_path.joinpath("results.json").write_text(json.dumps({**tree, "cells": [], "complete": False}))
    with pytest.raises(InputError, match="no finished cell to report yet"):
        write_report(tmp_path)


@pytest.mark.slow
def test_the_report_of_a_poisson_sampled_run_states_epsilon_and_no_mu(tmp_path: Path) -> None:
    changes = {
        "algorithm": {"name": "dp-sgd", "trust": "trusted", "clip": 5.0, "step": 0.1},
        "privacy": {"relation": "zero-out", "epsilon": 0.5},
        "federation": {"silos": 3, "rounds": 8, "epochs": 2, "sampling": "poisson"},
    }
    folder = fedpriv.run({**small_tree(), **changes}, out=tmp_path / "run").folder
    (statement,) = make_statements(read_results(folder))
    assert statement.private
    assert "drawn by secret coins" in statement.note
    (level,) = statement.levels
    assert (level.mu, level.zcdp, level.epsilon, level.epsilon_paper) == ("none", "none", "0.5", "none")
    assert 50.0 < float(level.attacker.removesuffix(" %")) < 100.0 * math.exp(0.5) / (1.0 + math.exp(0.5)) + 0.1
    text = Page(write_report(folder).read_text(encoding="utf-8")).text
    assert "ε, at most" in text
    assert "takes part in each with probability 0.25, and in which ones stays secret" in text
    assert "hold as long as nobody learns who took part when" in text


@pytest.mark.parametrize(("clip", "said"), [(1e9, "No contribution"), (1e-9, "Every contribution")])
def test_a_clipped_fraction_common_to_all_cells_is_a_sentence_and_not_a_chart(
    clip: float, said: str, tmp_path: Path
) -> None:
    """Independent noise on sums without memory is the same under every mechanism: no chart of that either."""
    algorithm = {"name": "dp-sgd", "trust": "trusted", "clip": clip, "step": 1e-3}
    privacy = {"relation": "replace-one", "mu": 1.0}
    tree = {**small_tree(), "algorithm": algorithm, "privacy": privacy}
    source = fedpriv.run(tree, out=tmp_path / "run").report().read_text("utf-8")
    assert said in Page(source).text
    drawn = [f'id="{name}"' in source for name in ("clipped", "noise", "tradeoff")]
    assert drawn == [False, False, True]


def test_numbers_and_their_units_are_joined_by_non_breaking_spaces() -> None:
    expected = "69.6\u00a0% (ε\u00a0=\u00a04 at δ\u00a0=\u00a01e\u201105)"
    assert _prevent_breaks("69.6 % (ε = 4 at δ = 1e-05)") == expected
