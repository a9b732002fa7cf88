"""The client's side of a private strategy: what it refuses, what it keeps, and where a guard answers."""

import functools
import hashlib
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedpriv.clients import app as client_app
from fedpriv.core.errors import InputError, RunError
from fedpriv.data.given import to_record_arrays
from fedpriv.flower import DPSGD, DPMu2FL, PrivateClient, PrivateStrategy
from fedpriv.flower.client import _count_classes, normalize_loss
from fedpriv.flower.guards import ModelLayout
from fedpriv.loss.models import make_loss_choice
from fedpriv.protocol.messages import read_refusal, unseal_vector
from tests.flower.apps import (
    CNN,
    PRIVACY,
    ROW,
    SEED,
    SILOS,
    Softmax,
    Train,
    arrays_of,
    changed,
    flat,
    grid_of,
    network,
    round_of,
    run_app,
    shares,
    silo_of,
    train_of,
)
from tests.flower.quickstart.task import Net
from tests.flower.silos import guards, ledger_of

pytest.importorskip("fedpriv.addons.readers.items")  # items are read by an add-on

Change = Callable[[Message, Context], None]


def started(train: Train, module: nn.Module | None = None, **keywords: Any) -> Any:
    """Run an app with these clients."""
    return DPMu2FL(**{**ROW, **keywords}).start(grid_of(train), arrays_of(module or network()))


@functools.cache
def expected_arrays() -> Any:
    """The model of this seed's run."""
    return flat(run_app(DPMu2FL(seed=SEED, **ROW), network()).arrays)


def linear(classes: int = 10, *more: nn.Module, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, classes, bias=bias), *more)


def frozen() -> nn.Module:
    module = network(CNN)
    module.conv.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("server", "client", "line"),
    [
        (network(Softmax), network(CNN), r"silo 0: array 'linear.weight' \(10, 784\) of the server: it is none"),
        (network(CNN), frozen(), r"array 'conv.weight' \(4, 1, 5, 5\) of the server: its requires_grad is False"),
        (linear(9), linear(), r"array '1.weight' \(9, 784\) of the server: here it has shape \(10, 784\)"),
        (
            linear(bias=False),
            linear(),
            r"array '1.bias' \(10,\): it is trained here, and the server did not send it; server and clients need",
        ),
        (linear(), linear(10, nn.Dropout(0.5)), r"layer .* \(Dropout\) draws random numbers"),
        (
            linear(),
            nn.Sequential(nn.Flatten(), nn.LazyLinear(10)),
            r"silo 0: model: layer 1 \(LazyLinear\) has no parameters yet; call the module on a record once",
        ),
    ],
)
def test_a_client_module_that_differs_from_the_server_model_is_refused_before_round_1(
    server: nn.Module, client: nn.Module, line: str
) -> None:
    with pytest.raises(RunError, match=line) as raised:
        started(train_of(client, shares()), server)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("frozen_first", "line"),
    [
        (
            False,
            r"array '1.weight' \(4, 4\) of the server: here it is '0.weight' under another name; send each once",
        ),
        (True, r"array '0.weight' \(4, 4\) of the server: its requires_grad is False"),
    ],
)
def test_a_server_that_sends_a_tied_parameter_under_both_names_is_refused_with_the_reason(
    frozen_first: bool, line: str
) -> None:
    """Before: the second name was said to be none that is trained here."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    net[0].weight.requires_grad_(not frozen_first)
    with pytest.raises(InputError, match=line):
        ModelLayout.from_arrays(ArrayRecord(net.state_dict())).check_module(net)
    if not frozen_first:
        once = {name: values.detach() for name, values in net.named_parameters()}
        ModelLayout.from_arrays(ArrayRecord(once)).check_module(net)


def test_a_second_name_of_a_frozen_parameter_is_refused_as_frozen() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    net[0].weight.requires_grad_(False)
    arrays = {name: values for name, values in net.state_dict().items() if name != "0.weight"}
    with pytest.raises(InputError, match=r"array '1.weight' \(4, 4\) of the server: its requires_grad is False"):
        ModelLayout.from_arrays(ArrayRecord(arrays)).check_module(net)


def test_a_function_of_a_single_output_is_a_loss_of_two_classes() -> None:
    """Before: labels 0 and 1 were refused, with the advice to subtract 1."""
    choice = make_loss_choice(lambda output, label: functional.softplus(output[0]) - label * output[0], real=False)
    features = np.zeros((2, 3), np.float32)
    counts = [_count_classes(nn.Linear(3, n), choice, features, torch.float32) for n in (1, 2, 5)]
    assert counts == [2, 2, 5]


def test_a_client_app_without_a_private_client_is_refused_before_round_1() -> None:
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    with pytest.raises(RunError, match=r"a node does not say which silo it is: .* metrics\.silo"):
        started(train)


class Rows(Dataset[Any]):
    """Records one by one."""

    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[1])

    def __getitem__(self, place: int) -> Any:
        return self.arrays[0][place], self.arrays[1][place]


class Named(Rows):
    """Records as the template's data sets have them."""

    def __getitem__(self, place: int) -> Any:
        return {"img": self.arrays[0][place], "label": self.arrays[1][place]}


