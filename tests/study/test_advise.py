"""`fedpriv advise`: public facts give a scenario that runs at the asked ε; facts of no federation are one line."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedpriv as package
from fedpriv.addons.begin.advise import CLIP, REASONS, SEQUENCE_STEP, Advice, Facts, advise, advise_on_facts
from fedpriv.claims.claim import compute_claim
from fedpriv.claims.ledger import make_release_streams
from fedpriv.core.errors import InputError
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import DTYPES
from fedpriv.scenario.load import parse_scenario, resolve_cell
from tests.cli.command import fedpriv, refusal

TRUSTS = ("untrusted", "trusted", "secure-aggregation")
ANY = st.builds(
    Facts,
    sizes=st.lists(st.integers(1, 10**6), min_size=2, max_size=12).map(tuple),
    features=st.integers(1, 3000),
    classes=st.sampled_from([0, 2, 3, 10, 47]),
    epsilon=st.floats(1e-3, 100.0),
    delta=st.floats(1e-12, 0.01),
    trust=st.sampled_from(TRUSTS),
    feature_norm=st.none() | st.floats(1e-3, 1e3),
    rounds=st.none() | st.integers(1, 500),
    relation=st.sampled_from(["zero-out", "replace-one"]),
)


def priced(advice: Advice) -> float:
    """ε of the written file's own plan."""
    (point,) = parse_scenario(tomllib.loads(advice.text), "written").points
    cell = point.cell
    objective = cell.model.row.objective(
        (advice.facts.features,), advice.facts.classes, DTYPES[cell.run.dtype], cell.model.settings
    )
    claim = compute_claim(make_release_streams(make_plan(cell, objective), cell.schedule.rounds))
    assert claim is not None
    return float(claim.guarantee.figures(cell.privacy.delta)["epsilon"])


@pytest.mark.slow
@settings(max_examples=60)
@given(facts=ANY)
def test_an_advised_scenario_is_valid_and_costs_at_most_the_requested_epsilon(facts: Facts) -> None:
    advice = advise_on_facts(facts)
    assert priced(advice) <= facts.epsilon * (1.0 + 1e-9)
    assert advice.epsilon <= facts.epsilon * (1.0 + 1e-9)
    assert resolve_cell(dict(advice.tree), "again").federation.batches == facts.sizes
    assert facts.rounds is None or advice.tree["federation"]["rounds"] <= facts.rounds
    told = [advice.forecast.std, advice.forecast.norm, advice.forecast.travel, advice.forecast.q]
    assert all(math.isfinite(each) and each > 0.0 for each in told)
    keys = advice.tree["algorithm"]
    reached = keys["step"] * keys["clip"] * advice.tree["federation"]["rounds"]
    assert advice.forecast.travel == pytest.approx(reached, rel=1e-12)  # by the written numbers, which are rounded


@settings(max_examples=30)
@given(facts=ANY.filter(lambda facts: facts.trust == "untrusted" and len(set(facts.sizes)) > 1))
def test_the_forecast_noise_to_signal_ratio_is_never_larger_under_secure_aggregation(facts: Facts) -> None:
    masked = Facts(**{**vars(facts), "trust": "secure-aggregation"})
    one, other = advise_on_facts(facts).forecast, advise_on_facts(masked).forecast
    assert other.q == pytest.approx(one.q * math.sqrt(len(facts.sizes)))
    assert other.norm / other.travel <= one.norm / one.travel * (1.0 + 1e-3)


