"""A group that is stopped in its middle goes on from its checkpoint, with the bits it would have computed."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch

from fedpriv.claims.outcome import cell_digest
from fedpriv.engines.table import IndexedOutcome
from fedpriv.engines.vectorized import checkpoints as format_
from fedpriv.engines.vectorized import engine as keeper
from fedpriv.engines.vectorized.checkpoints import (
    Checkpoints,
    SimulationCheckpoint,
    checkpoint_name,
    pack_checkpoint,
    read_header,
    unpack_checkpoint,
)
from fedpriv.engines.vectorized.engine import run_vectorized
from fedpriv.engines.vectorized.noise import NoiseFeed
from fedpriv.engines.vectorized.silos import group_cells
from fedpriv.engines.workers import RemoteCall, run_worker
from fedpriv.noise.registry import AUTO, SELECTABLE_MECHANISMS
from fedpriv.noise.trust import TRUSTS, Noise, NoiseSource
from fedpriv.papers.table import ALGORITHMS
from fedpriv.plan.calibration import fit_cell_noise
from fedpriv.scenario.schema import Cell
from tests.engines.builders import Memory, Recorder, refusal, small_cell
from tests.engines.test_drop_outs import BANDED, ROUNDS, SGD, dropping
from tests.engines.test_every_mechanism import mechanism_cell
from tests.engines.test_every_row import RUNS, SCHEDULES, a_small_problem, usable
from tests.parts import in_parts, in_turn

__all__ = ["Memory", "a_small_problem"]  # a fixture

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_MIN_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(keeper, "_MAX_CHECKPOINT_SHARE", float("inf"))


def bits(outcomes: Sequence[IndexedOutcome]) -> list[Any]:
    """All that a results.json says of outcomes but the time."""
    return [
        (
            outcome.index,
            outcome.cell_outcome.model.tobytes(),
            dict(outcome.cell_outcome.metrics),
            outcome.cell_outcome.fraction_clipped,
            outcome.cell_outcome.releases,
        )
        for outcome in outcomes
    ]


def run(cells: Sequence[Cell], checkpoints: Checkpoints) -> tuple[list[Any], Recorder]:
    recorder = Recorder()
    return bits(list(run_vectorized(cells, recorder, checkpoints))), recorder


def interrupted(cell: Cell) -> tuple[Memory, str, bytes]:
    """Memory of a run that is stopped in its third round, with the checkpoint's name and content."""
    memory = Memory(stop=3)
    with pytest.raises(KeyboardInterrupt):
        run([cell], memory)
    ((name, content),) = memory.contents.items()
    return memory, name, content


def check(cells: Sequence[Cell], stops: Sequence[int]) -> None:
    """Stopped after every one of `stops` more rounds and resumed, cells give what they give in one go."""
    whole, recorder = run(cells, Checkpoints())
    assert len(group_cells(cells)) == 1
    memory = Memory()
    for stop, t in zip(stops, itertools.accumulate(stops), strict=True):
        memory.stop, memory.count = stop, 0
        with pytest.raises(KeyboardInterrupt):
            run(cells, memory)
        (content,) = memory.contents.values()
        assert unpack_checkpoint(content, None, CPU).t == t, "it goes on, and does not start anew"
    memory.stop = None
    resumed, again = run(cells, memory)
    assert resumed == whole
    assert (again.evaluations, again.rounds) == (recorder.evaluations, recorder.rounds)
    assert not memory.contents, "checkpoints are dropped when their group is finished"


def replicates(cell: Cell) -> list[Cell]:
    """Two seeds and two noise levels in one group."""
    other = cell.model_copy(update={"seed": 2})
    if cell.privacy.mu is not None:
        other = other.model_copy(update={"privacy": cell.privacy.model_copy(update={"mu": 0.5})})
    return [cell, other]


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("name", "epochs"), in_turn([*(kind.name for kind in SELECTABLE_MECHANISMS), AUTO], [3, 1])
)
def test_resuming_from_a_checkpoint_gives_the_same_bits_for_every_mechanism(name: str, epochs: int) -> None:
    for trust in ("untrusted", "trusted"):
        cell = fit_cell_noise(mechanism_cell("dp-ftrl", trust, epochs, mechanism=name, clip=1.0))
        check(replicates(cell), (1, 4, 6))


def test_the_clipped_fraction_of_a_resumed_run_counts_all_attempts() -> None:
    cells = replicates(mechanism_cell("dp-ftrl", "trusted", clip=4.0))
    shares = [outcome.cell_outcome.fraction_clipped for outcome in run_vectorized(cells, Recorder())]
    assert all(share is not None and 0.0 < share < 1.0 for share in shares)
    check(cells, (6,))


def one_schedule(name: str, place: int) -> str:
    """One that a row runs under without noise; those of all rows together are all of them."""
    runs = [schedule for schedule in SCHEDULES if name in RUNS.get(schedule, ())]
    return runs[place % len(runs)]


