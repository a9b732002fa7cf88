"""Bad input at the command line: one line on stderr, exit code 2, no traceback, nothing left behind."""

import shlex
import subprocess
from pathlib import Path

import pytest

from fedpriv.addons.services import deployment
from fedpriv.core.errors import RunError
from tests.cli.command import FEDPRIV, SMALL, fedpriv, refusal

SETTINGS: dict[str, list[str]] = {
    "federation.silo=3": ["small.toml", "federation.silo: unknown key", "did you mean 'silos'?"],
    "federation.silos=3.5": ["federation.silos = 3.5", "a whole number"],
    "federation.silos=many": ["federation.silos = 'many'", "a whole number"],
    "federation.samples=10": ["federation: samples = 10 are too few for one pass: at least"],
    "federation.rounds=2001": ["2001 * 3 = 6003", "synthetic has 6000"],
    "privacy.rho=0": ["privacy.rho = 0", "a number above 0"],
    "privacy.rho=-1.0": ["privacy.rho = -1.0", "a number above 0"],
    "privacy.relation=any": ["privacy.relation = 'any'", "'replace-one' or 'zero-out'"],
    "data.name=cifar": ["data.name = 'cifar'", "known data sets are", "did you mean 'cifar10'?"],
    "model.name=resnet": ["model.name = 'resnet'", "'softmax-regression'"],
    "algorithm.name=sgd": ["algorithm.name = 'sgd'", "'dp-mu2-fl'"],
    "algorithm.trust=full": ["algorithm.trust = 'full'", "'untrusted', 'trusted'"],
    "algorithm.trst=trusted": ["trst: unknown key; did you mean 'trust'?"],
    "algorithm.zzz=1": ["known keys here: name, trust"],
    "algorithm.momentum=0.9": ["algorithm.momentum: unknown key", "known keys here: ", "diameter", "late_clip"],
    "rho=2": ["rho: unknown key", "did you mean 'privacy.rho'?"],
    "seeds=0": ["seeds = 0", "how many (such as 5)"],
    "federation.silos": ["--set 'federation.silos'", "expected KEY=VALUE"],
}
ARGUMENTS: dict[str, list[str]] = {
    "run absent.toml --out out": ["absent.toml: no such file", "fedpriv list scenarios"],
    "run small.toml --engine warp --out out": ["--engine warp", "vectorized, inprocess, ray"],
    "table .": ["no results.json there", "a folder that `fedpriv run` wrote"],
    "table absent": ["absent: no results.json there"],
    "table . --format html": ["--format html", "markdown, csv, latex"],
    "plot .": ["no results.json there"],
    "plot small.toml": ["small.toml: no results.json there"],
    "silo absent.toml": ["absent.toml: no such file", "policy"],
    "data fetch mnits": ["'mnits'", "did you mean 'mnist'?"],
    "data fetch weather": ["'weather': data that can be fetched are mnist, fashion-mnist"],
    "data fetch synthetic": ["there is nothing to fetch"],
    "privacy convert --epsilon 1e308 --delta 1e-5": ["too large for floating point"],
    "privacy convert --mu 1e308": ["too large"],
    "privacy convert --epsilon -1": ["epsilon = -1.0", "0 or more"],
    "privacy compare --rounds 1 --mu 1 --clip 1e-300": ["clip = 1e-300", "another unit"],
    **{f"run small.toml --out out --set {setting}": parts for setting, parts in SETTINGS.items()},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a scenario that is right."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("line", "parts"), ARGUMENTS.items())
def test_invalid_command_line_arguments_are_refused_in_one_line_and_nothing_is_written(
    folder: Path, line: str, parts: list[str]
) -> None:
    reason = refusal(shlex.split(line))
    assert [part for part in parts if part not in reason] == []
    assert [path.name for path in folder.iterdir()] == ["small.toml"]


@pytest.mark.parametrize(
    ("addition", "parts"),
    [
        ("[sweep]\n'federation.silos' = 3", ['sweep."federation.silos" = 3', "a list of at least one value"]),
        ("[paper]\nrows = 'a'\ncolumns = 'b'", ["paper.rows = 'a'", "expected a swept key"]),
        ("[sweep]\nseeds = -1", ["seeds = -1"]),
        ("[unfinished", ["small.toml: not valid TOML", "(at end of document)"]),
    ],
)
def test_an_invalid_scenario_file_is_refused_in_one_line_and_nothing_is_written(
    folder: Path, addition: str, parts: list[str]
) -> None:
    (folder / "small.toml").write_text(SMALL + addition)
    reason = refusal(["run", "small.toml", "--out", "out"])
    assert [part for part in parts if part not in reason] == []
    assert not (folder / "out").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 99}', "null"])
