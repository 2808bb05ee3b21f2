"""Files of deploy/ without an engine or a cluster: variables, secrets, and command lines that services accept."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headwater_dashboard.__main__ as dashboard
import headwater_reward.config as reward
import headwater_rollout.config as rollout
import headwater_router.config as router
import headwater_trainer.config as trainer
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE_FILES = sorted(DEPLOY.glob("compose*.yaml"))
PARSERS = {
    "router": router.parse_args,
    "reward": reward.parse_args,
    "rollout": rollout.parse_args,
    "trainer": trainer.parse_args,
    "dashboard": dashboard.parse_args,
}


def settings() -> dict[str, str]:
    lines = (DEPLOY / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def compose(path: Path) -> dict[str, Any]:
    values = settings()
    return dict(yaml.safe_load(re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], path.read_text())))


def manifests() -> Iterator[dict[str, Any]]:
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def workloads() -> list[dict[str, Any]]:
    return [item for item in manifests() if item["kind"] in ("Deployment", "StatefulSet")]


def test_there_are_files_to_check():
    assert len(COMPOSE_FILES) == 3
    assert len(workloads()) == 6


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_every_variable_is_in_env_and_no_image_or_port_stands_outside_it(path: Path):
    text = path.read_text()
    assert set(re.findall(r"\$\{(\w+)", text)) <= set(settings())
    assert not re.findall(r"image: (?!\$\{)", text)
    for name, service in yaml.safe_load(text)["services"].items():
        address = "${PUBLISH_ADDRESS}" if name in ("router", "trainer") else "127.0.0.1"  # the others have no TLS
        assert all(port.startswith(address + ":${") for port in service.get("ports", []))


def test_every_variable_of_env_is_used():
    text = "".join(path.read_text() for path in COMPOSE_FILES)
    unused = [name for name in settings() if "${" + name + "}" not in text]
    assert unused == ["COMPOSE_PROJECT_NAME"]


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_services_accept_their_command_lines_in_compose(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "password").write_text("p")
    monkeypatch.setenv("REDIS_PASSWORD_FILE", str(tmp_path / "password"))
    for name, service in compose(path)["services"].items():
        if name in PARSERS and "command" in service:
            PARSERS[name](service["command"])


def test_services_accept_their_command_lines_in_kubernetes():
    for workload in workloads():
        container = workload["spec"]["template"]["spec"]["containers"][0]
        if container["name"] in PARSERS:
            PARSERS[container["name"]](container["args"])


def test_each_container_gets_its_own_key_only_and_redis_its_password():
    base = compose(DEPLOY / "compose.yaml")
    for name, service in base["services"].items():
        sources = [item if isinstance(item, str) else item["source"] for item in service["secrets"]]
        assert set(sources) <= set(base["secrets"])
        assert [source for source in sources if source.endswith(".key")] == ([] if name == "redis" else [f"{name}.key"])
        assert "ca.key" not in sources
        assert ("redis_password" in sources) == (name in ("redis", "rollout", "trainer"))
    for workload in workloads():
        name = workload["metadata"]["name"]
        volumes = workload["spec"]["template"]["spec"]["volumes"]
        keys = [item["key"] for volume in volumes for item in volume.get("secret", {}).get("items", [])]
        assert [key for key in keys if key.endswith(".key")] == ([] if name == "redis" else [f"{name}.key"])


def test_pods_run_as_nobody_special_on_a_read_only_root():
    for workload in workloads():
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_board_asks_for_figures_that_exist():
    root = DEPLOY.parent
    sources = [*(root / "src/headwater").rglob("*.py"), *(root / "services").rglob("*.py")]
    known = {name for path in sources for name in re.findall(r'"(headwater_[a-z_]+)"', path.read_text())}
    files = [DEPLOY / "observability/grafana/dashboards/headwater.json", DEPLOY / "kubernetes/keda.yaml"]
    pattern = r"headwater_(?:router|worker|rollout|reward|trainer)_\w+"
    asked = {name for path in files for name in re.findall(pattern, path.read_text())}
    assert asked
    assert asked <= known