@pytest.mark.every(25)
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "schedule"),
    in_parts(
        itertools.product(ALGORITHMS, SCHEDULES),
        [(name, one_schedule(name, place)) for place, name in enumerate(ALGORITHMS)],
    ),
)
def test_resuming_from_a_checkpoint_gives_the_same_bits_for_every_algorithm(name: str, schedule: str) -> None:
    """Optimizers, estimators, secret participation, local training."""
    cells = [usable(name, schedule, trust, private) for private in (True, False) for trust in TRUSTS]
    for cell in [cell for cell in cells if cell is not None][:1]:  # where noise is added makes no other state
        check(replicates(cell), (5,))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_resuming_from_a_checkpoint_gives_the_same_bits_with_absent_silos(sampling: str) -> None:
    algorithm = BANDED if sampling == "fixed" else SGD
    federation = {**ROUNDS, "sampling": sampling}
    check([dropping(algorithm=algorithm, federation=federation, seed=seed) for seed in (1, 2)], (1, 2, 3))


@pytest.mark.slow
def test_resuming_within_a_block_of_rounds_gives_the_same_bits_in_float32() -> None:
    """Many rounds, so that noise and records come in several blocks; stopped within one and at its end."""
    changes = {"run__dtype": "float32", "federation__rounds": 300, "federation__samples": 900}
    check([small_cell(seed=seed, **changes) for seed in (1, 2, 3)], (74, 1, 1, 99, 80))
    check([small_cell(run__noise="aggregate", **changes)], (75, 100))


def test_the_noise_feed_can_start_at_any_round_with_the_same_noise() -> None:
    noise = Noise((NoiseSource(0, 2.0, 0.5), NoiseSource(1, 2.0, 0.5)))
    feed = NoiseFeed([noise, noise], [3, 4], 50, 17, torch.float32, lambda t: None)
    whole = list(feed.rounds_from(1))
    for first in (1, 2, 3, 12, 13, 14, 50):
        assert all(map(torch.equal, feed.rounds_from(first), whole[first - 1 :]))
        assert len(list(feed.rounds_from(first))) == 51 - first


def test_replicates_with_equal_seeds_can_share_one_unscaled_noise_draw() -> None:
    """In units: what comes, times its amplitude, is what replicates add otherwise."""
    noises = [Noise((NoiseSource(0, std, 0.5), NoiseSource(1, std, 0.5))) for std in (2.0, 3.0)]
    scaled = NoiseFeed(noises, [4, 4], 20, 17, torch.float64, lambda t: None)
    units = NoiseFeed(noises, [4, 4], 20, 17, torch.float64, lambda t: None, unscaled=True)
    assert scaled.amplitude is None
    assert units.amplitude is not None
    for added, unit in zip(scaled.rounds_from(1), units.rounds_from(1), strict=True):
        assert unit.shape == (1, 17)
        assert torch.equal(unit * units.amplitude, added)
    apart = NoiseFeed(noises, [4, 5], 20, 17, torch.float64, lambda t: None, unscaled=True)
    assert apart.amplitude is None  # other seeds, other draws


def test_the_wall_time_of_a_resumed_run_counts_all_attempts() -> None:
    memory, name, content = interrupted(small_cell())
    late = replace(unpack_checkpoint(content, None, CPU), seconds=1000.0)
    memory.contents[name] = pack_checkpoint(late, read_header(content).cells)
    (outcome,) = run_vectorized([small_cell()], Recorder(), memory)
    assert outcome.cell_outcome.wall_seconds > 1000.0


def test_a_damaged_checkpoint_is_reported_and_its_rounds_are_recomputed() -> None:
    cell = small_cell()
    memory, name, content = interrupted(cell)
    whole, _ = run([cell], Checkpoints())
    middle = len(content) // 2
    spoiled = content[:middle] + b"\0\0\0\0" + content[middle + 4 :]
    entry = content.index(b"PK\x01\x02")
    encrypted = content[: entry + 8] + b"\x01" + content[entry + 9 :]  # a flag of the zip file, which was an error
    for damaged in (b"", content[:middle], spoiled, encrypted, b"PK" * 40):
        memory.contents[name], memory.stop = damaged, None
        resumed, recorder = run([cell], memory)
        assert resumed == whole
        (line,) = recorder.lines
        assert "is not used, and its rounds are run again" in line


@dataclass(frozen=True)
class Inner:
    vector: torch.Tensor
    number: float


class Outer(NamedTuple):
    inner: Inner
    several: tuple[torch.Tensor, ...]
    count: int


