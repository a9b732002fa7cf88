"""From TOML to cells: the order of a sweep, overrides, seeds, published values, privacy targets."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.accounting.gaussian import mu_of
from fedpriv.core.errors import InputError
from fedpriv.scenario.load import load_scenario, parse_scenario, resolve_cell
from fedpriv.scenario.published import PublishedValues
from tests.conftest import small_tree

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
PAPER = {
    "rows": "privacy.rho",
    "columns": "federation.silos",
    "test_loss": [[2.1, 2.2, 2.3], [1.1, 1.2, 1.3]],
}


def swept_tree() -> dict[str, Any]:
    sweep = {"privacy.rho": [4.0, 8.0], "federation.silos": [1, 2, 3], "seeds": 2}
    return {**small_tree(), "sweep": sweep, "paper": PAPER}


def test_sweep_points_are_the_product_of_all_axes_with_seeds_varying_fastest() -> None:
    scenario = parse_scenario(swept_tree(), "test")
    found = [
        (point.swept_values["privacy.rho"], point.swept_values["federation.silos"], point.cell.seed)
        for point in scenario.points
    ]
    assert found == [(rho, silos, seed) for rho in (4.0, 8.0) for silos in (1, 2, 3) for seed in (0, 1)]
    for point in scenario.points:
        assert point.cell.privacy.rho == point.swept_values["privacy.rho"]
        assert point.cell.federation.silos == point.swept_values["federation.silos"]


def test_without_a_sweep_there_is_one_cell_with_the_files_seed() -> None:
    scenario = parse_scenario(small_tree(seed=7), "test")
    assert [point.cell.seed for point in scenario.points] == [7]
    assert scenario.axes == {}
    assert scenario.published is None


@pytest.mark.parametrize(
    ("override", "seeds"),
    [
        ("seeds=3", [0, 1, 2]),
        ("seeds=[5, 2, 5]", [5, 2]),
        ("sweep.seeds=1", [0]),
        ("sweep.seeds=[9]", [9]),
    ],
)
def test_seeds_are_given_as_a_count_or_a_list(override: str, seeds: list[int]) -> None:
    assert parse_scenario(swept_tree(), "test", [override]).seeds == seeds


def test_a_refused_key_is_shown_in_one_line_without_control_characters() -> None:
    tree = small_tree()
    tree["algorithm"]["st\nep\x1b[31m"] = 1
    with pytest.raises(InputError, match=r"unknown key") as refused:
        parse_scenario(tree, "mine.toml")
    assert not set("\n\x1b") & set(str(refused.value))


def test_an_override_replaces_a_key_in_every_cell() -> None:
    scenario = parse_scenario(swept_tree(), "test", ["federation.rounds=5", "run.device=cuda:0"])
    assert {point.cell.federation.rounds for point in scenario.points} == {5}
    assert {point.cell.run.device for point in scenario.points} == {"cuda:0"}  # a bare word is a text


@pytest.mark.parametrize(
    ("override", "values"), [("federation.silos=2", [2]), ("federation.silos=[3, 1]", [3, 1])]
)
def test_an_override_of_a_swept_key_narrows_its_axis(override: str, values: list[int]) -> None:
    scenario = parse_scenario(swept_tree(), "test", [override])
    assert scenario.axes == {"privacy.rho": [4.0, 8.0], "federation.silos": values}
    assert [point.cell.federation.silos for point in scenario.points[::2]] == values * 2


def test_published_values_are_found_when_the_sweep_is_narrowed() -> None:
    published = parse_scenario(swept_tree(), "test", ["federation.silos=[3, 2]", "privacy.rho=8.0"]).published
    assert published is not None
    assert published.value("test_loss", {"privacy.rho": 8.0, "federation.silos": 3}) == 1.3
    assert published.value("test_loss", {"privacy.rho": 4.0, "federation.silos": 2}) == 2.2
    assert published.value("test_loss", {"privacy.rho": 4.0, "federation.silos": 7}) is None
    assert published.value("test_accuracy", {"privacy.rho": 4.0, "federation.silos": 2}) is None


def test_published_values_survive_results_json() -> None:
    published = parse_scenario(swept_tree(), "test").published
    assert published is not None
    assert PublishedValues.from_data(published.to_data()) == published


def test_parsing_a_scenario_does_not_change_the_given_tree() -> None:
    tree = swept_tree()
    parse_scenario(tree, "test", ["federation.rounds=5", "federation.silos=2"])
    assert tree == swept_tree()


@pytest.mark.parametrize(
    ("target", "mu"),
    [
        ({"privacy__mu": 1.5}, 1.5),
        ({"privacy__rho": 1.5}, 1.5),
        ({"privacy__zcdp": 8.0}, 4.0),  # zcdp = mu²/2
        ({"privacy__epsilon": 2.0}, mu_of(2.0, 1e-5)),
        ({"privacy__epsilon": 2.0, "privacy__delta": 1e-6}, mu_of(2.0, 1e-6)),
    ],
)
def test_every_kind_of_privacy_target_is_converted_to_mu(target: dict[str, float], mu: float) -> None:
    cell = resolve_cell(small_tree(**{"privacy__rho": None, **target}), "test")
    assert cell.privacy.target_mu == pytest.approx(mu, rel=1e-12)


def test_a_cell_without_privacy_has_no_target_mu() -> None:
    assert resolve_cell(small_tree(privacy__mode="none", privacy__rho=None), "test").privacy.target_mu is None


@given(silos=st.integers(1, 50), batch=st.integers(1, 9), spare=st.integers(0, 400))
def test_the_number_of_rounds_is_the_largest_that_the_samples_fill(silos: int, batch: int, spare: int) -> None:
    samples = silos * batch + spare
    tree = small_tree(federation__silos=silos, federation__batch=batch, federation__rounds=None)
    tree["federation"]["samples"] = samples
    federation = resolve_cell(tree, "test").federation
    used = silos * federation.total_rounds * batch
    assert used <= samples < used + silos * batch


@given(
    silos=st.integers(1, 500),
    rounds=st.integers(1, 10**6),
    seed=st.integers(0, 2**40),
    key=st.sampled_from(["mu", "rho", "zcdp", "epsilon"]),
    value=st.floats(1e-3, 1e3),
    trust=st.sampled_from(["trusted", "untrusted"]),
    clip=st.sampled_from(["lipschitz", 3.0]) | st.floats(1e-6, 1e6),
)
def test_a_cell_survives_a_round_trip_through_its_canonical_form(
    silos: int, rounds: int, seed: int, key: str, value: float, trust: str, clip: float | str
) -> None:
    """What results.json stores, and what engines hand to other processes, is the cell."""
    tree = small_tree(
        seed=seed,
        federation__silos=silos,
        federation__rounds=rounds,
        algorithm__trust=trust,
        algorithm__clip=clip,
        privacy__rho=None,
    )
    tree["privacy"][key] = value
    cell = resolve_cell(tree, "test")
    again = resolve_cell(cell.canonical_data(), "test")
    assert again == cell
    assert again.canonical_data() == cell.canonical_data()
    assert again.algorithm.settings == cell.algorithm.settings


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_scenario_file_loads(path: Path) -> None:
    scenario = load_scenario(path)
    assert scenario.name == path.stem
    assert scenario.points


@pytest.mark.parametrize("name", ["mnist-untrusted", "mnist-trusted"])
def test_the_mnist_paper_scenarios_have_a_published_value_for_every_sweep_point(name: str) -> None:
    scenario = load_scenario(SCENARIOS / f"{name}.toml")
    assert scenario.published is not None
    assert len(scenario.points) == 9 * len(scenario.seeds) == 27
    for point in scenario.points:
        federation = point.cell.federation
        assert federation.silos * federation.total_rounds == 60_000
        for metric in ("test_loss", "test_accuracy"):
            value = scenario.published.value(metric, point.swept_values)
            assert value is not None
            assert math.isfinite(value)


def _ruled(**where: object) -> dict[str, object]:
    tree = small_tree(algorithm__diameter=None)
    return {**tree, "sweep": {"federation.silos": [2, 3], "privacy.rho": [1.0, 4.0]}, "where": [where]}


def test_a_rule_sets_keys_where_its_conditions_hold() -> None:
    tree = _ruled(when={"federation.silos": 3, "privacy.rho": [1.0, 4.0]}, set={"algorithm.diameter": 0.5})
    tree["where"] += [{"when": {"federation.silos": [2]}, "set": {"algorithm.diameter": 0.1}}]  # type: ignore[operator]
    diameters = [point.cell.algorithm.model_extra["diameter"] for point in parse_scenario(tree, "test").points]
    assert diameters == [0.1, 0.1, 0.5, 0.5]
    narrowed = parse_scenario(tree, "test", ["federation.silos=3", "algorithm.diameter=0.25"])
    assert [point.cell.algorithm.model_extra["diameter"] for point in narrowed.points] == [0.25, 0.25]


@pytest.mark.parametrize("override", ["algorithm.diameter=0.25", "algorithm.diameter=[0.25]"])
def test_a_rule_never_sees_the_value_of_an_earlier_rule_that_an_override_replaces(override: str) -> None:
    """Before: the second rule applied where the cell's diameter was 0.25."""
    tree = _ruled(when={}, set={"algorithm.diameter": 0.5})
    tree["where"] += [{"when": {"algorithm.diameter": 0.5}, "set": {"run.evaluations": 2}}]  # type: ignore[operator]
    assert {point.cell.run.evaluations for point in parse_scenario(tree, "test").points} == {2}
    assert {point.cell.run.evaluations for point in parse_scenario(tree, "test", [override]).points} == {4}


