"""Whatever is wrong with a scenario is one line with the key, the value and what would be accepted."""

import re
from pathlib import Path
from typing import Any

import pytest

from fedpriv.core.errors import InputError
from fedpriv.plan.task import check_record_count
from fedpriv.scenario.load import load_scenario, parse_scenario, read_toml, resolve_cell
from fedpriv.scenario.published import parse_assignment
from tests.conftest import small_tree

BAD_KEYS: list[tuple[dict[str, Any], list[str]]] = [
    ({"federation__silo": 3}, ["federation.silo: unknown key", "did you mean 'silos'?"]),
    ({"privcy__rho": 3.0}, ["privcy: unknown key", "did you mean 'privacy'?"]),
    (
        {"run__zzz": 1},
        [
            "run.zzz: unknown key",
            "known keys here: dtype, arithmetic, word, passes, device, evaluations, metrics, "
            "per_silo, goldstein_radius, noise",
        ],
    ),
    # keys of optional sections had suggestions from the section around them, such as 'shards'
    ({"data__scale": {"shar": 0.1}}, ["data.scale.shar: unknown key; did you mean 'share'?"]),
    ({"evaluation": {"record": 3}}, ["evaluation.record: unknown key; did you mean 'records'?"]),
    ({"data__scale": {}}, ["data.scale.share: this key is missing (of the privacy budget"]),
    ({"algorithm__diametre": 0.1}, ["algorithm.diametre: unknown key", "did you mean 'diameter'?"]),
    ({"federation__silos": "3"}, ["federation.silos = '3': expected a whole number"]),
    ({"federation__silos": 3.0}, ["federation.silos = 3.0: expected a whole number"]),
    ({"federation__silos": True}, ["federation.silos = True: expected a whole number"]),
    ({"federation__silos": 0}, ["federation.silos = 0: expected a number of at least 1"]),
    ({"federation__silos": 2**31}, ["federation.silos = 2147483648: expected a number of at most 1e+07"]),
    *[
        (
            {"model": {"name": "softmax-regression", "feature_norm": norm}},
            [f"model.feature_norm = {norm}: expected a number of at most 1e+12"],
        )
        for norm in (1e308, 1e300, 1e154)  # whose squares ended in an OverflowError
    ],
    ({"federation": [1]}, ["federation = [1]: expected a table of keys"]),
    ({"data__name": 5}, ['data.name = 5: expected a text in quotes, such as "mnist"']),
    ({"data__partition": "sorted"}, ["data.partition = 'sorted': expected 'iid'"]),
    ({"model__name": "resnet"}, ["model.name = 'resnet': known models are 'softmax-regression'"]),
    ({"run__dtype": "half"}, ["run.dtype = 'half': expected 'float32' or 'float64'"]),
    ({"privacy__rho": 0.0}, ["privacy.rho = 0.0: expected a number above 0"]),
    ({"privacy__rho": -4.0}, ["privacy.rho = -4.0: expected a number above 0"]),
    ({"privacy__rho": "four"}, ["privacy.rho = 'four': expected a number"]),
    ({"privacy__rho": float("inf")}, ["privacy.rho = inf: expected a finite number"]),
    ({"privacy__rho": float("nan")}, ["privacy.rho = nan: expected"]),
    ({"privacy__rho": []}, ["privacy.rho = []: expected a number"]),  # was 0.0, which nobody wrote
    # was "the key is algorithm.step", which this algorithm does not have
    (
        {"algorithm": {"name": "noisy-newton", "trust": "untrusted", "lr": 0.1}},
        ["algorithm.lr: unknown key; known keys here: name, trust, clip"],
    ),
    ({"algorithm__lr": 0.1}, ["algorithm.lr: unknown key; the key is algorithm.step"]),
    ({"privacy__delta": 1.0}, ["privacy.delta = 1.0: expected a number below 1"]),
    (
        {"privacy__relation": None},
        ["privacy.relation: this key is missing", "which data sets are neighbours"],
    ),
    ({"privacy__relation": "add"}, ["privacy.relation = 'add': expected 'replace-one' or 'zero-out'"]),
    ({"privacy__mu": 1.0}, ["privacy: needs exactly one of mu, rho, zcdp and epsilon; given: mu, rho"]),
    ({"privacy__rho": None}, ["privacy: needs exactly one of mu, rho, zcdp and epsilon; given: none"]),
    ({"privacy__mode": "none"}, ['privacy: mode = "none" means no noise, so rho cannot be given with it']),
    (
        {"federation__samples": 48, "federation__batch": 1},
        ["rounds = 8 do not read the samples once", "it takes 16"],
    ),
    (
        {"federation__samples": 12, "federation__batch": 1, "federation__epochs": 2},
        ["rounds, samples and batch together say how many passes there are: leave epochs out"],
    ),
    (
        {"federation__samples": 24, "federation__batch": 1, "federation__size_skew": 1.0},
        ["size_skew shares samples out over rounds: give both, and no batch"],
    ),
    ({"federation__samples": 23}, ["samples = 23 are too few for one pass: at least 24 are needed"]),
    ({"federation__rounds": None}, ["federation: needs rounds, or samples, or both"]),
    ({"federation__epochs": 3}, ["federation: rounds = 8 must be a multiple of epochs = 3"]),
    ({"federation__size_skew": 1.0}, ["size_skew shares samples out over rounds: give both"]),
    ({"data__partition": "dirichlet"}, ['concentration is needed for partition = "dirichlet", and only there']),
    ({"data__shards": 2}, ['shards is needed for partition = "shards", and only there']),
    (
        {"federation__rounds": None, "federation__samples": 2},
        ["samples = 2 are too few for one pass: at least 3 are needed"],
    ),
    ({"algorithm__name": "fednova"}, ["algorithm.name = 'fednova': known algorithms are", "'dp-mu2-fl'"]),
    ({"algorithm__trust": "half"}, ["algorithm.trust = 'half': accepted are 'untrusted', 'trusted'"]),
    ({"algorithm__diameter": 0.0}, ["algorithm.diameter = 0.0: expected a number above 0"]),
    ({"algorithm__diameter": None}, ["algorithm.diameter: this key is missing"]),
    ({"name": "Two Words"}, ["name = 'Two Words': expected a text of the form"]),
    ({"seed": -1}, ["seed = -1: expected a whole number of at least 0"]),
    ({"seed": "one"}, ["seed = 'one': expected a whole number of at least 0"]),
]