GIVEN: dict[str, Callable[[Any], Any]] = {
    "tensors": lambda arrays: tuple(map(torch.from_numpy, arrays)),
    "a data set": Rows,
    "a tensor data set": lambda arrays: TensorDataset(*map(torch.from_numpy, arrays)),
    "a loader": lambda arrays: DataLoader(Rows(arrays), batch_size=7),
    "a loader of dictionaries": lambda arrays: DataLoader(Named(arrays), batch_size=7),
    "a function": lambda arrays: lambda: arrays,
    "more than are read": lambda arrays: tuple(np.concatenate([column, column]) for column in arrays),
}


@pytest.mark.every(7)
@pytest.mark.parametrize("form", GIVEN)
def test_tensors_data_sets_and_loaders_of_the_same_records_give_the_same_model(form: str) -> None:
    module = network()
    result = started(train_of(module, [GIVEN[form](arrays) for arrays in shares()]), module, seed=SEED)
    np.testing.assert_array_equal(flat(result.arrays), expected_arrays())


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), functional.cross_entropy, "cross-entropy", {"name": "cross-entropy"}],
    ids=["layer", "function", "name", "dictionary"],
)
def test_all_spellings_of_a_loss_give_the_same_model(loss: Any) -> None:
    module = network()
    result = started(train_of(module, shares(), loss), module, seed=SEED)
    np.testing.assert_array_equal(flat(result.arrays), expected_arrays())


def test_a_custom_loss_is_applied_to_the_output_and_label_of_one_record() -> None:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.unsqueeze(0), label.unsqueeze(0))

    module = network()
    result = started(train_of(module, shares(), loss), module, seed=SEED)
    np.testing.assert_allclose(flat(result.arrays), expected_arrays(), rtol=1e-4, atol=1e-6)


def test_a_subclass_of_the_cross_entropy_with_its_own_forward_is_a_custom_loss() -> None:
    """Before: the silo trained the plain cross-entropy in its place, without a word."""

    class Opposite(nn.CrossEntropyLoss):
        def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return -functional.cross_entropy(output, label)

    class Named(nn.CrossEntropyLoss):
        pass

    loss, module = Opposite(), network()
    assert normalize_loss(loss) is loss
    assert normalize_loss(Named()) == normalize_loss(nn.CrossEntropyLoss())
    result = started(train_of(module, shares(), loss), module, seed=SEED)
    assert np.abs(flat(result.arrays) - expected_arrays()).max() > 1e-3


def test_the_hazard_loss_accepts_two_labels_per_bin_plus_one() -> None:
    """K outputs are for 2K + 1 labels: of K bins survived or not, and the event seen or not."""
    records = [(images, labels % 9) for images, labels in shares()]
    module = linear(4)
    arrays = started(train_of(module, records, "hazard"), module, seed=SEED).arrays
    assert flat(arrays).shape == (785 * 4,)
    with pytest.raises(RunError, match="records cannot be used"):
        started(train_of(module, shares(), "hazard"), module, seed=SEED)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"weight": torch.ones(10)}, "loss: torch divides by the weights of a batch"),
        ({"ignore_index": 3}, "loss: ignore_index = 3 leaves out a class, and every record counts"),
    ],
)
def test_class_weights_of_torch_are_refused(options: dict[str, Any], line: str) -> None:
    """Torch's mean divides by them, so that for one record they say nothing."""
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    with pytest.raises(InputError, match=line):
        PrivateClient(context, network(), nn.CrossEntropyLoss(**options))