@pytest.mark.parametrize(
    ("where", "line"),
    [
        (
            {"when": {"federation.silos": 4}, "set": {}},
            r"number 1.*federation\.silos is never 4; the sweep has 2, 3",
        ),
        ({"when": {}, "set": {"privacy.rho": 2.0}}, r"privacy\.rho is swept and cannot be set by a rule"),
        ({"when": {}}, r"where \(number 1\)\.set: this key is missing"),
    ],
)
def test_an_invalid_where_rule_is_refused(where: dict[str, object], line: str) -> None:
    with pytest.raises(InputError, match=line):
        parse_scenario(_ruled(**where), "test")


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("data.name=fashion-mnist", False),
        ("algorithm.diameter=0.2", False),
        ("algorithm.clip=3.0", False),
        ("federation.rounds=300", False),
        ("data.name=synthetic", True),  # as it stands in the file
        ("privacy.rho=4.0", True),
        ("seeds=1", True),
        ("run.dtype=float32", True),
        ("name=other", True),
    ],
)
def test_published_values_are_withheld_if_an_override_changes_their_settings(override: str, shown: bool) -> None:
    """MNIST's values stood beside other data sets, with a difference worked out."""
    published = parse_scenario(swept_tree(), "test", [override]).published
    assert published is not None
    swept = {"privacy.rho": 4.0, "federation.silos": 1}
    assert published.value("test_loss", swept) == (2.1 if shown else None)
    assert published.tables.table_metrics == ["test_loss"]  # the layout stays
    assert published.withheld_keys == ([] if shown else [override.partition("=")[0]])
    assert PublishedValues.from_data(published.to_data()) == published


