"""`flwr run` of the quickstart app in Flower's own simulation: Ray's actors ask the silos' guards."""

from pathlib import Path

import pytest
import torch

from tests.e2e.flwr_command import flwr_run
from tests.flower.quickstart.task import Net, load_centralized_dataset
from tests.flower.quickstart.task import test as evaluate
from tests.flower.silos import APPS, accuracy_of, app_files, guards, ledger_of, run_config


@pytest.mark.deployment
@pytest.mark.parametrize("style", APPS)
def test_flwr_run_of_a_stock_app_trains_through_guards(tmp_path: Path, style: str) -> None:
    torch.manual_seed(0)
    before = evaluate(Net(), load_centralized_dataset())[1]
    app, sites, elsewhere = tmp_path / "app", tmp_path / "sites", tmp_path / "elsewhere"
    for name, text in app_files(run_config(sites), style).items():
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text(text)
    sites.mkdir()
    elsewhere.mkdir()
    with guards(sites, 2):
        said = flwr_run(app, 2, {}, elsewhere)
        ledgers = [ledger_of(sites, silo) for silo in (0, 1)]
    assert accuracy_of(run_config(sites)["model"]) > before + 0.2, said[-3000:]
    for ((run, price, answered),) in ledgers:
        assert (price, answered) == (pytest.approx(2.0), 12)
        assert f"`{run}`" in said  # Flower's run is the ledger's
    assert list(elsewhere.iterdir()) == []
