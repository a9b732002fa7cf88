"""The compose files: what every container may and may not do, read off the files without a Docker daemon."""

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"
INSECURE = ROOT / "docker-compose.insecure.yml"
SILOS = (0, 1, 2)
HOSPITALS = ROOT / "docker-compose.hospitals.yml"
SCRIPT = runpy.run_path(str(ROOT / "deploy" / "silos.py"))
with_silos, of_hospitals = SCRIPT["with_silos"], SCRIPT["of_hospitals"]


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"])


def mounts(service: dict[str, Any]) -> set[str]:
    """What a service is given: paths of the host and names of volumes."""
    return {
        volume["source"] if isinstance(volume, dict) else volume.partition(":")[0] for volume in service["volumes"]
    }


def test_services_are_the_superlink_the_job_and_two_for_each_silo(services: dict[str, Any]) -> None:
    silos = {f"{kind}-{silo}" for kind in ("guard", "node") for silo in SILOS}
    assert set(services) == {"superlink", "job", *silos}


def test_every_service_is_monitored_limited_and_unprivileged(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["healthcheck"] == {"disable": True} if name == "job" else service["healthcheck"]["test"], (
            name
        )
        assert service["restart"] == ("no" if name == "job" else "unless-stopped"), name
        assert {"cpus", "mem_limit", "pids_limit"} <= set(service), name
        if name in ("superlink", "job"):
            assert "FEDPRIV_USER:?" in service["user"], name  # no default, so no root by accident
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["init"], name  # process 1 ignores SIGTERM otherwise
        assert "privileged" not in service, name
        assert "ports" not in service, name


def test_mounts_of_the_host_are_read_only_except_for_results(services: dict[str, Any]) -> None:
    for name, service in services.items():
        for volume in service["volumes"]:
            if isinstance(volume, dict):
                assert volume.get("read_only", False) == (volume["source"] != "./runs"), (name, volume)


@pytest.mark.parametrize("silo", SILOS)
def test_only_the_guard_sees_a_silos_records(services: dict[str, Any], silo: int) -> None:
    guard, node = services[f"guard-{silo}"], services[f"node-{silo}"]
    assert mounts(guard) == {f"./deploy/run/silo-{silo}/guard", f"ledger-{silo}", f"mark-{silo}", f"socket-{silo}"}
    assert guard["network_mode"] == "none"
    assert mounts(node) == {f"./deploy/run/silo-{silo}/node", f"socket-{silo}"}
    assert node["networks"] == [f"silo-{silo}"]
    for name, service in services.items():
        if name not in (f"guard-{silo}", f"node-{silo}"):
            assert not [mount for mount in mounts(service) if f"-{silo}" in mount], name


def test_no_container_mounts_the_signing_key_of_the_authority(services: dict[str, Any]) -> None:
    shared = {"./deploy/run", "./deploy/run/authority", "./deploy", "."}
    for name, service in services.items():
        assert not mounts(service) & shared, name


def test_all_container_networks_are_internal_and_the_job_has_none(services: dict[str, Any]) -> None:
    networks = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["networks"]
    assert all(network == {"internal": True} for network in networks.values())
    assert set(services["superlink"]["networks"]) == set(networks)
    assert services["job"]["network_mode"] == "none"


def test_guards_and_nodes_are_different_users_and_nodes_mount_the_guard_socket_read_only(
    services: dict[str, Any],
) -> None:
    users = [services[f"{kind}-{silo}"]["user"] for kind in ("guard", "node") for silo in SILOS]
    assert len({user.partition(":")[0] for user in users}) == 2 * len(SILOS)
    for silo in SILOS:
        guard, node = services[f"guard-{silo}"], services[f"node-{silo}"]
        assert guard["user"].partition(":")[2] == node["user"].partition(":")[2]  # the socket's group
        assert f"socket-{silo}:/silo/socket:ro" in node["volumes"]
        assert f"socket-{silo}:/silo/socket" in guard["volumes"]


def test_only_the_job_reaches_the_control_api(services: dict[str, Any]) -> None:
    """Would gain: code beside the server's TLS key and the key of its noise."""
    sharing = [name for name, service in services.items() if "control" in mounts(service)]
    assert sharing == ["superlink", "job"]
    for text in (COMPOSE.read_text(encoding="utf-8"), INSECURE.read_text(encoding="utf-8")):
        commands = [line for line in text.splitlines() if "superlink," in line and "command:" in line]
        assert commands
        for line in commands:
            assert "[fedpriv, superlink," in line  # not Flower's own, which serves every API on one port
            assert "--control=/control/control.sock" in line


def test_tls_and_authentication_are_the_default(services: dict[str, Any]) -> None:
    assert "--keys=/keys" in services["superlink"]["command"]
    for silo in SILOS:
        assert services[f"node-{silo}"]["command"] == [
            "supernode.sh",
            "--keys=/keys",
            "--health=/tmp/health.sock",
        ]
        own = ["CMD", "health.py", "unix:/tmp/health.sock"]
        assert services[f"node-{silo}"]["healthcheck"]["test"] == own  # its own health, and not the SuperLink's
    assert "--insecure" not in COMPOSE.read_text(encoding="utf-8")


def test_the_insecure_compose_file_changes_only_commands_and_health_checks() -> None:
    for service in yaml.safe_load(INSECURE.read_text(encoding="utf-8"))["services"].values():
        assert set(service) <= {"command", "healthcheck"}


def test_the_image_disables_flower_telemetry_update_checks_and_runtime_installs() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for variable in (
        "FLWR_TELEMETRY_ENABLED=0",
        "FLWR_DISABLE_UPDATE_CHECK=1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1",
    ):
        assert variable in text


def test_the_docker_build_context_contains_exactly_what_the_image_copies_and_no_key() -> None:
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] == "!"
    }
    copied: set[str] = set()
    for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines():
        if line.startswith("COPY ") and not line.startswith("COPY --from"):
            copied |= {source.rstrip("/") for source in line.split()[1:-1]}
    assert copied == allowed
    assert not [path for path in allowed if path.startswith("deploy/run") or path in ("deploy", ".env")]