def complaint(tree: dict[str, Any], overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(InputError) as caught:
        parse_scenario(tree, "file.toml", overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(("change", "parts"), BAD_KEYS, ids=lambda value: str(value)[:40])
def test_an_invalid_scenario_key_is_reported_with_its_value_and_the_accepted_values(
    change: dict[str, Any], parts: list[str]
) -> None:
    line = complaint(small_tree(**change))
    for part in parts:
        assert part in line


def test_an_error_line_names_the_file_and_the_number_of_other_findings() -> None:
    line = complaint(small_tree(federation__silos=0, federation__batch=0, privacy__delta=2.0))
    assert line.startswith("file.toml: federation.silos = 0: ")
    assert line.endswith("(and 2 more)")


@pytest.mark.parametrize("text", [f"seed = {'9' * 5000}", f"seed = {'[' * 5000}"], ids=["digits", "brackets"])
def test_a_toml_file_that_overflows_the_parser_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"file\.toml: not valid TOML: "):
        read_toml(path)
    assert parse_assignment(text.replace(" ", ""), "--set") == ("seed", text.removeprefix("seed = "))


@pytest.mark.parametrize("rest", ["privacy.rho=1", "[privacy]", "value.x = 1"])
def test_an_assignment_that_goes_on_behind_a_line_break_is_one_text(rest: str) -> None:
    """Before: further lines were parsed as keys of their own, and dropped in silence."""
    assert parse_assignment(f"federation.silos=10\n{rest}") == ("federation.silos", f"10\n{rest}")
    assert parse_assignment("federation.batches=[10,\n20]\n") == ("federation.batches", [10, 20])
    with pytest.raises(InputError, match=r"federation\.silos = '10\\n"):
        parse_scenario(small_tree(), "file.toml", [f"federation.silos=10\n{rest}"])


def test_a_privacy_target_beyond_floating_point_is_refused() -> None:
    for wrong in (10**400, True):
        assert "privacy.mu" in complaint(small_tree(privacy__mu=[wrong, 1]))


@pytest.mark.parametrize(
    ("section", "wrong", "other"), [("privacy", "privcy", ""), ("federation", "federaton", " (and 1 more)")]
)
def test_a_misspelt_section_is_reported_before_the_keys_that_are_missing_as_a_result(
    section: str, wrong: str, other: str
) -> None:
    tree = small_tree()
    tree[wrong] = tree.pop(section)
    if other:
        tree["run"] = {"dtype": "half"}
    line = complaint(tree)
    assert line == f"file.toml: {wrong}: unknown key; did you mean {section!r}?{other}"


@pytest.mark.parametrize("section", ["paper", "table"])
def test_an_error_in_a_table_layout_names_the_section_as_the_file_does(section: str) -> None:
    tree = {**small_tree(), "sweep": {"federation.silos": [1, 2]}}
    line = complaint({**tree, section: {"rows": "federation.silos"}})
    assert line == f"file.toml: {section}.columns: this key is missing"
    line = complaint({**tree, section: {"rows": "federation.silos", "columns": "privacy.mu"}})
    assert line.startswith(f"file.toml: {section}.columns = 'privacy.mu': expected a swept key")


@pytest.mark.parametrize("setting", [{"clip": -1.0}, {"clip": 0.0}, {"step": -0.5}, {"step": float("nan")}])
def test_a_clip_or_a_step_that_is_not_positive_is_refused(setting: dict[str, float]) -> None:
    ((key, value),) = setting.items()
    line = complaint(small_tree(**{f"algorithm__{key}": value}))
    assert f"algorithm.{key} = {value!r}: expected" in line


@pytest.mark.parametrize(
    ("sweep", "part"),
    [
        (5, "sweep = 5: expected a table of keys and lists of values"),
        ({"federation.silos": 3}, 'sweep."federation.silos" = 3: expected a list of at least one value'),
        ({"federation.silos": []}, 'sweep."federation.silos" = []: expected a list of at least one value'),
        ({"federation.silos": [1, "two"]}, "federation.silos = 'two': expected a whole number"),
        ({"federation.silo": [1, 2]}, "federation.silo: unknown key; did you mean 'silos'?"),
        ({"name.part": [1]}, "name.part: name is a value, not a table of keys"),
        ({"seeds": 0}, "seeds = 0: expected how many (such as 5) or a list of non-negative numbers"),
        ({"seeds": []}, "seeds = []: expected how many"),
        ({"seeds": [1, -2]}, "seeds = [1, -2]: expected how many"),
        ({"seeds": 1.5}, "seeds = 1.5: expected how many"),
        ({"seeds": True}, "seeds = True: expected how many"),
    ],
)
def test_a_bad_sweep_is_refused(sweep: object, part: str) -> None:
    assert part in complaint({**small_tree(), "sweep": sweep})


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"test_loss": [[1.0, 2.0]]}, "paper.test_loss: expected 2 rows of 3 values"),
        ({"test_loss": [[1.0, 2.0, 3.0], [1.0, 2.0]]}, "paper.test_loss: expected 2 rows of 3 values"),
        ({"test_accuracy": [[1.0]]}, "paper.test_accuracy: expected 2 rows of 3 values"),
        (
            {"rows": "privacy.mu"},
            "paper.rows = 'privacy.mu': expected a swept key: privacy.rho, federation.silos",
        ),
        ({"colums": "x"}, "paper.colums: unknown key; did you mean 'columns'?"),
    ],
)
def test_a_table_of_published_values_that_does_not_match_its_sweep_is_refused(
    change: dict[str, Any], part: str
) -> None:
    sweep = {"privacy.rho": [4.0, 8.0], "federation.silos": [1, 2, 3]}
    paper = {"rows": "privacy.rho", "columns": "federation.silos", **change}
    assert part in complaint({**small_tree(), "sweep": sweep, "paper": paper})