def wrong_labels(arrays: Any) -> Any:
    labels = arrays[1].copy()
    labels[3] = 12
    return arrays[0], labels


def not_finite(arrays: Any) -> Any:
    images = arrays[0].copy()
    images[3, 0, 0, 0] = np.nan
    return images, arrays[1]


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda arrays: (arrays[0][:-1], arrays[1][:-1]), "the scenario reads 24 of them, and there are fewer"),
        (lambda arrays: DataLoader(Rows(arrays), shuffle=True), "a DataLoader that shuffles"),
        (wrong_labels, "silo 1: its records cannot be used, and its own log says why"),
        (not_finite, "silo 1: its records cannot be used, and its own log says why"),
        (lambda arrays: 7, "silo 1: its records cannot be read, and its own log says why"),
    ],
)
def test_unusable_records_are_refused_in_one_line_that_reveals_no_value(
    spoil: Callable[[Any], Any], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    records: list[Any] = list(shares())
    records[1] = spoil(records[1])
    with pytest.raises(RunError, match=line) as raised:
        started(train_of(network(), records))
    assert "\n" not in str(raised.value)
    assert "12" not in str(raised.value)


def test_the_error_of_a_function_that_loads_records_stays_at_the_node(caplog: pytest.LogCaptureFixture) -> None:
    """Was: the text of an InputError, which can quote a cell of a file, went to the server as the reason."""

    def load() -> Any:
        raise InputError("table.csv: row 7 has 'HIV' where a number is expected")

    module = network()
    with pytest.raises(RunError, match="silo 0: its records cannot be read, and its own log says why") as raised:
        started(train_of(module, [load] * SILOS), module)
    assert "HIV" not in str(raised.value)
    assert "HIV" in caplog.text


def test_records_that_change_between_rounds_are_refused() -> None:
    """Another order would have a record in more rounds than the noise was calibrated for."""
    module, records = network(), shares()
    (images, labels), reversed_records = records[2], shares()
    reversed_records[2] = images[::-1], labels[::-1]

    def train(message: Message, context: Context) -> Message:
        return train_of(module, records if round_of(message) < 3 else reversed_records)(message, context)

    with pytest.raises(RunError, match=r"round 3: silo 2: the records, or their order, are not those"):
        started(train)


def lost(message: Message, context: Context) -> None:
    context.state.clear()


def older(message: Message, context: Context) -> None:
    message.content["config"]["server-round"] = 2


def noise_free(message: Message, context: Context) -> None:
    config = message.content["config"]
    cell = json.loads(config["fedpriv-cell"])
    cell["privacy"] = {"relation": "zero-out", "mode": "none"}
    config["fedpriv-cell"] = json.dumps(cell)


def seeded(message: Message, context: Context) -> None:
    message.content["config"]["fedpriv-seeded"] = True


def not_a_number(message: Message, context: Context) -> None:
    arrays = message.content.array_records["arrays"]
    name, first = next(iter(arrays.items()))
    message.content["arrays"] = ArrayRecord({**arrays, name: Array(first.numpy() * np.float32(np.nan))})


def of_flower(message: Message, context: Context) -> None:
    del message.content["config"]["fedpriv-cell"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lost, "round 3: silo 1: this node has no state of the run; was it started again"),
        (older, "silo 1 was asked for round 2 after round 2 of 6: rounds come in order, each once"),
        (noise_free, "round 3: silo 1: the scenario is not the one that the run began with"),
        (seeded, "round 3: silo 1: the scenario is not the one that the run began with"),
        (not_a_number, "silo 1, round 3: the query has values that are not finite"),
        (of_flower, "the server's strategy is none of fedpriv.flower"),
    ],
)
def test_a_hostile_server_is_refused_in_one_line(change: Change, line: str) -> None:
    """In round 3, at silo 1, what a server could send or a machine could lose."""

    def change_one(message: Message, context: Context) -> None:
        if (silo_of(context), round_of(message)) == (1, 3):
            change(message, context)

    with pytest.raises(RunError, match=line) as raised:
        started(changed(train_of(network(), shares()), change_one))
    assert "\n" not in str(raised.value)


