"""The Kubernetes manifests: the guard is a sidecar of its own user, and the SuperNode mounts nothing of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fedpriv.cli.app import app

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def pod_of(name: str) -> dict[str, Any]:
    (owner,) = [each for each in documents(FOLDER / name) if each["kind"] in ("StatefulSet", "Job")]
    pod: dict[str, Any] = owner["spec"]["template"]["spec"]
    return pod


def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in [*pod.get("initContainers", []), *pod["containers"]]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kubernetes_manifests_conform_to_the_kubernetes_schema(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs pip install 'fedpriv[checks]'")
    for document in documents(path):
        kubernetes_validate.validate(document, "1.31", strict=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kubernetes_containers_are_hardened_and_run_as_different_users(path: Path) -> None:
    pod = pod_of(path.name)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not pod.get("shareProcessNamespace", False)
    for each in containers(pod).values():
        context = each["securityContext"]
        assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in each["resources"]["limits"]
    users = [each["securityContext"]["runAsUser"] for each in containers(pod).values()]
    assert len(set(users)) == len(users)


def test_the_supernode_container_mounts_only_keys_socket_and_a_temporary_folder() -> None:
    """Guarantee: records, policy, ledger and mark are in no volume that the SuperNode's container mounts."""
    pod = pod_of("silo.yaml")
    guard, node = (containers(pod)[name] for name in ("guard", "node"))
    mounted = {each["name"]: each for each in node["volumeMounts"]}
    assert set(mounted) == {"keys", "socket", "node-tmp"}
    assert mounted["socket"]["readOnly"] is True
    own = {each["name"] for each in guard["volumeMounts"]}
    assert own & set(mounted) == {"socket"}
    assert {"records", "ledger", "mark"} <= own
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["ledger"]["persistentVolumeClaim"] != volumes["mark"]["persistentVolumeClaim"]
    assert volumes["records"]["persistentVolumeClaim"]["readOnly"] is True


def test_the_guard_runs_as_a_single_sidecar_with_its_own_health_probe() -> None:
    pod = pod_of("silo.yaml")
    guard = containers(pod)["guard"]
    assert guard in pod["initContainers"]
    assert guard["restartPolicy"] == "Always"
    for name, place in (("guard", "unix:/silo/socket/guard.sock"), ("node", "unix:/tmp/health.sock")):
        assert containers(pod)[name]["livenessProbe"]["exec"]["command"] == ["health.py", place]
    (owner,) = [each for each in documents(FOLDER / "silo.yaml") if each["kind"] == "StatefulSet"]
    assert owner["spec"]["replicas"] == 1
    claims = [each for each in documents(FOLDER / "silo.yaml") if each["kind"] == "PersistentVolumeClaim"]
    assert [each["spec"]["accessModes"] for each in claims] == [["ReadWriteOncePod"]] * 2
    (network,) = [each for each in documents(FOLDER / "silo.yaml") if each["kind"] == "NetworkPolicy"]
    assert (network["spec"]["ingress"], set(network["spec"]["policyTypes"])) == ([], {"Ingress", "Egress"})


def test_commands_of_the_manifests_exist_in_fedpriv_with_their_options() -> None:
    commands = [each["command"] for path in FILES for each in containers(pod_of(path.name)).values()]
    script = (FOLDER.parent / "supernode.sh").read_text(encoding="utf-8")
    assert "exec fedpriv supernode" in script
    for words in commands:
        name = ["supernode"] if words[0] == "supernode.sh" else words[1:3]
        shown = CliRunner().invoke(app, [*name, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        assert all(word.partition("=")[0] in shown.output for word in words if word.startswith("--"))