def test_published_values_are_withheld_for_unpublished_values_of_another_axis() -> None:
    tree = swept_tree()
    tree["sweep"]["algorithm.diameter"] = [0.1]
    for value, shown in ((0.1, True), (0.3, False)):
        published = parse_scenario(tree, "test", [f"algorithm.diameter={value}"]).published
        assert published is not None
        assert (published.value("test_loss", {"privacy.rho": 4.0, "federation.silos": 1}) is not None) == shown


def test_published_values_are_withheld_if_an_override_undoes_a_rule() -> None:
    """The value of the file itself changed the points at which a rule has another one."""
    rule = {"when": {"federation.silos": [2, 3]}, "set": {"algorithm.diameter": 0.25}}
    tree = {**swept_tree(), "where": [rule]}
    for value, shown in ((tree["algorithm"]["diameter"], False), (0.25, False)):
        published = parse_scenario(tree, "test", [f"algorithm.diameter={value}"]).published
        assert published is not None
        assert (published.value("test_loss", {"privacy.rho": 4.0, "federation.silos": 2}) is not None) == shown
    tree["where"] = [{**rule, "set": {"algorithm.diameter": tree["algorithm"]["diameter"]}}]
    same = parse_scenario(tree, "test", [f"algorithm.diameter={tree['algorithm']['diameter']}"]).published
    assert same is not None
    assert same.withheld_keys == []
    tree |= {"label": {"x": "a"}, "where": [{"when": {"label.x": "b"}, "set": {"algorithm.diameter": 0.25}}]}
    by_condition = parse_scenario(tree, "test", ["label.x=b"]).published
    assert by_condition is not None
    assert by_condition.withheld_keys == ["label.x"]
    by_section = parse_scenario(tree, "test", ['label={x="b"}']).published
    assert by_section is not None
    assert by_section.withheld_keys == ["label"]  # before: none


