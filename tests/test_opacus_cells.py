"""What the bench asks Opacus for, without Opacus: the same cells and x_1, and the table beside fedpriv's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch.nn.functional import cross_entropy

import fedpriv
from benchmarks.differences import interval
from benchmarks.opacus_cells import Draws, ahead, asked, batches, check, module_of, noise_std, normals, run, table
from fedpriv.core.errors import InputError
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell

SCENARIOS = Path(__file__).parents[1] / "scenarios"


def cell_with(*settings: str) -> Cell:
    """The cell of sentences.toml with one silo, after these settings."""
    few = ["federation.silos=1", "privacy.epsilon=3", "seeds=1", *settings]
    (point,) = load_scenario(SCENARIOS / "sentences.toml", few).points
    return point.cell


@pytest.mark.parametrize("name", ["cnn-epochs", "sentences", "lora-mnist"])
def test_the_opacus_bench_tries_the_settings_and_records_of_fedpriv(name: str) -> None:
    tried = list(asked(SCENARIOS / "tuning" / f"{name}.toml", ["privacy.epsilon=3.0"]))
    assert {cell.algorithm.settings.step for _, cell in tried} == {2.0, 4.0, 8.0, 16.0}  # type: ignore[attr-defined]
    assert {line["seed"] for line, _ in tried} == {100}
    for _, cell in tried:
        check(cell)
        assert cell.data.validation is not None
    scenario = load_scenario(SCENARIOS / f"{name}.toml")
    assert {cell.seed for _, cell in asked(SCENARIOS / f"{name}.toml", ())} == set(scenario.seeds)


def test_cells_without_an_opacus_equivalent_are_refused() -> None:
    check(cell_with())
    for setting in ("federation.sampling=fixed", "privacy.relation=replace-one"):
        with pytest.raises(InputError, match="opacus_cells"):
            check(cell_with(setting))


@pytest.mark.parametrize(
    ("there", "given"), [("own", "fedpriv"), ("fedpriv", "own"), ("fedpriv's with its multiplier", "fedpriv")]
)
def test_results_with_other_noise_draws_are_not_continued_in_one_file(
    there: Draws, given: Draws, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(json.dumps({"point": {}, "seed": 0, "test_accuracy": 0.5, "draws": there}) + "\n")
    with pytest.raises(InputError, match="give another file"):
        run(SCENARIOS / "sentences.toml", out, ["seeds=1"], given)
    assert len(out.read_text().splitlines()) == 1


def test_the_opacus_network_starts_from_the_parameters_of_fedpriv() -> None:
    task = load_task(cell_with())
    module, records = module_of(task), task.test.features[:5]
    point = task.objective.initial()
    assert torch.equal(torch.cat([each.detach().flatten() for each in module.parameters()]), point)
    assert torch.allclose(module(records), task.objective.outputs(point, task.test)[:5], atol=1e-5)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_dp_sgd_by_hand_with_the_exported_draws_reproduces_the_fedpriv_run(tmp_path: Path) -> None:
    """DP-SGD by hand, record after record, ends at the loss of fedpriv's run."""
    few: dict[str, Any] = {
        "federation.silos": [4], "federation.samples": 80, "federation.rounds": 4, "federation.epochs": 1,
        "privacy.epsilon": [3.0], "run.dtype": "float64", "data.validation": 100, "seeds": [3],
        "algorithm.step": 1.0,
    }  # fmt: skip
    words = [f"{key}={json.dumps(each)}" for key, each in few.items()]
    (point,) = load_scenario(SCENARIOS / "sentences.toml", words).points
    (result,) = fedpriv.run("sentences", set=few, out=tmp_path / "run")
    cell, task = point.cell, load_task(point.cell)
    module, keys = module_of(task), cell.algorithm.settings
    parameters = list(module.parameters())
    for t in range(1, 5):
        total = torch.zeros(task.objective.dimension, dtype=torch.float64)
        for one, label in zip(*(column.split(1) for column in batches(cell, task, t)), strict=True):
            slopes = torch.autograd.grad(cross_entropy(module(one), label), parameters)
            gradient = torch.cat([slope.flatten() for slope in slopes])
            total += gradient * min(1.0, keys.clip / gradient.norm())  # type: ignore[attr-defined]
        noisy = total / sum(cell.batch_sizes) + noise_std(cell, task) * normals(cell, task, t)
        with torch.no_grad():
            for each, part in zip(parameters, noisy.split([each.numel() for each in parameters]), strict=True):
                each -= keys.step * part.view_as(each)  # type: ignore[attr-defined]
    point_by_hand = torch.cat([each.detach().flatten() for each in parameters])
    assert torch.allclose(point_by_hand, torch.from_numpy(result.model()), rtol=0.0, atol=1e-9)


def test_the_accuracy_difference_of_runs_with_equal_draws_is_paired_by_seed() -> None:
    point = {"federation.silos": 20, "privacy.epsilon": 1.0}
    ours, theirs = [90.1, 70.4, 80.9], [90.0, 70.5, 80.7]
    cells = [{"point": point, "seed": seed, "test_accuracy": each / 100} for seed, each in enumerate(ours)]
    peers = [
        {"point": point, "seed": seed, "test_accuracy": theirs[seed] / 100, "draws": "fedpriv"}
        for seed in (2, 0, 1)
    ]
    mean, half = interval([0.1, -0.1, 0.2])
    assert list(table(cells, peers))[2].endswith(f"| {mean:+.2f} ± {half:.2f} |")
    elsewhere = [{**line, "point": {**point, "federation.silos": 1}} for line in peers]
    assert list(table(cells, elsewhere))[2].endswith("| - | - |")  # other silos have other draws


def test_the_accuracy_difference_of_independent_runs_has_welchs_interval() -> None:
    ours, theirs = [90.1, 90.4, 90.9], [90.0, 89.0, 89.9]
    mean, half = ahead(ours, theirs)
    found = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    assert (mean - half, mean + half) == pytest.approx((found.low, found.high))
    cells = [
        {"point": {"federation.silos": silos, "privacy.epsilon": 1.0}, "seed": seed, "test_accuracy": value / 100}
        for silos in (1, 20) for seed, value in enumerate(ours)
    ]  # fmt: skip
    peers = [
        {"point": {"federation.silos": 1, "privacy.epsilon": 1.0}, "seed": seed, "test_accuracy": value / 100}
        for seed, value in enumerate(theirs)
    ]
    rows = list(table(cells, peers))
    assert len(rows) == 4
    assert rows[2].startswith("| silos 1, epsilon 1.0 | 90.47 ± 1.00 (3) | 89.63 ± ")
    assert rows[3].endswith(f"{mean:+.2f} ± {half:.2f} |")
