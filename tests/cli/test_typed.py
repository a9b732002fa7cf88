"""What people type for another library's names is answered with the key, and every command has its panel."""

import json
from pathlib import Path

import pytest

from tests.cli import command
from tests.cli.test_cli import write_scenario


def refusal(*arguments: object, cwd: Path) -> str:
    done = command.fedpriv(*arguments, cwd=cwd)
    assert done.returncode == 2, done
    return done.stderr


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("lr=0.1", "the key is algorithm.step"),
        ("algorithm.learning_rate=0.1", "the key is algorithm.step"),
        ("algorithm.max_grad_norm=1.0", "the key is algorithm.clip"),
        ("federation.batch_size=8", "the key is federation.batch"),
        ("privacy.noise_multiplier=1.0", "the key is privacy.epsilon, from which the noise follows"),
        ("privacy.eps=1.0", "the key is privacy.epsilon"),
        ("privacy.relation=add-remove", "'zero-out' is the relation of records that are there or not"),
        ("run.device=gpu", "run.device = 'gpu': no device of torch; a GPU of NVIDIA is \"cuda\""),
    ],
)
def test_parameter_names_of_other_libraries_are_answered_with_the_fedpriv_key(
    tmp_path: Path, assignment: str, words: str
) -> None:
    assert words in refusal("run", write_scenario(tmp_path), "--set", assignment, cwd=tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--epsilon", "2"], "--set privacy.epsilon=2"),
        (["--lr=0.1"], "--set algorithm.step=0.1"),
        (["--gpu"], "--set run.device=cuda"),
        (["--rounds"], "--set federation.rounds=VALUE"),
        (["--trust", "--quiet"], "--set algorithm.trust=VALUE"),
        # Before: `seeds=7`, which is seven seeds, 0 to 6.
        (["--seed", "7"], "--set seeds=[7]"),
        (["--seeds=7"], "--set seeds=7"),
    ],
)
def test_scenario_keys_given_as_options_are_answered_with_their_set_assignment(
    tmp_path: Path, options: list[str], words: str
) -> None:
    text = refusal("run", write_scenario(tmp_path), *options, cwd=tmp_path)
    assert text.rstrip().endswith(words)
    assert text.startswith(f"fedpriv: {options[0].partition('=')[0]}: no option of `fedpriv run`")


def test_options_of_other_commands_are_not_mistaken_for_scenario_keys(tmp_path: Path) -> None:
    done = command.fedpriv("privacy", "convert", "--epsilon", "2", "--delta", "1e-5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_command_has_a_panel_of_the_help(tmp_path: Path) -> None:
    text = command.fedpriv("--help", cwd=tmp_path).stdout
    for panel in ("Begin", "Run and read", "What is protected", "Sites and servers"):
        assert f"─ {panel} ─" in text
    assert "─ Others ─" not in text
    assert "─ Commands ─" not in text
    assert "--show-completion" in text


def test_the_commands_list_show_and_compare_print_json(tmp_path: Path) -> None:
    kinds = json.loads(command.fedpriv("list", "--json", cwd=tmp_path).stdout)
    assert {"scenarios", "algorithms", "mechanisms", "data", "models"} == kinds.keys()
    assert "dp-sgd" in kinds["algorithms"]
    for out in ("a", "b"):
        step = {"a": "seeds=1", "b": "federation.rounds=4"}[out]
        scenario = write_scenario(tmp_path)
        done = command.fedpriv("run", scenario, "--set", step, "--out", out, "--quiet", cwd=tmp_path)
        assert done.stdout == f"{out}\n", done.stderr
    shown = json.loads(command.fedpriv("show", "a", "--json", cwd=tmp_path).stdout)
    stored = json.loads((tmp_path / "a" / "results.json").read_text())
    assert [cell["test_loss"] for cell in shown["cells"]] == [cell["test_loss"] for cell in stored["cells"]]
    assert shown["complete"] is True
    assert shown["privacy"]
    compared = json.loads(command.fedpriv("compare", "a", "b", "--json", cwd=tmp_path).stdout)
    assert any(key == "federation.rounds" for key, *_ in compared["settings"])
    assert compared["rows"]