def test_a_rule_for_one_point_changes_no_other_point() -> None:
    """Before: keys that were set in a section of an earlier rule stayed there for all later points."""
    tree = _ruled(when={}, set={"algorithm": {"name": "dp-mu2-fl", "trust": "untrusted", "diameter": 0.1}})
    tree["where"] += [{"when": {"federation.silos": 2}, "set": {"algorithm.diameter": 0.5}}]  # type: ignore[operator]
    points = parse_scenario(tree, "test").points
    assert [point.cell.algorithm.settings.model_dump()["diameter"] for point in points] == [0.5, 0.5, 0.1, 0.1]
    tree["where"][0]["set"]["label"] = {"a": 1}  # type: ignore[index]
    tree["where"] += [{"when": {"federation.silos": 2}, "set": {"label.b": 2}}]  # type: ignore[operator]
    labels = [point.cell.label for point in parse_scenario(tree, "test").points]
    assert labels == [{"a": 1, "b": 2}] * 2 + [{"a": 1}] * 2


def test_a_point_has_its_swept_values_also_if_their_section_is_overridden() -> None:
    """Before: all points had the diameter of the section, and each was reported under its swept value."""
    tree = {**small_tree(), "sweep": {"algorithm.diameter": [0.125, 0.25]}}
    section = 'algorithm={name="dp-mu2-fl", trust="trusted", diameter=0.5}'
    algorithms = [point.cell.algorithm for point in parse_scenario(tree, "test", [section]).points]
    assert [(algorithm.trust, algorithm.settings.model_dump()["diameter"]) for algorithm in algorithms] == [
        ("trusted", 0.125),
        ("trusted", 0.25),
    ]


def test_swept_values_of_an_override_replace_those_of_a_rule() -> None:
    """Points of an overridden key had the rule's value, each under another name."""
    tree = _ruled(when={"federation.silos": 3}, set={"algorithm.diameter": 0.5})
    scenario = parse_scenario(tree, "test", ["algorithm.diameter=[0.125, 0.25]", "privacy.rho=1.0"])
    swept = [point.swept_values["algorithm.diameter"] for point in scenario.points]
    assert swept == [0.125, 0.25] * 2
    assert [point.cell.algorithm.model_extra["diameter"] for point in scenario.points] == swept


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        (
            {"paper": {**PAPER, "test_loss": [[2.1, 2.2, math.nan], [1.1, 1.2, 1.3]]}},
            r"paper\.test_loss\.0\.2 = nan",
        ),
        (
            {
                "scaling": {
                    "along": "federation.silos",
                    "by": "privacy.rho",
                    "metric": "test_loss",
                    "start": math.inf,
                }
            },
            r"scaling\.start = inf",
        ),
    ],
)
def test_published_values_and_theory_are_finite(sections: dict[str, Any], key: str) -> None:
    """A run with such a section could not write results.json."""
    with pytest.raises(InputError, match=f"{key}: expected a finite number"):
        parse_scenario({**swept_tree(), **sections}, "test")


