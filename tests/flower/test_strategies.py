"""Strategies of an app of one's own: the same model as the scenario, Flower's own conventions, and refusals."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from torch import nn

import fedpriv
from fedpriv import flower
from fedpriv.claims.claim import compute_claim
from fedpriv.claims.ledger import make_release_streams
from fedpriv.core.errors import InputError, RunError
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.flower import DPFTRL, DPSGD, AcceleratedDPSRGD, DPGoldstein, DPMomentum, DPMu2FL, PrivateStrategy
from tests.flower.apps import (
    CNN,
    PRIVACY,
    ROUNDS,
    ROW,
    SEED,
    SETTINGS,
    SILOS,
    SIZES,
    Softmax,
    app_of,
    arrays_of,
    changed,
    data,
    flat,
    grid_of,
    network,
    round_of,
    run_app,
    shares,
    silo_of,
    train_of,
)
from tests.parts import in_turn

NETWORKS = {"softmax": Softmax, "cnn": CNN}
TRUSTS = ("untrusted", "trusted", "secure-aggregation")
GOLDSTEIN = {
    "smoothing": 0.1, "radius": 0.02, "period": 3, "anchor_clip": 1.0, "clip": 0.5, "step": 0.005, "window": 2,
    "output": "last",
}  # fmt: skip
OF_ROWS: Mapping[str, tuple[type[PrivateStrategy], dict[str, Any]]] = {
    "accelerated-dp-srgd": (AcceleratedDPSRGD, {"clip": 1.0, "beta": 20.0, "radius": 10.0}),
    "momentum-tree": (DPMomentum, {"clip": 1.0, "alpha": 0.5, "step": 0.02}),
    "goldstein-single-pass": (DPGoldstein, GOLDSTEIN),
    "dp-sgd": (DPSGD, {"clip": 1.0, "step": 0.5}),
    "dp-ftrl": (DPFTRL, {"clip": 1.0, "step": 0.5, "mechanism": "auto"}),
}


def scenario_model(
    tmp_path: Path, row: str, trust: str, settings: Mapping[str, Any], module: nn.Module, dtype: str = "float32",
    federation: Mapping[str, Any] = SIZES,
) -> Any:  # fmt: skip
    """The model of the same run as a scenario, on the in-process engine."""
    images, labels = data()
    tree = {
        "name": "same", "seed": SEED, "data": {"name": "synthetic"}, "federation": dict(federation),
        "algorithm": {"name": row, "trust": trust, **settings}, "privacy": PRIVACY,
        "run": {"dtype": dtype, "evaluations": 1},
    }  # fmt: skip
    records: dict[str, Any] = {"train": (images, labels), "test": (images[:20], labels[:20])}
    results = fedpriv.run(tree, **records, model=module, engine="inprocess", out=tmp_path, progress=False)
    return results.cells[0].model()


@pytest.mark.every(3)
@pytest.mark.parametrize(("trust", "kind"), in_turn(TRUSTS, list(NETWORKS)))
def test_an_app_with_the_dp_mu2_fl_strategy_trains_the_model_of_the_equal_scenario(
    tmp_path: Path, kind: str, trust: str
) -> None:
    """The same seed: DP-μ²-FL to 1e-9 in float64."""
    module = network(NETWORKS[kind], torch.float64)
    strategy = DPMu2FL(seed=SEED, **{**ROW, "trust": trust})
    result = run_app(strategy, module)
    expected = scenario_model(tmp_path, "dp-mu2-fl", trust, SETTINGS, module, "float64")
    np.testing.assert_allclose(flat(result.arrays), expected, rtol=1e-9, atol=1e-13)
    assert np.linalg.norm(expected - flat(arrays_of(module))) > 1e-2  # the comparison is not of x_1


@pytest.mark.every(5)
@pytest.mark.parametrize("row", OF_ROWS)
def test_every_private_strategy_trains_the_model_of_the_equal_scenario_bit_for_bit(
    tmp_path: Path, row: str
) -> None:
    """In float32, as torch's modules are."""
    (strategy, settings), module, sizes = OF_ROWS[row], network(), {"silos": SILOS, "rounds": 4, "batch": 2}
    grid = grid_of(train_of(module, shares(count=8)))
    result = strategy(seed=SEED, trust="trusted", **sizes, **PRIVACY, **settings).start(grid, arrays_of(module))
    expected = scenario_model(tmp_path, row, "trusted", settings, module, federation=sizes)
    np.testing.assert_array_equal(flat(result.arrays), expected)
    assert np.linalg.norm(expected - flat(arrays_of(module))) > 1e-3


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("federation", "row", "settings"),
    [
        ({"epochs": 2, "sampling": "poisson"}, "dp-sgd", {"clip": 1.0, "step": 0.5}),
        ({"epochs": 2}, "dp-ftrl", {"clip": 1.0, "step": 0.5, "mechanism": "banded", "bands": 2}),
        ({"drop_out": 0.3}, "dp-mu2-fl", SETTINGS),
    ],
    ids=["poisson", "epochs", "drop-outs"],
)
def test_a_strategy_has_the_participation_and_model_of_the_equal_scenario(
    tmp_path: Path, federation: dict[str, Any], row: str, settings: dict[str, Any]
) -> None:
    """Who takes part when, by the same coins."""
    whole, module = {**SIZES, **federation}, network()
    count = ROUNDS // federation.get("epochs", 1) * SIZES["batch"]
    grid = grid_of(train_of(module, shares(count=count)))
    strategy = PrivateStrategy(row, seed=SEED, trust="untrusted", **whole, **PRIVACY, **settings)
    result = strategy.start(grid, arrays_of(module))
    expected = scenario_model(tmp_path, row, "untrusted", settings, module, federation=whole)
    np.testing.assert_array_equal(flat(result.arrays), expected)


