"""The paragraph at the top of a report, who holds what, and what running again costs."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedpriv.accounting.gaussian import epsilon_of
from fedpriv.claims.claim import protection_level
from fedpriv.core.errors import InputError
from fedpriv.show import verdict
from fedpriv.show.verdict import RUN_COUNTS, describe_run, epsilon_of_repeated_runs, list_party_views
from fedpriv.study.results import Results
from tests.show.builders import results_of

AXES: dict[str, list[Any]] = {"privacy.rho": [1.0, 4.0]}


def facts(**more: Any) -> Callable[[Any], dict[str, Any]]:
    names = {"algorithm": "dp-mu2-fl", "model": "softmax-regression", "data": "mnist"}
    scenario = {section: {"name": name} for section, name in names.items()}
    return lambda point: {"scenario": scenario, **more}


def made(**more: Any) -> Results:
    return results_of(
        AXES, [0, 1], lambda point, seed: (2.0, 0.5 + 0.1 * point["privacy.rho"]), facts=facts(**more)
    )


def test_the_summary_names_the_best_setting_and_says_that_a_simulation_protects_nobody() -> None:
    said = describe_run(made())
    assert said.startswith("DP-μ²-FL trained softmax-regression on mnist: 100 silos, 600 rounds.")
    assert "The best test accuracy is 90.0 % (ρ = 4; " in said
    assert "This was a simulation with seeded noise: it protects nobody" in said


def test_a_setting_that_diverged_is_not_the_best() -> None:
    def score(point: Mapping[str, Any], seed: int) -> tuple[float, float]:
        return 2.0, math.nan if point["privacy.rho"] == 1.0 else 0.25

    assert "The best test accuracy is 25.0 % (ρ = 4" in describe_run(
        results_of(AXES, [0, 1], score, facts=facts())
    )


def test_the_summary_of_a_real_release_names_secret_keys_and_no_simulation() -> None:
    said = describe_run(made(noise="release"))
    assert "simulation" not in said
    assert "secret keys of the operating systems" in said


def mixed(noises: tuple[str, str], **second: Any) -> Results:
    """Two cells with noise of these kinds, the second of which says other things of itself."""
    results = made()
    changes = {"noise": noises[0]}, {"noise": noises[1], **second}
    cells = [{**cell, **change} for cell, change in zip(results.cells, changes, strict=False)]
    return dataclasses.replace(results, cells=cells)


def test_a_run_that_was_partly_simulated_is_not_called_protected() -> None:
    """Before: "so these releases are protected", of simulated ones too."""
    said = describe_run(mixed(("release", "simulation")))
    assert "Some cells drew their noise with secret keys" in said
    assert "The other noise was simulated from a seed that is written in the results, and protects nobody." in said


def test_a_simulation_with_a_cell_without_noise_says_that_it_protects_nobody() -> None:
    """Before: the sentence was left out, and the probability of the attacker was said of seeded noise."""
    said = describe_run(mixed(("simulation", "none"), mu=None, epsilon=None))
    assert "A cell without noise protects nothing." in said
    assert "This was a simulation with seeded noise: it protects nobody." in said


def test_no_attack_success_is_stated_for_runs_with_a_guarantee_without_mu() -> None:
    """Before: beside a cell without noise, the best guess of the cells with a μ was said of all cells."""
    results = mixed(("simulation", "simulation"), mu=None, epsilon=9.0)
    third = {**results.cells[0], "seed": 2, "noise": "none", "mu": None, "epsilon": None}
    said = describe_run(dataclasses.replace(results, cells=[*results.cells, third]))
    assert "The privacy loss is at most ε = 9 at δ = 1e-05" in said
    assert "attacker" not in said


def test_the_summary_names_all_models_and_data_sets() -> None:
    """Before: those of the first cell alone."""
    results = made()
    other = {**results.cells[1]["scenario"], "data": {"name": "emnist"}}
    cells = [results.cells[0], {**results.cells[1], "scenario": other}]
    assert "softmax-regression on mnist and emnist: " in describe_run(dataclasses.replace(results, cells=cells))


def test_the_party_table_lists_no_noise_for_noise_free_runs_and_all_records_for_a_curator() -> None:
    """Before: "noise from the scenario's seed" without noise, and a curator with nothing but silos' sums."""
    assert not any("noise from" in view.holds for view in list_party_views(made(noise="none")))
    _, server, _ = list_party_views(made(trust="secure-aggregation", noise="none"))
    assert server.sees == "every silo's sum without noise"
    silo, server, _ = list_party_views(made(trust="secure-aggregation", noise="simulation"))
    assert silo.holds.endswith("the keys of its masks")
    assert "every silo's sum" not in server.sees
    curator, others = list_party_views(made(trust="curator", noise="simulation"))
    assert curator.holds.startswith("the records of all silos")
    assert others.holds == "nothing"


def test_a_run_without_noise_says_that_it_protects_nothing() -> None:
    said = describe_run(made(mu=None, epsilon=None, noise="none"))
    assert "A cell without noise protects nothing." in said
    assert "attacker" not in said


def test_the_summary_of_a_run_without_finished_cells_says_only_that_none_is_finished() -> None:
    assert describe_run(results_of(AXES, figures=lambda point, seed: None)) == "No cell is finished yet."


