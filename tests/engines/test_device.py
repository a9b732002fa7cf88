"""What a device computes: noise of the same distribution, and nothing goes back and forth between rounds.

No test machine needs a GPU: the fake one is torch's "meta" device, which has shapes and no numbers; there any
tensor of the host, any number asked for and any copy is an error.  Where there is a GPU, runs on it are compared.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedpriv.addons.statistics.indicators import STATISTICS
from fedpriv.claims.outcome import RunObserver
from fedpriv.core.errors import RunError
from fedpriv.engines.vectorized import engine
from fedpriv.engines.vectorized import noise as noise_module
from fedpriv.engines.vectorized.engine import find_device
from fedpriv.engines.vectorized.noise import DeviceSums, NoiseSum
from fedpriv.loss.models import MODELS
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.loss.ridge import RIDGE_STATISTICS
from fedpriv.noise.registry import SELECTABLE_MECHANISMS
from fedpriv.plan.calibration import fit_cell_noise
from fedpriv.scenario.schema import Cell, ModelSection
from tests.engines.builders import plan_cell, run_cell, small_cell
from tests.engines.test_every_row import SETTINGS

COPYING = {
    *("goldstein-erm", "goldstein-single-pass", "momentum-tree-aligned", "momentum-tree-reduced"),
    "noisy-newton",
}
"""Rows with directions or places that the host has, and with a check of every query's movement."""
CLIENTS = {"privacy": {"relation": "zero-out", "mu": 2.0, "unit": "client", "records": 2}}
KEYS: dict[str, dict[str, Any]] = {
    **{name: CLIENTS for name in SETTINGS if name.startswith("dp-fed")},
    "local-dp-sgd": {"federation": {"silos": 3, "rounds": 9}},
    "fedavg": {"privacy": {"relation": "zero-out", "mode": "none"}},
}
CPU, META = torch.device("cpu"), torch.device("meta")


def draw_sums(stream: NoiseSum, rounds: Sequence[int], node: int = 0, size: int = 20_000) -> np.ndarray:
    return DeviceSums(stream, size, torch.float64, CPU)(rounds, node).numpy()


def test_noise_drawn_on_a_device_has_the_variance_of_the_summed_silo_noise() -> None:
    """Mean and variance of 100,000 numbers: five standard deviations, false alarm 1 in 10^6."""
    for weights in ((1.0,), (1.0, 2.0, 0.5)):
        sums = draw_sums(NoiseSum(3, tuple(range(len(weights))), weights), range(1, 6))
        variance = sum(weight**2 for weight in weights)
        assert abs(sums.mean()) < 5.0 * (variance / sums.size) ** 0.5
        assert abs(sums.var() / variance - 1.0) < 5.0 * (2.0 / sums.size) ** 0.5
        assert abs(np.corrcoef(sums) - np.eye(5)).max() < 5.0 * sums.shape[1] ** -0.5