@pytest.mark.parametrize(("row", "trust"), in_turn(["dp-mu2-fl", *OF_ROWS], TRUSTS))
def test_a_strategy_without_a_seed_draws_fresh_noise_with_an_exact_integer_claim(row: str, trust: str) -> None:
    """Two runs differ, and both keep the target in the program's own arithmetic."""
    strategy, settings = OF_ROWS.get(row, (DPMu2FL, SETTINGS))
    module = network()
    models = []
    for _ in range(2):
        grid = grid_of(train_of(module, shares(2, 4)), 2)
        one = strategy(silos=2, rounds=2, batch=2, **PRIVACY, **settings, trust=trust)
        models.append(flat(one.start(grid, arrays_of(module)).arrays))
        claim = compute_claim(make_release_streams(one.plan, 2))
        assert claim is not None
        assert claim.exact
        assert claim.guarantee.mu == pytest.approx(PRIVACY["mu"], rel=1e-3)
        assert claim.guarantee.mu <= PRIVACY["mu"]
    assert np.abs(models[0] - models[1]).max() > 1e-4


def test_a_run_starts_at_the_initial_arrays_and_preserves_names_shapes_and_types() -> None:
    module = network(CNN)
    messages: list[Message] = []
    train = changed(train_of(module, shares()), lambda message, context: messages.append(message))
    learning_rate = ConfigRecord({"lr": 0.5})
    result = DPMu2FL(**ROW).start(grid_of(train), arrays_of(module), train_config=learning_rate)
    assert list(map(round_of, messages)) == [t for t in range(ROUNDS + 1) for _ in range(SILOS)]
    for message in messages[: 2 * SILOS]:  # rounds 0 and 1 are at x_1
        sent = message.content.array_records["arrays"].to_torch_state_dict()
        assert list(sent) == list(module.state_dict())
        for name, values in module.state_dict().items():
            assert torch.equal(sent[name], values)
    assert all(message.content["config"]["lr"] == 0.5 for message in messages[SILOS:])
    module.load_state_dict(result.arrays.to_torch_state_dict())  # strict: names and shapes
    assert {array.dtype for array in result.arrays.values()} == {"float32"}