@pytest.mark.parametrize(("mu", "word"), [(0.3, "strong"), (1.0, "moderate"), (2.0, "weak"), (4.0, "next to no")])
def test_the_protection_level_in_words_follows_mu(mu: float, word: str) -> None:
    assert protection_level(mu) == word


@pytest.mark.parametrize(
    ("trust", "silo", "server"),
    [
        ("untrusted", "the key of its noise", "releases, noise included"),
        ("trusted", "its own records", "every silo's sum without noise"),
        ("secure-aggregation", "the keys of its masks", "masked messages"),
    ],
)
def test_the_party_table_gives_noise_keys_to_silos_or_server_by_trust_setting(
    trust: str, silo: str, server: str
) -> None:
    of_silo, of_server, of_others = list_party_views(made(trust=trust, noise="release"))
    assert silo in of_silo.holds
    assert server in of_server.sees
    assert ("key of its noise" in of_silo.holds) == (trust != "trusted")
    assert ("key of its noise" in of_server.holds) == (trust == "trusted")
    assert of_others.holds == "nothing"


def test_the_epsilon_of_repeated_runs_follows_gaussian_composition() -> None:
    mus = {1.0: 0.5, 4.0: 1.0}
    rows = epsilon_of_repeated_runs(results_of(AXES, facts=lambda point: {"mu": mus[point["privacy.rho"]]}))
    assert [row[0] for row in rows] == ["0.5", "1"]
    for mu, row in zip((0.5, 1.0), rows, strict=True):
        composed = [epsilon_of(mu * runs**0.5, 1e-5) for runs in RUN_COUNTS]
        assert [float(text) for text in row[1:]] == pytest.approx(composed, rel=1e-3)


def test_the_summary_states_a_swept_epsilon_once_for_each_setting() -> None:
    results = results_of(
        {"privacy.epsilon": [1.0, 4.0]},
        figures=lambda point, seed: (2.0, 0.1 * point["privacy.epsilon"]),
        facts=lambda point: {**facts()(point), "epsilon": point["privacy.epsilon"]},
    )
    assert (
        "The best test accuracy is 40.0 % (ε = 4 at δ = 1e-05). "
        "At the most private setting it is 10.0 % (ε = 1 at δ = 1e-05)." in describe_run(results)
    )


def test_a_setting_of_smaller_delta_and_larger_epsilon_is_not_said_to_have_a_smaller_epsilon() -> None:
    """Before: "Where ε is smaller, ..." of ε = 2 beside ε = 1, which has a larger δ."""
    figures = {1e-5: {"epsilon": 1.0}, 1e-7: {"epsilon": 2.0}}
    said = describe_run(
        results_of(
            {"privacy.delta": list(figures)},
            facts=lambda point: {
                **facts()(point),
                **figures[point["privacy.delta"]],
                "mu": None,
                "delta": point["privacy.delta"],
            },
        )
    )
    assert "Where ε or δ is smaller, against fewer parties or between other neighbours, it is" in said
    assert "Where ε is smaller" not in said


def test_a_setting_of_smaller_mu_and_larger_epsilon_is_not_said_to_have_a_smaller_epsilon() -> None:
    """Before: "Where ε is smaller, ..." of the larger ε, since with several δ it is μ that is compared."""
    figures = {
        "untrusted": {"mu": 1.0, "delta": 1e-5, "epsilon": 4.378},
        "trusted": {"mu": 0.9, "delta": 1e-12, "epsilon": 6.458},
    }
    said = describe_run(
        results_of(
            {"algorithm.trust": list(figures)},
            facts=lambda point: {
                **facts()(point),
                "trust": point["algorithm.trust"],
                **figures[point["algorithm.trust"]],
            },
        )
    )
    assert "Where μ is smaller, against fewer parties or between other neighbours, it is" in said


@pytest.mark.parametrize(
    ("trust", "data"), [("untrusted", "nothing"), ("trusted", "noise from the scenario's seed")]
)
def test_test_records_that_silos_evaluate_are_the_silos_own(trust: str, data: str) -> None:
    """Before: the server was said to hold "the test records"."""
    silo, server, _ = list_party_views(made(trust=trust, evaluation={"by": "silos"}))
    assert "its own test records" in silo.holds
    assert server.holds == data


def test_guarantee_the_best_guess_is_not_said_of_test_records_that_silos_evaluate() -> None:
    """Before: "one record of a silo" had the μ of the training, also where evaluations had a larger one."""
    assert "equally likely cases of one record of a silo is" in describe_run(made())
    assert "equally likely cases of one training record of a silo is" in describe_run(made(evaluation={"mu": 9.0}))


def test_runs_with_several_counterparts_of_a_point_are_not_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: "no finished sweep point and seed in common", of runs with the same points and seeds."""
    runs = {"one": results_of(AXES), "two": results_of({**AXES, "federation.silos": [1, 10]})}
    monkeypatch.setattr(verdict, "read_results", lambda folder: runs[folder.name])
    with pytest.raises(InputError, match=r"or several sweep points of .*two match each one of .*one"):
        verdict.compare_folders(tmp_path / "one", tmp_path / "two")