@pytest.mark.parametrize("by_rule", [False, True])
def test_overriding_the_partition_removes_the_settings_of_the_previous_partition(by_rule: bool) -> None:
    """`--set data.partition=iid` on a Dirichlet scenario asked for another --set that nobody can give."""
    skewed = {"partition": "dirichlet", "concentration": 0.3}
    tree: dict[str, Any] = small_tree()
    if by_rule:
        tree["sweep"] = {"label.silos": ["skewed"]}
        setting = {f"data.{key}": value for key, value in skewed.items()}
        tree["where"] = [{"when": {"label.silos": "skewed"}, "set": setting}]
    else:
        tree["data"] |= skewed
    (point,) = parse_scenario(tree, "test", ["data.partition=iid"]).points
    assert (point.cell.data.partition, point.cell.data.concentration) == ("iid", None)
    (point,) = parse_scenario(tree, "test", ["data.partition=shards", "data.shards=2"]).points
    assert (point.cell.data.partition, point.cell.data.shards) == ("shards", 2)
    with pytest.raises(InputError, match="concentration is needed for partition"):  # given beside it: a mistake
        parse_scenario(tree, "test", ["data.partition=iid", "data.concentration=0.1"])


@pytest.mark.parametrize("is_swept", [False, True])
def test_overriding_the_partition_removes_swept_settings_of_the_previous_partition(is_swept: bool) -> None:
    """A cell was run once for each value of a key that it had lost, as if these were seeds."""
    tree: dict[str, Any] = {**small_tree(), "sweep": {"data.shards": [1, 2]}}
    if is_swept:
        tree["sweep"]["data.partition"] = ["shards"]
    else:
        tree["data"]["partition"] = "shards"
    assert len(parse_scenario(tree, "test").points) == 2
    (point,) = parse_scenario(tree, "test", ["data.partition=iid"]).points
    assert (point.cell.data.partition, point.cell.data.shards) == ("iid", None)
    assert len(parse_scenario(tree, "test", ["data.partition=iid", 'data.partition=["shards"]']).points) == 2


@pytest.mark.parametrize(
    ("section", "value", "override"),
    [("privacy", 3, "privacy.mu=[1.0]"), ("data", 3, 'data.partition=["iid"]')],
)
def test_a_rule_that_replaces_a_section_by_a_value_is_refused(section: str, value: Any, override: str) -> None:
    tree = {**small_tree(), "where": [{"when": {}, "set": {section: value}}]}
    with pytest.raises(InputError, match=f"{section} is a value, not a table of keys"):
        parse_scenario(tree, "test", [override])


def test_a_rule_may_replace_the_data_without_naming_a_partition() -> None:
    tree = {**small_tree(), "where": [{"when": {}, "set": {"data": {"name": "synthetic"}}}]}
    (point,) = parse_scenario(tree, "test", ['data.partition=["iid"]']).points
    assert point.cell.data.partition == "iid"


@pytest.mark.parametrize("labels", [{"label.x": math.nan}, {"label": {"x": math.inf}}])
def test_a_label_that_a_rule_sets_is_finite(labels: dict[str, Any]) -> None:
    """The results of such a run could not be written as JSON."""
    tree = {**small_tree(), "where": [{"when": {"federation.silos": 2}, "set": labels}]}
    with pytest.raises(InputError, match=r"label\.x: swept values and labels have to be finite"):
        parse_scenario(tree, "test")


def test_scaling_is_dropped_if_an_override_removes_its_axis() -> None:
    """`fedpriv run` trained all cells, and then refused to show them."""
    section: dict[str, Any] = {"along": "federation.silos", "by": "privacy.rho", "metric": "test_loss"}
    tree = {**swept_tree(), "scaling": section}
    assert parse_scenario(tree, "test").growth is not None
    assert parse_scenario(tree, "test", ["privacy.mu=1.0"]).growth is None
    tree["scaling"] = {**section, "by": "federation.silos", "smallest": "privacy.rho", "factor": 1.0}
    assert parse_scenario(tree, "test", ["privacy.mu=1.0"]).growth is None


@given(
    silos=st.integers(1, 60),
    rounds_per_epoch=st.integers(1, 40),
    epochs=st.integers(1, 3),
    spare=st.integers(0, 3000),
    skew=st.none() | st.floats(0.05, 50.0),
)
def test_unused_samples_are_too_few_to_enlarge_the_batches(
    silos: int, rounds_per_epoch: int, epochs: int, spare: int, skew: float | None
) -> None:
    """Unequal silos leave fewer samples than a pass has rounds: 15,700 of 60,000 were never read."""
    samples = silos * rounds_per_epoch + spare
    federation = {
        "silos": silos,
        "rounds": rounds_per_epoch * epochs,
        "epochs": epochs,
        "samples": samples,
        "size_skew": skew,
    }
    tree = {**small_tree(), "federation": {key: value for key, value in federation.items() if value is not None}}
    cell = resolve_cell(tree, "test")
    assert min(cell.batch_sizes) >= 1
    assert cell.unread_count == samples - rounds_per_epoch * sum(cell.batch_sizes)
    assert 0 <= cell.unread_count < rounds_per_epoch * (silos if skew is None else 1)
    assert skew is not None or len(set(cell.batch_sizes)) == 1