def test_evaluate_fn_and_the_result_follow_the_conventions_of_flower() -> None:
    module, models = network(), dict[int, Any]()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        models[server_round] = flat(arrays)
        return MetricRecord({"accuracy": server_round / 10})

    result = run_app(DPMu2FL(**ROW), module, num_rounds=ROUNDS, evaluate_fn=evaluate)
    assert list(models) == list(range(ROUNDS + 1))
    np.testing.assert_array_equal(models[0], flat(arrays_of(module)))
    np.testing.assert_array_equal(models[ROUNDS], flat(result.arrays))
    accuracies = [metrics["accuracy"] for metrics in result.evaluate_metrics_serverapp.values()]
    assert accuracies == [t / 10 for t in range(ROUNDS + 1)]
    prices = [result.train_metrics_clientapp[t] for t in range(1, ROUNDS + 1)]
    epsilons = [price["epsilon"] for price in prices]
    assert epsilons == sorted(epsilons)
    assert {price["delta"] for price in prices} == {1e-5}


def test_epsilon_is_logged_after_every_round(caplog: pytest.LogCaptureFixture) -> None:
    strategy = DPMu2FL(**ROW)
    with caplog.at_level(logging.INFO, "flwr"):
        run_app(strategy, network())
    last = strategy.epsilon(ROUNDS)
    assert last is not None
    (line,) = [text for text in caplog.messages if f"after round {ROUNDS}" in text]
    assert line == f"fedpriv: ε = {math.ceil(last * 1000) / 1000:g} at δ = 1e-05 after round {ROUNDS}"
    assert f"after {ROUNDS} of {ROUNDS} rounds: one record of a silo, zero-out neighbours" in caplog.messages[-1]
    assert "untrusted server" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("change", "protects"),
    [
        ({}, "each silo's records against the server, the other silos and everyone else"),
        ({"seed": SEED}, "nobody"),
        ({"mode": "none", "mu": None}, "nobody"),
    ],
    ids=["noise", "seed", "no-noise"],
)
def test_the_summary_says_that_a_run_without_secret_noise_protects_nobody(
    caplog: pytest.LogCaptureFixture, change: dict[str, Any], protects: str
) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        run_app(DPMu2FL(**row_with(**change)), network())
    assert [text.split("protects ")[1] for text in caplog.messages if "└──> protects" in text] == [protects]


def test_clients_evaluate_as_with_fedavg_if_fraction_evaluate_is_set() -> None:
    module, requests = network(), list[Any]()
    app = app_of(train_of(module, shares()))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        requests.append(message.content)
        silo = silo_of(context)
        metrics = {"accuracy": float(silo), "num-examples": 1 + silo}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    strategy, grid = DPMu2FL(**ROW, fraction_evaluate=1.0), InProcessGrid(app, SILOS, {})
    result = strategy.start(grid, arrays_of(module), evaluate_config=ConfigRecord({"batch": 7}))
    accuracies = [metrics["accuracy"] for metrics in result.evaluate_metrics_clientapp.values()]
    assert accuracies == pytest.approx([(0 + 2 + 6) / 6] * ROUNDS)
    last = requests[-1]
    np.testing.assert_array_equal(flat(last.array_records["arrays"]), flat(result.arrays))
    assert (last["config"]["batch"], last["config"]["server-round"]) == (7, ROUNDS)
    assert not run_app(DPMu2FL(**ROW), module).evaluate_metrics_clientapp


@pytest.mark.slow
def test_a_run_stops_before_a_budget_is_exceeded() -> None:
    """Every record of this run is in one round, and C's noise makes later rounds cost more."""
    first = DPMu2FL(**ROW)
    run_app(first, network())
    after_four = first.epsilon(4)
    assert after_four is not None
    second = DPMu2FL(**ROW, max_epsilon=after_four)
    result = run_app(second, network())
    assert max(result.train_metrics_clientapp) == 4
    assert result.train_metrics_clientapp[4]["epsilon"] <= after_four
    assert second.claim.startswith("one record of a silo")


def row_with(**keywords: Any) -> dict[str, Any]:
    """The keywords of DP-μ²-FL after these changes, of which None takes one away."""
    return {key: value for key, value in {**ROW, **keywords}.items() if value is not None}


def of_arrays(*values: Any) -> ArrayRecord:
    return ArrayRecord({f"array {index}": Array(value) for index, value in enumerate(values)})


