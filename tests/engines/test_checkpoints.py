"""A group that is stopped in its middle goes on from its checkpoint, with the bits it would have computed."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from fedpriv.claims.outcome import RunObserver, cell_digest
from fedpriv.core.errors import InputError
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
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from tests.conftest import small_tree
from tests.engines import test_every_mechanism as mechanisms
from tests.engines.test_engines import Recorder
from tests.engines.test_every_row import RUNS, SCHEDULES, a_small_problem, usable
from tests.parts import in_parts, in_turn

__all__ = ["a_small_problem"]  # a fixture

CPU = torch.device("cpu")


class Memory(Checkpoints):
    """Keeps checkpoints in memory; the `stop`-th one is written, and then somebody presses Ctrl-C."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.count = stop, 0
        self.kept: dict[str, bytes] = {}

    def latest(self, name: str) -> bytes | None:
        return self.kept.get(name)

    def keep(self, name: str, content: bytes) -> None:
        self.kept[name] = content
        self.count += 1
        if self.count == self.stop:
            raise KeyboardInterrupt

    def drop(self, name: str) -> None:
        self.kept.pop(name, None)


class Noting(Recorder, RunObserver):
    """What was said, and in which words."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def notified(self, line: str) -> None:
        self.lines.append(line)


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


def run(cells: Sequence[Cell], kept: Checkpoints) -> tuple[list[Any], Noting]:
    recorder = Noting()
    return bits(list(run_vectorized(cells, recorder, kept))), recorder


def check(cells: Sequence[Cell], stops: Sequence[int]) -> None:
    """Stopped after every one of `stops` more rounds and resumed, cells give what they give in one go."""
    whole, heard = run(cells, Checkpoints())
    assert len(group_cells(cells)) == 1
    memory = Memory()
    for stop, t in zip(stops, itertools.accumulate(stops), strict=True):
        memory.stop, memory.count = stop, 0
        with pytest.raises(KeyboardInterrupt):
            run(cells, memory)
        (content,) = memory.kept.values()
        assert unpack_checkpoint(content, None, CPU).t == t, "it goes on, and does not start anew"
    memory.stop = None
    resumed, again = run(cells, memory)
    assert resumed == whole
    assert again.evaluations == heard.evaluations
    assert again.rounds == heard.rounds
    assert not memory.kept, "checkpoints are dropped when their group is finished"


def replicates(cell: Cell) -> list[Cell]:
    """Two seeds and two noise levels in one group."""
    other = cell.model_copy(update={"seed": 2})
    if cell.privacy.mu is not None:
        other = other.model_copy(update={"privacy": cell.privacy.model_copy(update={"mu": 0.5})})
    return [cell, other]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("name", "epochs"), in_turn([*(kind.name for kind in SELECTABLE_MECHANISMS), AUTO], [3, 1])
)
def test_every_mechanism_goes_on_with_the_same_bits(name: str, epochs: int) -> None:
    for trust in ("untrusted", "trusted"):
        cell = fit_cell_noise(mechanisms.cell_of("dp-ftrl", trust, epochs, mechanism=name, clip=1.0))
        check(replicates(cell), (1, 4, 6))


def test_how_many_were_clipped_is_counted_over_all_attempts() -> None:
    cells = replicates(mechanisms.cell_of("dp-ftrl", "trusted", clip=4.0))
    shares = [outcome.cell_outcome.fraction_clipped for outcome in run_vectorized(cells, Recorder())]
    assert all(share is not None and 0.0 < share < 1.0 for share in shares)
    check(cells, (6,))


def one_schedule(name: str, place: int) -> str:
    """One that a row runs under without noise; those of all rows together are all of them."""
    runs = [schedule for schedule in SCHEDULES if name in RUNS.get(schedule, ())]
    return runs[place % len(runs)]


@pytest.mark.every(25)
@pytest.mark.parametrize(
    ("name", "schedule"),
    in_parts(
        itertools.product(ALGORITHMS, SCHEDULES),
        [(name, one_schedule(name, place)) for place, name in enumerate(ALGORITHMS)],
    ),
)
def test_every_row_goes_on_with_the_same_bits(name: str, schedule: str) -> None:
    """Optimizers, estimators, secret participation, local training."""
    cells = [usable(name, schedule, trust, private) for private in (True, False) for trust in TRUSTS]
    for cell in [cell for cell in cells if cell is not None][:1]:  # where noise is added makes no other state
        check(replicates(cell), (5,))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_silos_that_drop_out_go_on_with_the_same_bits(sampling: str) -> None:
    mechanism = {"name": "dp-sgd", "clip": 1.0, "step": 0.1, "momentum": 0.5}
    if sampling == "fixed":
        mechanism = {"name": "dp-ftrl", "clip": 1.0, "step": 0.1, "mechanism": "banded", "bands": 2}
    tree = small_tree(
        federation={"silos": 3, "rounds": 8, "epochs": 2, "batch": 4, "drop_out": 0.35, "sampling": sampling},
        algorithm={"trust": "untrusted", **mechanism},
        privacy={"relation": "zero-out", "epsilon": 4.0},
    )
    cells = [resolve_cell({**tree, "seed": seed}, "test") for seed in (1, 2)]
    check(cells, (1, 2, 3))


@pytest.mark.slow
def test_single_precision_in_blocks_goes_on_with_the_same_bits() -> None:
    """Many rounds, so that noise and records come in several blocks; stopped within one and at its end."""
    tree = small_tree(run__dtype="float32", federation__rounds=300, federation__samples=900)
    cells = [resolve_cell({**tree, "seed": seed}, "test") for seed in (1, 2, 3)]
    check(cells, (74, 1, 1, 99, 80))
    aggregate = resolve_cell({**tree, "run": {**tree["run"], "noise": "aggregate"}}, "test")
    check([aggregate], (75, 100))


def test_a_feed_goes_on_within_a_block() -> None:
    noise = Noise((NoiseSource(0, 2.0, 0.5), NoiseSource(1, 2.0, 0.5)))
    feed = NoiseFeed([noise, noise], [3, 4], 50, 17, torch.float32, lambda t: None)
    whole = list(feed.rounds_from(1))
    for first in (1, 2, 3, 12, 13, 14, 50):
        assert all(map(torch.equal, feed.rounds_from(first), whole[first - 1 :]))
        assert len(list(feed.rounds_from(first))) == 51 - first


def test_replicates_that_share_draws_can_have_them_once() -> None:
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


def test_time_is_counted_over_all_attempts() -> None:
    cell, memory = resolve_cell(small_tree(), "test"), Memory(stop=3)
    with pytest.raises(KeyboardInterrupt):
        run([cell], memory)
    (name,) = memory.kept
    start = unpack_checkpoint(memory.kept[name], None, CPU)
    memory.kept[name] = pack_checkpoint(
        SimulationCheckpoint(start.t, 1000.0, start.evaluations, start.states),
        read_header(memory.kept[name]).cells,
    )
    (outcome,) = run_vectorized([cell], Noting(), memory)
    assert outcome.cell_outcome.wall_seconds > 1000.0


def test_a_damaged_checkpoint_is_said_and_not_used() -> None:
    cell, memory = resolve_cell(small_tree(), "test"), Memory(stop=3)
    with pytest.raises(KeyboardInterrupt):
        run([cell], memory)
    (name,) = memory.kept
    content = memory.kept[name]
    whole, _ = run([cell], Checkpoints())
    middle = len(content) // 2
    for damaged in (b"", content[:middle], content[:middle] + b"\0\0\0\0" + content[middle + 4 :], b"PK" * 40):
        resumed, heard = run([cell], _holding(name, damaged))
        assert resumed == whole
        (line,) = heard.lines
        assert "is not used, and its rounds are run again" in line


def _holding(name: str, content: bytes) -> Memory:
    memory = Memory()
    memory.kept = {name: content}
    return memory


@dataclass(frozen=True)
class Inner:
    vector: torch.Tensor
    number: float


class Outer(NamedTuple):
    inner: Inner
    several: tuple[torch.Tensor, ...]
    count: int


def test_states_are_put_together_as_they_were() -> None:
    """Also what repeats itself along an axis: an addition of it may round otherwise than of a full tensor."""
    like = Outer(Inner(torch.zeros(3), 0.0), (), 0)
    wide = torch.arange(3.0).expand(4, 3)
    state = Outer(Inner(wide, 0.1), (torch.ones(2, 3, dtype=torch.float64), torch.tensor([True])), 7)
    content = pack_checkpoint(SimulationCheckpoint(5, 1.5, [(2, [{"test_loss": 0.1}])], state), ("a", "b"))
    found = unpack_checkpoint(content, like, CPU)
    assert (found.t, found.seconds, found.evaluations) == (5, 1.5, [(2, [{"test_loss": 0.1}])])
    assert isinstance(found.states, Outer)
    assert isinstance(found.states.inner, Inner)
    assert torch.equal(found.states.inner.vector, wide)
    assert found.states.inner.vector.stride() == wide.stride() == (0, 1)
    assert found.states.inner.number == 0.1
    assert [part.dtype for part in found.states.several] == [torch.float64, torch.bool]
    assert (read_header(content).cells, read_header(content).why_unusable()) == (("a", "b"), None)


def test_a_state_of_other_types_is_no_checkpoint() -> None:
    content = pack_checkpoint(SimulationCheckpoint(5, 1.5, [], Outer(Inner(torch.zeros(3), 0.1), (), 7)), ("a",))
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        unpack_checkpoint(content, Inner(torch.zeros(3), 0.1), CPU)


def test_a_state_that_cannot_be_kept_is_said_once_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = resolve_cell(small_tree(), "test")
    whole, _ = run([cell], Checkpoints())

    def refusing(*_: object) -> bytes:
        raise TypeError("a state with a list cannot be kept")

    monkeypatch.setattr(keeper, "pack_checkpoint", refusing)
    memory = Memory()
    found, heard = run([cell], memory)
    assert (found, memory.kept) == (whole, {})
    assert heard.lines == ["no checkpoints of cells that are in the middle: a state with a list cannot be kept"]
    with pytest.raises(TypeError, match="a state with a list cannot be kept"):
        pack_checkpoint(SimulationCheckpoint(1, 0.0, (), [1, 2]), ("a",))


def test_another_version_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    content = pack_checkpoint(SimulationCheckpoint(1, 0.0, (), ()), ("a",))
    now = format_.installed_versions()
    monkeypatch.setattr(format_, "installed_versions", lambda: {**now, "torch": "9.9"})
    assert read_header(content).why_unusable() == f"torch was {now['torch']} and is 9.9"
    monkeypatch.setattr(format_, "FORMAT", 3)
    with pytest.raises(ValueError, match="format 2, this version of fedpriv reads format 3"):
        read_header(content)


def test_what_is_kept_seldom_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that takes 1 s is written every 200 s, a quick one every 2 s."""
    clock = Clock()
    monkeypatch.undo()
    monkeypatch.setattr(keeper, "time", clock)
    slow = Slow(clock)
    one = keeper.GroupCheckpoints(slow, [resolve_cell(small_tree(), "test")], Noting())
    assert [one.is_due(at) for at in (0.0, 1.99, 2.0)] == [False, False, True]
    for takes, until in ((0.001, 2.0), (1.0, 200.0)):
        slow.takes = takes
        one.keep(SimulationCheckpoint(1, 0.0, (), ()))
        assert not one.is_due(clock.now + until - 0.01)
        assert one.is_due(clock.now + until)


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(Checkpoints):
    """A disk that takes its time."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.takes = clock, 0.0

    def keep(self, name: str, content: bytes) -> None:
        self.clock.now += self.takes


def test_workers_send_what_they_keep_and_go_on_from_what_was_kept() -> None:
    cells = replicates(resolve_cell(small_tree(), "test"))
    trees = [cell.canonical_data() for cell in cells]
    whole = list(_events(trees, {}))
    sent = [event for event in whole if _is_of_checkpoints(event)]
    name = checkpoint_name([cell_digest(cell) for cell in cells])
    assert [event.arguments[0] for event in sent] == [name] * 8
    assert [event.method for event in sent] == ["keep"] * 7 + ["drop"]
    outcomes = [event for event in whole if isinstance(event, IndexedOutcome)]
    assert whole.index(sent[-1]) > max(map(whole.index, outcomes)), "not before its outcomes are there"
    again = list(_events(trees, dict([sent[3].arguments])))
    assert len([event for event in again if _is_of_checkpoints(event)]) == 4
    assert bits([event for event in again if isinstance(event, IndexedOutcome)]) == bits(outcomes)


def _is_of_checkpoints(event: Any) -> bool:
    return isinstance(event, RemoteCall) and event.method in ("keep", "drop")


def _events(trees: Sequence[Any], before: dict[str, bytes]) -> Iterator[Any]:
    _, *events = run_worker("vectorized", trees, [], before)
    return iter(events)


def test_integers_are_still_refused() -> None:
    cell = resolve_cell(small_tree(run__arithmetic="integers"), "test")
    with pytest.raises(InputError, match="use --engine inprocess"):
        run([cell], Memory())