@pytest.mark.parametrize("silos", [1, 2, 5])
def test_the_compose_files_can_be_rewritten_for_another_number_of_silos_and_back(silos: int) -> None:
    for path in (COMPOSE, INSECURE):
        text = path.read_text(encoding="utf-8")
        changed = with_silos(text, silos)
        assert len(re.findall(r"^  node-\d+:$", changed, flags=re.MULTILINE)) == silos
        assert with_silos(changed, len(SILOS)) == text
    tree = yaml.safe_load(with_silos(COMPOSE.read_text(encoding="utf-8"), silos))
    numbers = set(range(silos))
    assert {int(name[6:]) for name in tree["services"] if name.startswith("guard-")} == numbers
    assert [tree["services"][f"guard-{silo}"]["user"] for silo in numbers] == [
        f"{20000 + silo}:{30000 + silo}" for silo in numbers
    ]
    assert [tree["services"][f"node-{silo}"]["user"] for silo in numbers] == [
        f"{30000 + silo}:{30000 + silo}" for silo in numbers
    ]
    assert set(tree["services"]["superlink"]["networks"]) == set(tree["networks"]) == {
        f"silo-{silo}" for silo in numbers
    }  # fmt: skip
    volumes = {f"{kind}-{silo}" for kind in ("ledger", "mark", "socket") for silo in numbers}
    assert set(tree["volumes"]) == {"control", *volumes}
    assert [tree["services"][f"node-{silo}"]["environment"]["SILO"] for silo in numbers] == list(map(str, numbers))


def compose_command() -> list[str] | None:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker"):
        found = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        return None if found.returncode else ["docker", "compose"]
    return None


@pytest.mark.skipif(compose_command() is None, reason="needs make e2e-tools: docker compose")
@pytest.mark.parametrize(
    "files",
    [
        ["docker-compose.yml"],
        ["docker-compose.yml", "docker-compose.insecure.yml"],
        ["docker-compose.hospitals.yml"],
    ],
)
def test_docker_compose_accepts_the_files_once_a_user_is_set(files: list[str], tmp_path: Path) -> None:
    for path in (COMPOSE, INSECURE, HOSPITALS):
        shutil.copy(path, tmp_path)
    command = [*(compose_command() or []), *(word for file in files for word in ("-f", file)), "config", "--quiet"]
    environment = {name: value for name, value in os.environ.items() if name != "FEDPRIV_USER"}
    unprepared = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert unprepared.returncode
    assert "run deploy/prepare.sh first" in unprepared.stderr
    prepared = {**environment, "FEDPRIV_USER": "1000:1000"}
    done = subprocess.run(command, cwd=tmp_path, env=prepared, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_hospitals_compose_file_is_generated_for_four_silos() -> None:
    """`deploy/silos.py` writes it from docker-compose.yml; only the defaults of the job differ."""
    text = HOSPITALS.read_text(encoding="utf-8")
    assert text == of_hospitals(COMPOSE.read_text(encoding="utf-8"))
    tree, usual = yaml.safe_load(text), yaml.safe_load(with_silos(COMPOSE.read_text(encoding="utf-8"), 4))
    job, command = tree["services"].pop("job"), usual["services"].pop("job")["command"]
    assert tree == usual
    assert "scenarios/heart-hospitals.toml" in job["command"]
    assert "heart-hospitals" not in command