NORMALIZED = ArrayRecord(nn.Sequential(nn.Linear(784, 4), nn.BatchNorm1d(4)).state_dict())


@pytest.mark.parametrize(
    ("keywords", "start", "line"),
    [
        ({}, {"initial_arrays": of_arrays()}, "initial_arrays: there are none; give ArrayRecord"),
        (
            {},
            {"initial_arrays": NORMALIZED},
            "array '1.num_batches_tracked' is int64, and parameters are float32 or float64: buffers, as BatchNorm",
        ),
        (
            {},
            {"initial_arrays": of_arrays(np.zeros(2, np.float32), np.zeros(2))},
            "initial_arrays: float32 and float64 are mixed",
        ),
        ({}, {"initial_arrays": of_arrays(np.float32([np.inf]))}, "initial_arrays: a value is not finite"),
        ({}, {"num_rounds": ROUNDS - 1}, f"num_rounds = 5: noise was calibrated for rounds = {ROUNDS}"),
        ({}, {"num_rounds": ROUNDS + 1}, f"num_rounds = 7: noise was calibrated for rounds = {ROUNDS}"),
        ({"max_epsilon": 0.1}, {}, r"max_epsilon = 0.1: round 1 alone costs ε = \d"),
        ({"max_epsilon": math.nan}, {}, "max_epsilon = nan: expected a number"),
        ({"mode": "none", "mu": None, "max_epsilon": 1.0}, {}, "max_epsilon = 1.0: this run adds no noise"),
        ({"clip": "lipschitz"}, {}, "clip"),
    ],
)
def test_invalid_arrays_rounds_and_budgets_are_refused_before_any_message_is_sent(
    keywords: dict[str, Any], start: dict[str, Any], line: str
) -> None:
    def train(message: Message, context: Context) -> Message:
        raise AssertionError("a client was called")

    arguments: dict[str, Any] = {"initial_arrays": arrays_of(network()), **start}
    with pytest.raises(InputError, match=line) as raised:
        DPMu2FL(**row_with(**keywords)).start(grid_of(train), **arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("keywords", "line"),
    [
        ({"relation": None}, "privacy.relation"),
        ({"mu": None}, "exactly one of mu, rho, zcdp and epsilon"),
        ({"learning_rate": 0.1}, "algorithm.learning_rate"),
        ({"name": "dp-sgd"}, "name = 'dp-sgd': leave it out; the class or the argument `row` says the row"),
        ({"trust": "curator"}, "dp-mu2-fl: algorithm.trust = 'curator'"),
        ({"trust": "nobody"}, "algorithm.trust = 'nobody'"),
        ({"unit": "client", "records": 4}, "privacy.unit = 'client': an app's records are protected one by one"),
        ({"silos": 0}, "federation.silos"),
        ({"clip": -1.0}, "algorithm.clip"),
        ({"model": "column-moments"}, "model"),
    ],
)
def test_invalid_strategy_keywords_are_refused_in_one_line(keywords: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line) as raised:
        DPMu2FL(**row_with(**keywords))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("trust", TRUSTS)
def test_moments_of_records_are_refused_as_the_model_of_an_app(trust: str) -> None:
    """Guarantee: guards and an app's server plan one lattice, though the server does not know the guards' loss.

    Moments are √2 clips apart, and the server's noise is for two clips: on its lattice, if that is a coarser one.
    """
    keys = {"rounds": 1, "silos": 2, "batch": 8, "clip": 1.0, "step": 1.0, "relation": "replace-one", "mu": 4.3e-4}
    ridge = {"name": "ridge-statistics", "penalty": 0.1, "feature_norm": 2.0}
    assert PrivateStrategy("dp-sgd", trust=trust, **keys).cell.target_mu == 4.3e-4
    with pytest.raises(InputError, match="'ridge-statistics': no module can be this model"):
        PrivateStrategy("dp-sgd", trust=trust, model=ridge, **keys)