@pytest.mark.slow
def test_the_forecast_noise_matches_the_spread_of_models_trained_on_zero_features(tmp_path: Path) -> None:
    """Records of zeros have a gradient in the constants alone: the other coordinates are noise."""
    silos, each, width = 3, 40, 50
    zeros = np.zeros((silos * each, width), np.float32)
    labels = np.arange(silos * each) % 2
    np.savez(
        tmp_path / "records.npz", train_features=zeros, train_labels=labels, test_features=zeros,
        test_labels=labels, classes=2,
    )  # fmt: skip
    advice = advise(
        silos=silos, records=each, features=width, classes=2, epsilon=1.0,
        data={"name": str(tmp_path / "records.npz")},
    )  # fmt: skip
    results = package.run(dict(advice.tree), set={"seeds": 20, "run.metrics": [[]]}, out=tmp_path / "run")
    models = np.array([cell.model() for cell in results.cells]).reshape(20, -1)
    found = models[:, : 2 * width].std()
    assert found == pytest.approx(advice.forecast.std, rel=0.15)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"silos": 0}, "silos = 0"),
        ({"silos": 10**9}, "silos = 1000000000"),
        ({"silos": True}, "silos = True"),
        ({"records": []}, "silos = 0: expected"),
        ({"records": (10, 0), "silos": 2}, "records of silo 1 = 0"),
        ({"records": (10, 10, 10)}, "silos = 4: records has 3 numbers"),
        ({"records": 7.5}, "records of silo 0 = 7.5"),  # was a TypeError
        ({"unit": "nobody"}, "unit = 'nobody': accepted are"),  # was written into a scenario that cannot be read
        ({"unit": "user"}, "unit = 'user' of 0 records"),
        ({"unit": "user", "records_of_person": -2}, "records_of_person = -2"),
        ({"unit": "user", "records_of_person": "2"}, "records_of_person = '2'"),  # was a TypeError
        ({"unit": "user", "records_of_person": 2.5}, "records_of_person = 2.5"),  # a scenario that cannot be read
        ({"parameters": 0}, "parameters = 0"),
        ({"sizes": (10, 10)}, "sizes: no fact; known are records, silos, features"),  # was a TypeError, too
        ({"records": 10**12}, "records of silo 0 = 1000000000000"),
        ({"features": 10**300}, "features = 1000"),
        ({"features": 1e300}, "features = 1e+300"),
        ({"features": 0}, "features = 0"),
        ({"features": 7.5}, "features = 7.5"),
        ({"classes": 1}, "classes = 1"),
        ({"classes": -3}, "classes = -3"),
        ({"epsilon": 1e-9}, "epsilon = 1e-09"),
        ({"epsilon": 5000.0}, "epsilon = 5000.0"),
        ({"epsilon": math.nan}, "epsilon = nan"),
        ({"epsilon": "1"}, "epsilon = '1'"),
        ({"delta": 0.0}, "delta = 0.0"),
        ({"delta": 0.5}, "delta = 0.5"),
        ({"delta": -1e-5}, "delta = -1e-05"),
        ({"feature_norm": math.inf}, "feature_norm = inf"),
        ({"feature_norm": 0.0}, "feature_norm = 0.0"),
        ({"rounds": 0}, "rounds = 0"),
        ({"trust": "nobody"}, "trust"),
        ({"trust": "curator"}, "dp-sgd can be run with"),
        ({"relation": "near"}, "relation"),
        ({"trust": "secure-aggregation", "silos": 1}, "the sum over one silo"),
        ({"secret": True}, "secret: no fact"),
    ],
)
def test_federations_with_invalid_facts_are_refused_in_one_line(wrong: dict[str, Any], line: str) -> None:
    facts: dict[str, Any] = {"silos": 4, "records": 100, "features": 10, "classes": 2, "epsilon": 1.0}
    if "records" in wrong and not wrong["records"]:
        facts.pop("silos")
    with pytest.raises(InputError) as refused:
        advise(**{**facts, **wrong})
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_advice_is_computed_without_opening_any_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **_: object) -> None:
        raise AssertionError(words)

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr("numpy.load", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    advise(silos=4, records=100, features=10, classes=2, epsilon=1.0, data={"name": "private.npz"})


def test_the_advise_command_writes_a_scenario_that_runs(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 1200)
    records = (generator.normal(size=(1200, 8)) / 3.0 + np.eye(8)[labels]).astype(np.float32)
    np.savez(
        tmp_path / "mine.npz", train_features=records[:900], train_labels=labels[:900],
        test_features=records[900:], test_labels=labels[900:], classes=3,
    )  # fmt: skip
    words = ["advise", "--silos", "3", "--records", "300", "--features", "8", "--classes", "3", "--epsilon", "3"]
    done = fedpriv(*words, "--data", "mine.npz", "--out", "mine.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(key in done.stdout for key in REASONS)
    assert "Secure aggregation: q = " in done.stdout
    assert "3 silos with 300 records each (untrusted server) read all 900 records in each of " in done.stdout
    ran = fedpriv("run", "mine.toml", "--out", "run", "--quiet", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert package.load(tmp_path / "run").cells[0].test_accuracy > 0.8
    again = fedpriv(*words, "--out", "mine.toml", cwd=tmp_path)
    assert again.stderr == "fedpriv: --out mine.toml: exists; give another name\n"
    told = json.loads(fedpriv(*words, "--json", cwd=tmp_path).stdout)
    assert told["scenario"]["algorithm"]["name"] == "dp-sgd"
    assert told["epsilon"] <= 3.0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--silos 0 --records 5 --features 3 --epsilon 1", "silos = 0"),
        ("--silos 2 --records 5,x --features 3 --epsilon 1", "--records '5,x'"),
        ("--silos 2 --records 5 --features 3 --epsilon 1e-9", "epsilon = 1e-09"),
        ("--silos 2 --records 5 --features 3 --epsilon 1 --delta 0", "delta = 0.0"),
        ("--silos 2 --records 5 --features 3 --epsilon 1 --trust none", "trust"),
    ],
)
def test_the_advise_command_refuses_invalid_facts_in_one_line(words: str, line: str) -> None:
    assert line in refusal(["advise", *words.split()])


def test_every_reason_for_an_advised_key_is_in_the_documentation() -> None:
    page = Path("docs/advise.md").read_text(encoding="utf-8").replace(" | ", ": ")
    for key, reason in REASONS.items():
        assert f"| `{key}`: {reason}: " in page


def test_advice_for_very_large_models_allocates_no_parameters() -> None:
    assert advise(silos=3, records=50, features=10**7, classes=10**5, epsilon=1.0).epsilon <= 1.0  # RuntimeError


@pytest.mark.parametrize("norm", [1.1, 1.12, 2.24, 2e-5, 5e-6, 7, 1010.0, 123456.0, 0.12300000000000001])
def test_the_norm_in_an_advised_scenario_is_rounded_up_to_three_digits(norm: float) -> None:
    written = advise(silos=3, records=50, features=4, epsilon=1.0, feature_norm=norm).tree["model"]["feature_norm"]
    assert norm <= written < norm * 1.01
    assert written == float(f"{written:.3g}")
    assert written == norm or norm != float(f"{norm:.3g}")


def test_a_first_step_of_the_user_has_no_comment_that_none_is_taken() -> None:
    data = {"name": "mine.csv", "partition": "site", "scale": {"share": 0.1}}
    advice = advise(silos=3, records=50, features=4, epsilon=1.0, data=data)
    assert "no first step" not in advice.text
    assert "no first step" in [each.why[:13] for each in advise_on_facts(advice.facts).chosen]


def test_the_command_names_the_import_that_a_network_needs(tmp_path: Path) -> None:
    words = "--silos 3 --records 60 --features 4 --classes 2 --epsilon 3 --parameters 500 --out net.toml"
    done = fedpriv("advise", *words.split(), cwd=tmp_path)
    assert "fedpriv run net.toml --import FILE, which adds my-network" in " ".join(done.stdout.split())


def test_layers_for_sequences_are_asked_for_with_a_network_alone(tmp_path: Path) -> None:
    words = "advise --silos 3 --records 60 --features 4 --classes 2 --epsilon 3 --sequence --json"
    network = fedpriv(*words.split(), "--parameters", "500", cwd=tmp_path)
    assert json.loads(network.stdout)["scenario"]["algorithm"]["step"] == SEQUENCE_STEP
    refused = fedpriv(*words.split(), cwd=tmp_path)
    assert refused.returncode == 2
    assert "only a network has such layers; give its parameters, too" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("unit", "noun"), [({}, "records"), ({"unit": "user"}, "persons"), ({"unit": "client"}, "clients")]
)
def test_the_warning_of_a_large_delta_names_the_protected_unit(unit: dict[str, Any], noun: str) -> None:
    """Before: clients were called persons."""
    facts = unit | ({"records_of_person": 3} if unit else {})
    advice = advise(silos=2, records=1000, features=4, classes=2, epsilon=1.0, delta=1e-3, **facts)
    assert (
        advice.others[-1]
        == f"delta = 0.001 is not below 1 over the 1,000 {noun} of a silo: take one that is far below."
    )


def test_the_advised_clip_norm_is_a_constant_times_the_root_of_features_plus_one() -> None:
    advice = advise(silos=4, records=100, features=9, classes=2, epsilon=1.0)
    assert advice.tree["algorithm"]["clip"] == pytest.approx(CLIP * math.sqrt(10.0), rel=1e-2)