def test_a_second_strategy_in_the_same_run_is_refused() -> None:
    """It would spend a second budget of the same records, and its claim would not say so."""
    module = network()
    grid = grid_of(train_of(module, shares()))
    DPMu2FL(**ROW).start(grid, arrays_of(module))
    with pytest.raises(RunError, match="its records were released in this run already"):
        DPMu2FL(**ROW).start(grid, arrays_of(module))


def digest_of(arrays: Any) -> bytes:
    """The digest of records under no key, on which who knows all others can try one."""
    digest = hashlib.sha256()
    for array in to_record_arrays(arrays):
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.digest()


def test_key_and_state_are_wiped_from_the_context_after_the_last_round() -> None:
    """Whoever finds the node's memory afterwards takes no noise away and tries no record; no round is answered."""
    inner, calls = train_of(network(), shares()), list[tuple[Message, Context]]()
    started(changed(inner, lambda message, context: calls.append((message, context))))
    contexts = {silo_of(context): context for _, context in calls}
    for silo, context in contexts.items():
        state = context.state["fedpriv-private"]
        assert (state["key"], state["state"]) == (b"", b"")
        assert bytes(state["records"]) != digest_of(shares()[silo])
    refusal = read_refusal(inner(calls[-1][0], contexts[0]).content)
    assert refusal is not None
    assert refusal.reason == "silo 0: the run is over, and its key is forgotten"


def test_repeating_the_message_before_round_1_does_not_change_the_key() -> None:
    """A server that lost the first answer asks again before round 1; nothing was released."""
    module, state = network(), RecordDict()
    context = Context(1, 1, {"partition-id": 0}, state, {})
    grid_of(train_of(module, shares()))  # the identity of the task, without which there are no messages
    strategy = DPMu2FL(**ROW)
    sent: list[Message] = []

    def train(message: Message, own: Context) -> Message:
        sent.append(message)
        raise ValueError("lost")

    with pytest.raises(RunError, match="lost"):
        strategy.start(grid_of(train), arrays_of(module))
    keys = []
    for _ in range(2):
        reply = train_of(module, shares())(sent[0], context)
        assert reply.content["metrics"]["silo"] == 0
        keys.append(state["fedpriv-private"]["key"])
    assert keys[0] == keys[1]