SCENARIO = """\
name = "of-a-file"
[data]
name = "synthetic"
[federation]
silos = 3
rounds = 6
batch = 4
[algorithm]
name = "dp-mu2-fl"
trust = "untrusted"
diameter = 20.0
clip = 1.0
step = 0.05
[privacy]
relation = "zero-out"
mu = 2.0
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "app.toml"
    path.write_text(SCENARIO)
    return path


@pytest.mark.slow
def test_a_strategy_from_a_scenario_file_equals_one_from_keywords(scenario: Path) -> None:
    of_file, of_keywords = (
        flat(run_app(strategy, network()).arrays)
        for strategy in (PrivateStrategy(scenario=scenario, seed=SEED), DPMu2FL(seed=SEED, **ROW))
    )
    np.testing.assert_array_equal(of_file, of_keywords)


@pytest.mark.parametrize(
    ("old", "new", "keywords", "line"),
    [
        ("", "", {"clip": 2.0}, r"clip: give it in .*app.toml, or leave the scenario out"),
        ("mu = 2.0", "mu = 2.0\n[sweep]\nseeds = 2", {}, "sweep: an app is one run, and this stands for 2"),
        ("mu = 2.0", "mu = 2.0\n[evaluation]\nrecords = 5\nmu = 1.0", {}, "evaluation: the silos of an app"),
        ('"dp-mu2-fl"', '"dp-mu2-fl"\nfoo = 1', {}, "algorithm.foo"),
    ],
)
def test_a_scenario_file_that_is_not_for_an_app_is_refused_in_one_line(
    scenario: Path, old: str, new: str, keywords: dict[str, Any], line: str
) -> None:
    scenario.write_text(SCENARIO.replace(old, new) if old else SCENARIO)
    with pytest.raises(InputError, match=line) as raised:
        DPMu2FL(scenario=scenario, **keywords)
    assert "\n" not in str(raised.value)


def test_a_scenario_file_of_another_algorithm_is_refused(scenario: Path) -> None:
    with pytest.raises(InputError, match=r"algorithm.name = 'dp-mu2-fl': this strategy is 'dp-sgd'"):
        DPSGD(scenario=scenario)
    with pytest.raises(InputError, match="give a row, such as 'dp-mu2-fl', or a scenario"):
        PrivateStrategy()
    with pytest.raises(InputError, match="row = 'dp-sgd': DPMu2FL is 'dp-mu2-fl'; leave it out"):
        DPMu2FL("dp-sgd", **ROW)


def test_a_strategy_can_be_started_only_once() -> None:
    """A second run of the same records would spend a second budget, of which the first claim says nothing."""
    strategy = DPMu2FL(**ROW)
    with pytest.raises(InputError, match="start: the strategy has not been started"):
        _ = strategy.plan
    run_app(strategy, network())
    with pytest.raises(InputError, match="start: this strategy was started before"):
        run_app(strategy, network())


def test_a_run_with_fewer_or_more_nodes_than_planned_ends() -> None:
    module = network()
    for count, reason in (
        (2, "2 of 3 silos were connected after 0 s"),
        (4, "4 nodes are connected, the scenario has 3 silos"),
    ):
        grid = grid_of(train_of(module, shares(4)), silos=count)
        with pytest.raises(RunError, match=reason):
            DPMu2FL(**ROW).start(grid, arrays_of(module), timeout=0.2)


def test_a_silo_that_fails_in_a_round_ends_the_run() -> None:
    module, strategy = network(), DPMu2FL(**ROW)

    def fail(message: Message, context: Context) -> None:
        if (silo_of(context), round_of(message)) == (1, 3):
            raise ValueError("no disk")

    with pytest.raises(RunError, match="silo 1 failed in round 3: ValueError: no disk"):
        strategy.start(grid_of(changed(train_of(module, shares()), fail)), arrays_of(module))
    claim = compute_claim(make_release_streams(strategy.plan, 3))  # two silos have released their round 3
    assert claim is not None
    assert strategy.claim.startswith(claim.format_sentence("line", strategy.cell.privacy.delta))


def test_the_private_strategies_are_subclasses_of_the_flower_strategy() -> None:
    names = ("DPMu2FL", "AcceleratedDPSRGD", "DPMomentum", "DPGoldstein", "DPSGD", "DPFTRL", "PrivateStrategy")
    assert all(issubclass(getattr(flower, name), Strategy) for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'FedAvg'"):
        _ = flower.FedAvg