@pytest.mark.parametrize("assignment", ["federation.silos", "=5", ""])
def test_an_override_needs_a_key_and_a_value(assignment: str) -> None:
    line = complaint(small_tree(), (assignment,))
    assert line.startswith(f"--set {assignment!r}: expected KEY=VALUE")


def test_an_override_of_a_key_below_a_plain_value_is_refused() -> None:
    assert "name.part: name is a value, not a table" in complaint(small_tree(), ("name.part=1",))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "no such file, and no scenario of that name is shipped; `fedpriv list scenarios`"),
        (b"name = [unclosed", "not valid TOML"),
        (b"\xff\xfe\x00", "cannot be read as a text file"),
    ],
)
def test_a_file_that_is_no_scenario_is_refused(tmp_path: Path, content: bytes | None, part: str) -> None:
    path = tmp_path / "scenario.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_scenario(path)
    assert str(caught.value).startswith(f"{path}: {part}")
    assert "\n" not in str(caught.value)


def test_a_seeds_key_outside_the_sweep_section_is_refused() -> None:
    with pytest.raises(InputError, match=r"test: seeds = 2: this key stands in \[sweep\]"):
        parse_scenario({**small_tree(), "seeds": 2}, "test")


def test_a_folder_is_refused_as_a_scenario(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file, and no scenario of that name is shipped"):
        load_scenario(tmp_path)


def test_a_run_that_needs_more_records_than_exist_is_refused_with_the_counts() -> None:
    with pytest.raises(InputError) as caught:
        check_record_count(resolve_cell(small_tree(federation__silos=100, federation__rounds=61), "test"))
    line = str(caught.value)
    assert "one pass is 61 batches of 100 records of all silos, 61 * 100 = 6100" in line
    assert "synthetic has 6000 training records: enough for 60 batches of 100, or 61 of 98" in line
    check_record_count(
        resolve_cell(small_tree(federation__silos=100, federation__rounds=60), "test")
    )  # exactly all


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({}, ["seed=[1, 2]"]),
        ({"sweep": {"seed": [1, 2]}}, []),
        ({"sweep": {"seeds": 2}}, ["seed=7"]),
        ({"sweep": {"algorithm.clip": [1.0, 2.0]},
          "where": [{"when": {"algorithm.clip": 1.0}, "set": {"seed": 9}}]}, []),
    ],
)  # fmt: skip
def test_a_seed_beside_the_seeds_of_a_sweep_is_refused(changes: dict[str, Any], overrides: list[str]) -> None:
    """Before: it was ignored, and the cells of "seed 1" and "seed 2" were the same runs."""
    with pytest.raises(InputError, match="seed: a sweep has `seeds`, a count or a list"):
        parse_scenario({**small_tree(), **changes}, "test", overrides)