@pytest.mark.parametrize("seed", [SEED, None])
def test_a_supernode_refuses_noise_drawn_from_a_public_seed(
    monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    """Its noise could be drawn by everybody who knows the seed."""
    monkeypatch.setattr("sys.argv", ["/usr/bin/flwr-clientapp"])
    assert client_app.runs_in_supernode()
    if seed is None:
        assert started(train_of(network(), shares())).arrays
        return
    with pytest.raises(RunError, match="silo 0: a simulation's noise protects nobody, and this is a SuperNode"):
        started(train_of(network(), shares()), seed=seed)


def test_a_failing_client_does_not_reveal_the_exception_text(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(784, 10)

        def __deepcopy__(self, memo: Any) -> nn.Module:
            raise KeyError("secret 7")

    module = Failing()
    with pytest.raises(RunError, match="silo 0: its client failed, and its own log says why") as raised:
        started(train_of(module, shares()), module)
    assert "secret" not in str(raised.value)
    assert "secret 7" in caplog.text


def test_releases_of_an_untrusted_silo_are_sealed_and_noisy() -> None:
    """Releases of round 1 over integers: with noise they differ from the exact mean, which nobody sends."""
    module, replies = network(), list[Message]()
    inner = train_of(module, shares())

    def train(message: Message, context: Context) -> Message:
        replies.append(inner(message, context))
        return replies[-1]

    strategy = DPMu2FL(**ROW)
    strategy.start(grid_of(train), arrays_of(module))
    first = [reply.content for reply in replies[SILOS : 2 * SILOS]]
    assert all("metrics" not in content for content in first)  # no count of records leaves
    releases = np.stack([unseal_vector(content, "release") for content in first])
    std = float(strategy.plan.noise.std_of(0))
    assert abs(releases.std() / std - 1.0) < 0.05  # clipped gradients are small beside it
    assert all(content["config"]["seal"] for content in first)


def test_an_invalid_partition_id_is_refused_in_one_line() -> None:
    inner = train_of(network(), shares(SILOS + 1))

    def train(message: Message, context: Context) -> Message:
        context.node_config["partition-id"] = 3
        reply = inner(message, context)
        refusal = read_refusal(reply.content)
        assert refusal is not None
        assert refusal.reason.startswith("silo 3: partition-id = 3 in the node configuration: expected the silo's")
        return reply

    with pytest.raises(RunError, match=r"expected the silo's number, 0 to 2 by federation\.silos"):
        started(train)


MODEL = {"name": "quickstart.task:net", "shape": [1, 28, 28]}
GUARDED = {"silos": 2, "rounds": 6, "batch": 20, **PRIVACY, "model": MODEL}
SGD: dict[str, Any] = {"trust": "untrusted", **GUARDED, "clip": 1.0, "step": 0.5}


def through_guards(folder: Path, strategy: PrivateStrategy, module: nn.Module) -> Any:
    """Run an app at sites with guards, whose records it never loads."""

    def never() -> Any:
        raise AssertionError("the app opened the records")

    def train(message: Message, context: Context) -> Message:
        return PrivateClient(context, module, nn.CrossEntropyLoss()).train(message, never)

    grid = grid_of(train, 2, guard=f"{folder}/silo-{{silo}}/s.sock")
    return strategy.start(grid, arrays_of(module))


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
@pytest.mark.parametrize(
    ("row", "settings"),
    [("dp-mu2-fl", {"diameter": 20.0, "clip": 1.0, "step": 0.05}), ("momentum-tree", {"clip": 1.0, "step": 0.02})],
)
def test_guards_answer_private_strategies_in_every_trust_setting(
    tmp_path: Path, row: str, settings: dict[str, Any], trust: str
) -> None:
    torch.manual_seed(0)
    module = Net()
    strategy = PrivateStrategy(row, trust=trust, **GUARDED, **settings)
    silos = {"silos": 2} if trust == "secure-aggregation" else {}
    with guards(tmp_path, 2, trust=trust, **silos):
        result = through_guards(tmp_path, strategy, module)
        ledgers = [ledger_of(tmp_path, silo) for silo in (0, 1)]
    assert np.abs(flat(result.arrays) - flat(arrays_of(module))).max() > 1e-4
    for ((_, mu, answered),) in ledgers:
        assert answered == 6
        assert math.isclose(mu, 2.0, rel_tol=1e-3)


@pytest.mark.slow
def test_a_run_outside_the_policy_of_a_guard_ends_before_round_1(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with guards(tmp_path, 2):
        changes: list[tuple[nn.Module, dict[str, Any], str]] = [
            (Net(), {"mu": 3.0}, r"silo \d.*mu = 3.*budget is 2"),
            (Net(), {"trust": "trusted"}, "silo 0 refuses: the scenario has this silo release its sums"),
            (network(), {}, "the app's model has 2 arrays, the guard's has 4"),
            (Net(), {"seed": 1}, "a guard draws noise of its own: leave `seed` out of the strategy"),
        ]
        for module, change, reason in changes:
            with pytest.raises(RunError, match=reason):
                through_guards(tmp_path, DPSGD(**{**SGD, **change}), module)
        assert [ledger_of(tmp_path, silo) for silo in (0, 1)] == [[], []]


def test_a_private_client_without_a_running_guard_fails_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"silo 0: the silo's guard at .* does not answer"):
        through_guards(tmp_path, DPSGD(**SGD), Net())


@pytest.mark.slow
def test_a_silo_state_survives_serialization_of_the_flower_context() -> None:
    """A node whose Context went through bytes, as a SuperNode's does, goes on with the same run."""
    module, records = network(), shares()
    states: dict[int, bytes] = {}

    def train(message: Message, context: Context) -> Message:
        state = RecordDict()
        if (content := states.get(silo_of(context))) is not None:
            state["fedpriv-private"] = ConfigRecord(pickle.loads(content))
        node = Context(context.run_id, context.node_id, context.node_config, state, context.run_config)
        reply = train_of(module, records)(message, node)
        states[silo_of(context)] = pickle.dumps(dict(node.state["fedpriv-private"]))
        return reply

    result = started(train, module, seed=SEED)
    np.testing.assert_array_equal(flat(result.arrays), expected_arrays())
