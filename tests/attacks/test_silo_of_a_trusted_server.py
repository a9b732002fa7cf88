"""A malicious silo of a trusted server: it sends any vector it likes, and sees what is broadcast."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedpriv.clients.app import app as client_app
from fedpriv.core.errors import RunError
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.protocol.cell_folder import make_run_config
from fedpriv.protocol.messages import CONFIG, TRAIN, RecordCounts, read_tensor, release_content
from fedpriv.scenario.schema import Cell
from tests.server.deployed import plan_with, serve

MakeCell = Callable[..., Cell]


class Malicious(InProcessGrid):
    """Silo 1 adds `sent` to every coordinate in round 3."""

    sent = 0

    def _call(self, message: Message) -> Message:
        reply = super()._call(message)
        if self.sent and message.metadata.dst_node_id == 1001 and message.metadata.message_type == TRAIN:
            vector = read_tensor(reply.content, "release")
            if message.content["config"]["t"] == 3:
                return Message(release_content(vector + self.sent, RecordCounts(1, 0)), reply_to=message)
        return reply


@pytest.mark.parametrize("sent", [2.0, 1e3, 2.0**23])
def test_a_trusted_server_refuses_a_sum_larger_than_clipped_records_can_have(
    small_cell: MakeCell, tmp_path: Path, sent: float
) -> None:
    """Sums of 64 bits wrap: with a huge one of its own, a silo would choose what the others' are taken for."""
    cell = small_cell(algorithm__trust="trusted", run__arithmetic="integers")
    plan, grid = plan_with(cell), Malicious(client_app, 3, make_run_config(cell, Path()))
    grid.sent = int(sent * plan.required_exact_plan.norms(3)[0])
    with pytest.raises(RunError, match="round 3, silo 1: a sum is beyond what its records can add up to"):
        serve(plan, tmp_path / "j", grid)


class Announcing(InProcessGrid):
    """Silo 1 sends arrays whose heads announce what their bytes are not."""

    announced: RecordDict

    def _call(self, message: Message) -> Message:
        reply = super()._call(message)
        if message.metadata.dst_node_id == 1001 and message.metadata.message_type == TRAIN:
            return Message(self.announced, reply_to=message)
        return reply


@pytest.mark.parametrize(
    ("dtype", "shape", "stype"),
    [
        ("float64", (2**27,), "numpy.ndarray"),
        ("float64", (2**40,), "numpy.ndarray"),
        ("float64", (2**62,), "numpy.ndarray"),
        ("float64", (-5,), "numpy.ndarray"),
        ("float64", (1,) * 70, "numpy.ndarray"),
        ("U100000000", (1,), "numpy.ndarray"),
        ("O", (5,), "numpy.ndarray"),
        ("bogus", (5,), "numpy.ndarray"),
        ("", (5,), "numpy.ndarray"),
        ("float64", (5,), "pickle"),
    ],
)
def test_an_array_record_with_a_false_shape_is_refused_without_allocating_memory(
    small_cell: MakeCell, tmp_path: Path, dtype: str, shape: tuple[int, ...], stype: str
) -> None:
    """Gains: the server's memory, killed by 100 bytes that announce 10^10 numbers; nothing says by whom."""
    cell = small_cell(algorithm__trust="trusted", run__arithmetic="integers")
    arrays = ArrayRecord()
    arrays["vector"] = Array(dtype, shape, stype, b"")
    assert memory_of(cell, RecordDict({"release": arrays}), tmp_path) < 2**28


HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': %s, 'fortran_order': %s, 'shape': %s, }"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        HEADER % (b"'<f8'", b"False", b"(134217728,)"),
        HEADER % (b"'<f8'", b"False", b"(999999999999999,)"),
        HEADER % (b"'<f8'", b"False", b"(" + b"9" * 5000 + b",)"),
        HEADER % (b"'<f8'", b"True", b"(0,)"),
        HEADER % (b"'|O'", b"False", b"(5,)"),
        HEADER % (b"'<f3'", b"False", b"(0,)"),
        HEADER % (b"[('a', '<f8')]", b"False", b"(0,)"),
        HEADER % (b"'<f8'", b"False", b"(" * 2000 + b")" * 2000),
        HEADER.replace(b"\x01\x00v", b"\x01\x00\xff") % (b"'<f8'", b"False", b"(0,)"),
    ],
)
def test_a_serialized_array_with_a_false_header_is_refused_without_allocating_memory(
    small_cell: MakeCell, tmp_path: Path, sent: bytes
) -> None:
    """The same, for a vector that is not long."""
    cell = small_cell(algorithm__trust="trusted", run__arithmetic="integers")
    assert memory_of(cell, RecordDict({CONFIG: ConfigRecord({"release": sent})}), tmp_path) < 2**28


def memory_of(cell: Cell, announced: RecordDict, tmp_path: Path) -> int:
    """The most that a server takes which refuses what silo 1 sends."""
    grid = Announcing(client_app, 3, make_run_config(cell, Path()))
    grid.announced = announced
    tracemalloc.start()
    try:
        with pytest.raises(RunError, match=r"silo 1, round 1: "):
            serve(plan_with(cell), tmp_path / "j", grid)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("algorithm", ["dp-mu2-fl", "dp-ftrl", "dp-sgd"])
def test_a_trusted_server_accepts_the_sums_of_honest_silos(
    small_cell: MakeCell, tmp_path: Path, dtype: str, algorithm: str
) -> None:
    """Whoever is refused for nothing would switch the check off."""
    keys = {"name": algorithm, "trust": "trusted"}
    keys |= {"diameter": 0.1} if algorithm == "dp-mu2-fl" else {"clip": 1.0, "step": 0.1}
    cell = small_cell(
        algorithm=keys, run={"dtype": dtype, "arithmetic": "integers"}, privacy__rho=None, privacy__mu=1.0
    )
    grid = Malicious(client_app, 3, make_run_config(cell, Path()))
    assert torch.isfinite(serve(plan_with(cell), tmp_path / "j", grid).model).all()