def test_a_number_of_seeds_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(InputError, match=r"seeds = 10+: expected how many"):
        parse_scenario({**small_tree(), "sweep": {"seeds": 10**20}}, "test")


@pytest.mark.parametrize("assignment", ["label.x=nan", "seed=[nan]", "label.x=[1.0, inf]", "label={x=nan}"])
def test_overrides_that_are_not_finite_numbers_are_refused(assignment: str, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(
        'name = "small"\n[data]\nname = "synthetic"\n[federation]\nsilos = 2\nrounds = 2\n[algorithm]\n'
        'name = "dp-sgd"\ntrust = "trusted"\nclip = 1.0\nstep = 0.1\n[privacy]\nrelation = "zero-out"\nmu = 1.0\n'
    )
    with pytest.raises(InputError, match="have to be finite"):
        load_scenario(path, [assignment])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model__name": "ridge-statistics", "algorithm__step": -1.0},
            "algorithm.step = -1.0: expected 'paper' or",
        ),
        (
            {"model__name": "tests.loss.zoo:half_frozen", "model__bogus": 3},
            "model.bogus: unknown key; known keys here",
        ),
    ],
)
def test_a_key_that_is_read_by_another_check_is_named_with_its_section(
    change: dict[str, Any], message: str
) -> None:
    """Was: "step = -1.0", and "bogus: unknown key" beside the names of all sections."""
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        resolve_cell(small_tree(**change), "test")
