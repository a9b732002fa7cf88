"""What a wheel installs and what Flower bundles: one top-level package, and all that it needs."""

import email
import importlib.util
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.cli.build import build_fab_from_disk

ROOT = Path(__file__).resolve().parents[1]


def names_of_files() -> list[str]:
    """The tracked files as they are now."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return [name for name in names if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout") / "fedpriv"
    for name in names_of_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(out), str(checkout)],
        check=True,
    )  # fmt: skip
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path).namelist()


@pytest.mark.slow
def test_a_wheel_installs_one_package_and_its_files(wheel: list[str]) -> None:
    assert {name.partition("/")[0].partition("-")[0] for name in wheel} == {"fedpriv"}
    for name in (
        "fedpriv/server/app.py",
        "fedpriv/silo/guard.py",
        "fedpriv/scenario/shipped/quickstart.toml",
        "fedpriv/addons/begin/starter/scenario.toml",
        "fedpriv/show/page.html",
        "fedpriv/py.typed",
    ):
        assert name in wheel
    assert any(name.endswith("LICENSE") for name in wheel)


def project() -> dict[str, Any]:
    tree: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return tree


def test_the_licence_version_and_authors_match_the_citation_file() -> None:
    """A table `license = { file }` ends with setuptools of February 2027, and put 200 lines into a field."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (project()["license"], project()["license-files"]) == (cited["license"], ["LICENSE"])
    assert project()["authors"] == cited["authors"]
    assert not [text for text in project()["classifiers"] if text.startswith("License ::")]
    assert project()["version"] == cited["version"]


def test_every_declared_python_version_is_tested_in_ci() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    everything = {
        step["with"]["python-version"]
        for step in jobs["everything"]["steps"]
        if "setup-python" in str(step.get("uses"))
    }
    tested = everything | set(jobs["pythons"]["strategy"]["matrix"]["python"])
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project()["classifiers"]))
    assert tested == set(named) == {"3.11", "3.12", "3.13", "3.14"}
    assert project()["requires-python"] == f">={min(named, key=lambda text: int(text.split('.')[1]))}"


