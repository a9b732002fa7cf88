"""What the bench asks Opacus for, without Opacus: the same cells and x_1, and the table beside fedpriv's."""

from pathlib import Path

import pytest
import torch
from scipy import stats

from benchmarks.opacus_cells import ahead, asked, check, module_of, table
from fedpriv.core.errors import InputError
from fedpriv.rounds.task import task_of_cell
from fedpriv.scenario.load import load_scenario

SCENARIOS = Path(__file__).parents[1] / "scenarios"


@pytest.mark.parametrize("name", ["cnn-epochs", "sentences", "lora-mnist"])
def test_opacus_tries_what_fedpriv_tries_on_the_same_records(name: str) -> None:
    tried = list(asked(SCENARIOS / "tuning" / f"{name}.toml", ["privacy.epsilon=3.0"]))
    assert {cell.algorithm.settings.step for _, cell in tried} == {2.0, 4.0, 8.0, 16.0}  # type: ignore[attr-defined]
    assert {line["seed"] for line, _ in tried} == {100}
    for _, cell in tried:
        check(cell)
        assert cell.data.validation is not None
    scenario = load_scenario(SCENARIOS / f"{name}.toml")
    assert {cell.seed for _, cell in asked(SCENARIOS / f"{name}.toml", ())} == set(scenario.seeds)


def test_a_cell_that_opacus_has_not_is_refused() -> None:
    (point,) = load_scenario(
        SCENARIOS / "sentences.toml", ["federation.silos=1", "privacy.epsilon=3", "seeds=1"]
    ).points
    check(point.cell)
    for words in ("federation.sampling=fixed", "privacy.relation=replace-one"):
        few = ["federation.silos=1", "privacy.epsilon=3", "seeds=1", words]
        with pytest.raises(InputError, match="opacus_cells"):
            check(load_scenario(SCENARIOS / "sentences.toml", few).points[0].cell)


def test_its_network_begins_where_fedprivs_does() -> None:
    few = ["federation.silos=1", "privacy.epsilon=3", "seeds=1"]
    task = task_of_cell(load_scenario(SCENARIOS / "sentences.toml", few).points[0].cell)
    module, records = module_of(task), task.test.features[:5]
    point = task.objective.initial()
    assert torch.equal(torch.cat([each.detach().flatten() for each in module.parameters()]), point)
    assert torch.allclose(module(records), task.objective.outputs(point, task.test)[:5], atol=1e-5)  # type: ignore[attr-defined]


def test_the_lead_is_welchs_and_silos_are_beside_the_one_data_set() -> None:
    ours, theirs = [90.1, 90.4, 90.9], [90.0, 89.0, 89.9]
    mean, half = ahead(ours, theirs)
    found = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    assert (mean - half, mean + half) == pytest.approx((found.low, found.high))
    cells = [
        {"point": {"federation.silos": silos, "privacy.epsilon": 1.0}, "test_accuracy": value / 100}
        for silos in (1, 20) for value in ours
    ]  # fmt: skip
    peers = [
        {"point": {"federation.silos": 1, "privacy.epsilon": 1.0}, "test_accuracy": value / 100}
        for value in theirs
    ]
    rows = list(table(cells, peers))
    assert len(rows) == 4
    assert rows[2].startswith("| silos 1, epsilon 1.0 | 90.47 ± 1.00 (3) | 89.63 ± ")
    assert rows[3].endswith(f"{mean:+.2f} ± {half:.2f} |")