def test_unequal_silos_use_every_mnist_record() -> None:
    points = load_scenario(SCENARIOS / "mnist-heterogeneous.toml").points
    unequal = [point.cell for point in points if point.cell.federation.size_skew is not None]
    assert len(unequal) == 10
    assert {cell.unread_count for cell in unequal} == {0}
    assert all(max(cell.batch_sizes) > 2 * min(cell.batch_sizes) for cell in unequal)


def swept() -> dict[str, Any]:
    return {
        **small_tree(privacy__rho=None),
        "sweep": {"privacy.rho": [4.0, 8.0], "federation.silos": [3, 5]},
        "paper": {"rows": "privacy.rho", "columns": "federation.silos", "test_loss": [[2.1, 2.2], [2.3, 2.4]]},
    }


def test_a_list_override_of_a_key_that_was_not_swept_adds_a_sweep_axis() -> None:
    scenario = parse_scenario(small_tree(), "test", ["federation.rounds=[4, 8]"])
    assert [point.cell.federation.rounds for point in scenario.points] == [4, 8]
    assert scenario.axes == {"federation.rounds": [4, 8]}


def test_published_values_are_withheld_if_a_new_axis_has_other_values() -> None:
    same = parse_scenario(swept(), "test", ["federation.rounds=[8]"])
    other = parse_scenario(swept(), "test", ["federation.rounds=[8, 4]"])
    assert same.published is not None
    assert same.published.value("test_loss", {"privacy.rho": 4.0, "federation.silos": 5}) == 2.2
    assert other.published is not None
    assert other.published.value("test_loss", {"privacy.rho": 4.0, "federation.silos": 5}) is None
    assert other.published.withheld_keys == ["federation.rounds"]


@pytest.mark.parametrize("override", ["privacy.mu=1.0", "privacy.zcdp=0.5"])
def test_an_override_of_the_privacy_target_replaces_the_target_of_the_file(override: str) -> None:
    (point,) = parse_scenario(small_tree(), "test", [override]).points
    assert point.cell.privacy.target_mu == pytest.approx(1.0)
    assert point.cell.privacy.rho is None


def test_an_override_of_the_privacy_target_replaces_a_swept_target() -> None:
    scenario = parse_scenario(swept(), "test", ["privacy.epsilon=[1.0, 2.0]"])
    assert list(scenario.axes) == ["federation.silos", "privacy.epsilon"]
    assert {point.cell.privacy.rho for point in scenario.points} == {None}
    assert [point.cell.privacy.epsilon for point in scenario.points] == [1.0, 2.0, 1.0, 2.0]
    assert scenario.published is None


@pytest.mark.parametrize("tree", [small_tree(), swept()])
def test_noise_can_be_switched_off(tree: dict[str, Any]) -> None:
    points = parse_scenario(tree, "test", ["privacy.mode=none"]).points
    assert {point.cell.privacy.target_mu for point in points} == {None}


def test_overrides_with_two_privacy_targets_are_refused() -> None:
    with pytest.raises(InputError, match="exactly one of mu, rho, zcdp and epsilon; given: mu, zcdp"):
        parse_scenario(small_tree(), "test", ["privacy.mu=1.0", "privacy.zcdp=1.0"])


def test_a_sweep_value_given_twice_makes_only_one_cell() -> None:
    tree = {**small_tree(), "sweep": {"federation.silos": [3, 3, 5]}}
    assert len(parse_scenario(tree, "test").points) == 2
    assert len(parse_scenario(tree, "test", ["federation.silos=[5, 5]"]).points) == 1


def test_an_empty_list_of_sweep_values_is_refused() -> None:
    with pytest.raises(InputError, match="expected at least one value to sweep"):
        parse_scenario(small_tree(), "test", ["federation.silos=[]"])