def test_ci_workflows_run_existing_targets_including_game_days_and_containers() -> None:
    """Was: game day and end-to-end tests in no CI.  A job of a target that is gone is red when nobody looks."""
    workflows = [yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")]
    commands = [
        step["run"]
        for flow in workflows
        for job in flow["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {".venv/.ready", *re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE)}
    made = {target for command in commands for target in re.findall(r"\bmake (?:--\S+ )*([\w./-]+)", command)}
    assert made <= targets
    assert made >= {"gameday", "e2e", "e2e-tools", "test-long"}
    for module in re.findall(r"python -m (tests\.[\w.]+)", " ".join(commands)):
        assert importlib.util.find_spec(module)
    for path in re.findall(r"tests/\S+\.py", " ".join(commands)):
        assert (ROOT / path).is_file()
    release = makefile.partition("\nrelease-check:")[2].partition("\n\n")[0]
    assert "gameday MINUTES=10" in release
    assert "$(MAKE) e2e" in release


def test_the_publishing_workflow_uses_no_stored_secret() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text(encoding="utf-8"))
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == {"name": "pypi"}
    assert "secrets" not in str(workflow)
    assert "with" not in publish["steps"][-1]


URL = "https://example.org/group/fedpriv"


def test_a_packages_readme_has_no_relative_link() -> None:
    """An index shows README alone, where every relative link is dead."""
    package = runpy.run_path(str(ROOT / "deploy" / "package.py"))
    text = package["absolute_links"]((ROOT / "README.md").read_text(encoding="utf-8"), URL, "1.2")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    inside = [target for target in targets if target.startswith(URL)]
    assert len(inside) >= 10
    for target in inside:
        kind, version, path = target.removeprefix(f"{URL}/").split("/", 2)
        assert (ROOT / path.partition("#")[0]).exists(), path
        assert (kind, version) == ("raw" if path.endswith(".svg") else "blob", "v1.2")


@pytest.mark.parametrize("url", ["", "git@github.com:a/b", "http://a/b", "https://a/b c", 'https://a/b"\nx = "'])
def test_a_package_without_a_valid_repository_url_is_not_built(url: str, tmp_path: Path) -> None:
    package = runpy.run_path(str(ROOT / "deploy" / "package.py"))
    with pytest.raises(ValueError, match="expected the URL of the repository"):
        package["prepare"](url, tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


@pytest.mark.slow
def test_a_built_wheel_has_licence_author_and_source_metadata(tmp_path: Path) -> None:
    package = runpy.run_path(str(ROOT / "deploy" / "package.py"))
    package["prepare"](URL, tmp_path / "draft")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(tmp_path), str(tmp_path / "draft")],
        check=True,
    )  # fmt: skip
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(files.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The fedpriv authors"
    assert f"Source, {URL}" in metadata.get_all("Project-URL", [])
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "](docs/" not in str(metadata.get_payload())


def test_pyproject_lists_every_folder_with_modules_as_a_package() -> None:
    """A package that pyproject.toml forgets would be missing from wheels alone."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "fedpriv").rglob("__init__.py")}
    assert set(setuptools["packages"]) == found | {"fedpriv.clients", "fedpriv.server", "fedpriv.scenario.shipped"}


def test_no_file_of_the_repository_is_a_symbolic_link() -> None:
    """Some systems and archives turn links into text files."""
    names = names_of_files()
    assert "pyproject.toml" in names
    assert [name for name in names if (ROOT / name).is_symlink()] == []


def test_no_module_imports_server_or_clients_by_a_bare_name() -> None:
    bare = re.compile(r"^\s*(?:from|import) (?:server|clients)\b", re.MULTILINE)
    folders = ("fedpriv", "server", "clients", "tests", "benchmarks", "examples", "deploy")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in files if bare.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
def test_an_editable_installation_runs_the_top_level_server_and_client_folders(
    checkout: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    dependencies = [path for path in sys.path if path and Path(path).resolve() != ROOT]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--target", str(site), "--editable", str(checkout)],
        check=True,
    )  # fmt: skip
    code = (
        f"import site, sys; site.addsitedir({str(site)!r}); sys.path += {dependencies!r};"
        "import fedpriv.server.app as server, fedpriv.clients.app as clients, fedpriv.core.files as find;"
        "print(server.__file__, clients.__file__, find.list_shipped_scenarios()['quickstart'])"
    )
    said = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split()
    assert said == [
        str(checkout / name) for name in ("server/app.py", "clients/app.py", "scenarios/quickstart.toml")
    ]


@pytest.mark.slow
def test_a_flower_bundle_runs_its_own_copy_of_the_apps(checkout: Path, tmp_path: Path) -> None:
    """The bundle's own copy is imported."""
    (tmp_path / "app.fab").write_bytes(build_fab_from_disk(checkout))
    zipfile.ZipFile(tmp_path / "app.fab").extractall(tmp_path / "app")
    assert not (tmp_path / "app" / "fedpriv" / "server").exists()
    code = (
        "import fedpriv.study.sweep, fedpriv.server.app as server, fedpriv.clients.app as clients;"
        "import fedpriv.core.files as find;"
        "print(server.__file__, clients.__file__, *find.list_shipped_scenarios())"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "app", env={"PYTHONPATH": str(tmp_path / "app")},
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert said[0] == str(tmp_path / "app" / "server" / "app.py")
    assert said[1] == str(tmp_path / "app" / "clients" / "app.py")
    assert "quickstart" in said


def test_the_flower_bundle_names_its_apps_and_no_format_version() -> None:
    """Version 1 of Flower's bundles refuses `license` as an SPDX expression, which Python's packages need."""
    app = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
    assert "fab-format-version" not in app
    assert app["components"] == {
        "serverapp": "fedpriv.cli.flower_run:app",
        "clientapp": "fedpriv.clients.app:app",
    }