def test_nested_states_survive_a_checkpoint_with_types_and_strides() -> None:
    """Also what repeats itself along an axis: an addition of it may round otherwise than of a full tensor."""
    like = Outer(Inner(torch.zeros(3), 0.0), (), 0)
    wide = torch.arange(3.0).expand(4, 3)
    state = Outer(Inner(wide, 0.1), (torch.ones(2, 3, dtype=torch.float64), torch.tensor([True])), 7)
    content = pack_checkpoint(SimulationCheckpoint(5, 1.5, [(2, [{"test_loss": 0.1}])], state), ("a", "b"))
    checkpoint = unpack_checkpoint(content, like, CPU)
    assert (checkpoint.t, checkpoint.seconds, checkpoint.evaluations) == (5, 1.5, [(2, [{"test_loss": 0.1}])])
    loaded = checkpoint.states
    assert isinstance(loaded, Outer)
    assert isinstance(loaded.inner, Inner)
    assert torch.equal(loaded.inner.vector, wide)
    assert loaded.inner.vector.stride() == wide.stride() == (0, 1)
    assert loaded.inner.number == 0.1
    assert [part.dtype for part in loaded.several] == [torch.float64, torch.bool]
    assert (read_header(content).cells, read_header(content).why_unusable()) == (("a", "b"), None)


def test_a_checkpoint_with_another_state_type_is_rejected() -> None:
    content = pack_checkpoint(SimulationCheckpoint(5, 1.5, [], Outer(Inner(torch.zeros(3), 0.1), (), 7)), ("a",))
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        unpack_checkpoint(content, Inner(torch.zeros(3), 0.1), CPU)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_a_checkpoint_is_kept_if_memory_is_missing_for_its_tensors(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Was: it counted as damaged, and all its rounds were run again."""
    content = pack_checkpoint(SimulationCheckpoint(5, 1.5, [], (torch.zeros(3),)), ("a",))
    monkeypatch.setattr(torch.Tensor, "to", Mock(side_effect=error))
    with pytest.raises(RuntimeError, match="memory"):
        unpack_checkpoint(content, (torch.zeros(3),), CPU)


def test_a_state_that_cannot_be_serialized_is_reported_once_and_the_run_completes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = small_cell()
    whole, _ = run([cell], Checkpoints())
    reason = "a state with a list cannot be kept"
    monkeypatch.setattr(keeper, "pack_checkpoint", Mock(side_effect=TypeError(reason)))
    memory = Memory()
    outcome, recorder = run([cell], memory)
    assert (outcome, memory.contents) == (whole, {})
    assert recorder.lines == [f"no checkpoints of cells that are in the middle: {reason}"]
    with pytest.raises(TypeError, match=reason):
        pack_checkpoint(SimulationCheckpoint(1, 0.0, (), [1, 2]), ("a",))


def test_a_checkpoint_of_another_library_or_format_version_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    content = pack_checkpoint(SimulationCheckpoint(1, 0.0, (), ()), ("a",))
    now = format_.installed_versions()
    monkeypatch.setattr(format_, "installed_versions", lambda: {**now, "torch": "9.9"})
    assert read_header(content).why_unusable() == f"torch was {now['torch']} and is 9.9"
    monkeypatch.setattr(format_, "FORMAT", 3)
    with pytest.raises(ValueError, match="format 2, this version of fedpriv reads format 3"):
        read_header(content)


class SlowDisk(Checkpoints):
    """A clock, and a disk that takes its time."""

    now, seconds = 0.0, 0.0

    def perf_counter(self) -> float:
        return self.now

    def keep(self, name: str, content: bytes) -> None:
        self.now += self.seconds


def test_checkpoints_are_written_less_often_the_longer_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that takes 1 s is written every 200 s, a quick one every 2 s."""
    disk = SlowDisk()
    monkeypatch.undo()
    monkeypatch.setattr(keeper, "time", disk)
    group = keeper.GroupCheckpoints(disk, [small_cell()], Recorder())
    assert [group.is_due(now) for now in (0.0, 1.99, 2.0)] == [False, False, True]
    for disk.seconds, pause in ((0.001, 2.0), (1.0, 200.0)):
        group.keep(SimulationCheckpoint(1, 0.0, (), ()))
        assert not group.is_due(disk.now + pause - 0.01)
        assert group.is_due(disk.now + pause)


def test_workers_send_their_checkpoints_and_resume_from_received_ones() -> None:
    cells = replicates(small_cell())
    trees = [cell.canonical_data() for cell in cells]
    _, *whole = run_worker("vectorized", trees, [], {})
    sent = checkpoint_calls(whole)
    name = checkpoint_name([cell_digest(cell) for cell in cells])
    assert [event.arguments[0] for event in sent] == [name] * 8
    assert [event.method for event in sent] == ["keep"] * 7 + ["drop"]
    outcomes = [event for event in whole if isinstance(event, IndexedOutcome)]
    assert whole.index(sent[-1]) > max(map(whole.index, outcomes)), "not before its outcomes are there"
    _, *again = run_worker("vectorized", trees, [], dict([sent[3].arguments]))
    assert len(checkpoint_calls(again)) == 4
    assert bits([event for event in again if isinstance(event, IndexedOutcome)]) == bits(outcomes)


def checkpoint_calls(events: Sequence[Any]) -> list[RemoteCall]:
    return [event for event in events if isinstance(event, RemoteCall) and event.method in ("keep", "drop")]


def test_integer_arithmetic_is_refused_by_the_vectorized_engine_with_checkpoints() -> None:
    with refusal("use --engine inprocess"):
        run([small_cell(run__arithmetic="integers")], Memory())