def test_an_invalid_results_file_is_refused_and_left_unchanged(folder: Path, content: str) -> None:
    (folder / "out").mkdir()
    for path in (folder / "results.json", folder / "out" / "results.json"):
        path.write_text(content)
    assert "results.json: " in refusal(["table", "."])
    refusal(["run", "small.toml", "--out", "out", "--resume"])
    assert (folder / "out" / "results.json").read_text() == content


def test_an_unusable_data_folder_is_refused_before_results_are_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data folder that cannot be made: nobody is asked for a download, and no results are begun."""
    (folder / "file").write_text("")
    monkeypatch.setenv("FEDPRIV_DATA", str(folder / "file"))
    reason = refusal(["run", "small.toml", "--set", "data.name=mnist", "--out", "out"])
    assert "set FEDPRIV_DATA to a usable folder" in reason
    assert not (folder / "out").exists()


def test_a_data_table_given_as_scenario_is_refused_with_the_command_that_writes_one(folder: Path) -> None:
    (folder / "patients.csv").write_text("age,ill\n1,yes\n")
    reason = refusal(["run", "patients.csv"])
    assert "patients.csv: is a table, and no scenario; write one with: fedpriv data inspect patients.csv" in reason


@pytest.mark.parametrize("out", ["small.toml", "small.toml/beneath"])
def test_an_output_path_that_cannot_be_written_is_refused_by_name(folder: Path, out: str) -> None:
    reason = refusal(["run", "small.toml", "--out", out])
    assert f"{out.partition('/')[0]}" in reason
    assert reason.rstrip().endswith("; give another path, which this user may write and read")


def test_a_run_that_fails_has_exit_code_1_and_leaves_incomplete_results(folder: Path) -> None:
    reason = refusal(["run", "small.toml", "--set", "run.device=cuda:77", "--out", "out"], code=1)
    assert "run.device = 'cuda:77' cannot be used here" in reason
    assert '"complete": false' in (folder / "out" / "results.json").read_text()
    assert not (folder / "out" / "table.md").exists()


def test_a_failed_deployment_prints_the_command_that_resumes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RunError("round 4: no reply from silo 2")

    monkeypatch.setattr(deployment, "run_deployment", fails)
    done = fedpriv("run", "small.toml", "--engine", "deployment", cwd=folder)
    *_, command, reason = done.stderr.splitlines()
    assert (done.returncode, reason) == (1, "fedpriv: round 4: no reply from silo 2")
    assert command.strip() == "fedpriv run small.toml --engine deployment --resume --out runs/small"


@pytest.mark.parametrize("line", ["run", "run small.toml --no-such-option", "no-such-command"])
def test_unknown_options_and_commands_exit_with_code_2_without_a_traceback(folder: Path, line: str) -> None:
    done = fedpriv(*line.split(), cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in folder.iterdir()] == ["small.toml"]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--superlink here:8000", "--superlink and --root-certificates are for --engine deployment"),
        ("--engine deployment --superlink here", "--superlink here: expected unix:SOCKET, or HOST:PORT"),
        ("--engine deployment --root-certificates no.pem", "no.pem: expected a file"),
        ("--engine deployment --set run.noise=aggregate", 'run.noise = "aggregate"'),
    ],
)
def test_options_of_a_deployment_are_checked_before_its_journal_is_written(
    folder: Path, options: str, part: str
) -> None:
    assert part in refusal(["run", "small.toml", "--out", "out", *options.split()])
    assert not list(folder.glob("out/deployment/*/journal"))


def test_the_installed_script_prints_the_same_refusal_as_the_python_entry_point(folder: Path) -> None:
    words = ["run", "absent.toml", "--out", "out"]
    done = subprocess.run([FEDPRIV, *words], cwd=folder, capture_output=True, text=True, check=False)
    here = fedpriv(*words, cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (here.returncode, here.stdout, here.stderr)