@pytest.mark.parametrize("chunk", [2**22, 40_000])
def test_noise_drawn_on_a_device_is_a_function_of_seed_silos_round_and_tree_node(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Whatever was drawn before, so that a resumed run goes on with the noise that it would have had."""
    monkeypatch.setattr(noise_module, "_MAX_DEVICE_VALUES", chunk)
    stream = NoiseSum(3, (0, 1, 2), (1.0, 2.0, 0.5))
    whole = draw_sums(stream, [1, 2, 70_000], 2)
    assert np.array_equal(draw_sums(stream, [70_000, 2], 2), whole[[2, 1]])
    others = [
        draw_sums(NoiseSum(4, stream.parties, stream.relative_weights), [1], 2),
        draw_sums(NoiseSum(3, (3, 4, 5), stream.relative_weights), [1], 2),
        draw_sums(stream, [1], 0),
        whole[1:2],
    ]
    for other in others:
        assert abs(np.corrcoef(other, whole[:1])[0, 1]) < 5.0 * whole.shape[1] ** -0.5


@pytest.mark.parametrize("name", ["meta", "hpu"])
def test_an_unsupported_device_is_refused(name: str) -> None:
    with pytest.raises(RunError, match="cannot be used here"):
        find_device(name)


class NothingCopied(TorchDispatchMode):
    """Fails on tensors that change place, and on numbers that are asked for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        places = {part.device.type for part in args if isinstance(part, torch.Tensor) and part.dim()}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim():
            places.add(result.device.type)
        if len(places) > 1 or "_local_scalar_dense" in str(func):
            raise AssertionError(f"{func}: {sorted(places)}")
        return result


class NoNumbers:
    """Generator of a device without numbers."""

    def __init__(self, device: torch.device) -> None:
        assert device == META

    def manual_seed(self, seed: int) -> None:
        assert 0 <= seed < 2**63


def rounds_on_meta(cells: Sequence[Cell], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many rounds of a group went without a copy."""
    monkeypatch.setattr(engine, "find_device", lambda name: META)
    monkeypatch.setattr(noise_module, "Generator", NoNumbers)
    plans = [plan_cell(cell) for cell in cells]
    group = engine._ReplicateGroup(range(len(cells)), cells, plans, RunObserver())
    with torch.inference_mode():
        states = group.iterate_states(group.initial_state(), 1)
        next(states)  # the first one brings records and tables to the device
        with NothingCopied():
            return 1 + sum(1 for _ in states)


def make_replicates(**changes: Any) -> list[Cell]:
    """Two noise levels, where there is noise, of two seeds, so that numbers differ between replicates."""
    changes = {"privacy": {"relation": "zero-out", "mu": 2.0}, **changes}
    levels: list[dict[str, Any]] = (
        [{"privacy__mu": mu} for mu in (2.0, 3.0)] if "mu" in changes["privacy"] else [{}]
    )
    return [fit_cell_noise(small_cell(**changes, **level, seed=seed)) for level in levels for seed in (0, 1)]


def mechanism_cells(mechanism: str, trust: str) -> list[Cell]:
    algorithm = {"name": "dp-ftrl", "trust": trust, "clip": 1.0, "step": 0.1, "mechanism": mechanism}
    return make_replicates(algorithm=algorithm)


@pytest.mark.every(9)
@pytest.mark.parametrize("mechanism", [kind.name for kind in SELECTABLE_MECHANISMS])
def test_rounds_of_every_mechanism_copy_nothing_between_device_and_host(
    mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = mechanism_cells(mechanism, "untrusted")
    assert rounds_on_meta(cells, monkeypatch) == cells[0].schedule.rounds


@pytest.mark.every(20)
@pytest.mark.parametrize("row", sorted(set(SETTINGS) - COPYING))
def test_rounds_of_every_algorithm_copy_nothing_between_device_and_host(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = {"phased-sgd": "curator", "local-dp-sgd": "untrusted"}.get(row, "trusted")
    cells = make_replicates(algorithm={"name": row, "trust": trust, **SETTINGS[row]}, **KEYS.get(row, {}))
    assert rounds_on_meta(cells, monkeypatch) == cells[0].schedule.rounds


def test_the_copy_detector_fails_on_transfers_between_device_and_host() -> None:
    there = torch.zeros(3, device=META)
    for copying in (lambda: torch.zeros(3).to(META), lambda: there + torch.zeros(3), lambda: bool(there.sum())):
        with NothingCopied(), pytest.raises((AssertionError, RuntimeError)):
            copying()


# Statistics have one round, and their public columns are copied for it.
_REQUIRED: dict[str, dict[str, Any]] = {"ridge-regression": {"penalty": 0.1}, "column-moments": {"columns": [0]}}


@pytest.mark.parametrize(
    "name", [*(name for name in MODELS if name not in (STATISTICS, RIDGE_STATISTICS)), "torch.nn:Linear"]
)
def test_increments_of_every_model_copy_nothing_between_device_and_host(name: str) -> None:
    dtype = torch.float32
    section = ModelSection.model_validate({"name": name, **_REQUIRED.get(name, {})})
    classes = 10 if name == "cnn" else 0 if section.is_regression else 3 if section.is_survival else 2
    features = 784 if name == "cnn" else 20
    objective = section.row.objective((features,), classes, dtype, section.settings)
    points = [torch.zeros(2, objective.dimension, dtype=dtype, device=META) for _ in range(2)]
    labels = torch.zeros(2, 5, dtype=torch.int64 if classes else dtype, device=META)
    records = Records(torch.zeros(2, 5, features, dtype=dtype, device=META), labels)
    weights, clips = (torch.ones(shape, dtype=dtype, device=META) for shape in ((5,), (2, 1)))
    with torch.inference_mode(), NothingCopied():
        moved = objective.increment(Query(points, (3.0, -2.0)), Batch(records, weights), clips)
        plain = objective.increment(Query(points[:1]), Batch(records, weights), 1.0)
    assert moved.total.shape == plain.total.shape == points[0].shape
    assert moved.clipped_count.shape == (2,)


class HostNoise:
    """The processor's noise in place of a device's own."""

    def __init__(self, stream: NoiseSum, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._sums, self._device = noise_module._make_host_sums(stream, size, dtype), device

    def __call__(self, rounds: Sequence[int], node: int) -> torch.Tensor:
        return self._sums(rounds, node).to(self._device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
@pytest.mark.parametrize("mechanism", [kind.name for kind in SELECTABLE_MECHANISMS])
def test_a_gpu_run_equals_the_cpu_run_up_to_rounding(
    monkeypatch: pytest.MonkeyPatch, mechanism: str, trust: str
) -> None:
    """With the processor's noise, copied to the device."""
    monkeypatch.setattr(noise_module, "DeviceSums", HostNoise)
    cell, *_ = mechanism_cells(mechanism, trust)
    on_gpu = cell.model_copy(update={"run": cell.run.model_copy(update={"device": "cuda"})})
    here, there = (run_cell("vectorized", place).model for place in (cell, on_gpu))
    np.testing.assert_allclose(there, here, rtol=0.0, atol=1e-9)
