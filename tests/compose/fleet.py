"""A fleet of containers under Docker Compose, v2 or v1, driven from the host as a person would."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HEADWATER = [sys.executable, "-m", "headwater.cli.main"]
MODEL = "tiny-stable-diffusion-3-medium"
SERVICES = ("redis", "router", "reward", "rollout", "trainer", "dashboard")


def compose_command() -> list[str]:
    """`docker compose` where there is one, else `docker-compose`; $COMPOSE says another."""
    if command := os.environ.get("COMPOSE"):
        return command.split()
    v2 = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False, timeout=30)
    return ["docker", "compose"] if v2.returncode == 0 else ["docker-compose"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Fleet:
    """One project of compose with secrets and ports of its own."""

    def __init__(self, folder: Path) -> None:
        self.project = f"headwater-test-{os.getpid()}"
        self.secrets = folder / "secrets"
        self.ports = {name: free_port() for name in ("ROUTER_PORT", "TRAINER_PORT", "DASHBOARD_PORT")}
        self.environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": self.project,
            "SECRETS_DIR": str(self.secrets),
            "MODELS_DIR": str(folder / "models"),
            "MODEL": MODEL,
            **{name: str(port) for name, port in self.ports.items()},
        }
        self.models = folder / "models"
        files = os.environ.get("COMPOSE_FILES", "deploy/compose.yaml").split()
        self._compose = [*compose_command(), *(word for file in files for word in ("-f", file))]

    def prepare(self) -> None:
        """Certificates, tokens and a model that is quick to train."""
        self.call([sys.executable, "-m", "headwater.diffusion.tiny_sd3", str(self.models / MODEL)])
        self.call(["chmod", "-R", "a+rX", str(self.models)])  # containers read it as another user
        self.call([*HEADWATER, "certs", str(self.secrets), "--mode", "0644"])
        password = self.secrets / "redis_password"
        password.write_text(secrets.token_urlsafe(32))
        password.chmod(0o644)

    def call(self, command: list[str], timeout_s: float = 120.0, env: dict[str, str] | None = None) -> str:
        """Run to the end; its standard output. A failure is an assertion with everything it said."""
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT,
            env=env or self.environment,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def compose(self, *arguments: str, timeout_s: float = 240.0) -> str:
        return self.call([*self._compose, *arguments], timeout_s)

    def containers(self, service: str = "") -> list[str]:
        """Ids of the running or restarting containers."""
        labels = [f"label=com.docker.compose.project={self.project}"]
        labels += [f"label=com.docker.compose.service={service}"] if service else []
        return self.call(["docker", "ps", "-q", *(f"--filter={label}" for label in labels)]).split()

    def health(self, container: str) -> str:
        state = json.loads(self.call(["docker", "inspect", "-f", "{{json .State}}", container]))
        return str(state.get("Health", {}).get("Status", state["Status"]))

    def wait_healthy(self, service: str, count: int = 1, timeout_s: float = 240.0) -> None:
        """Until exactly `count` containers of the service run and say that they are healthy."""
        deadline = time.monotonic() + timeout_s
        while True:
            states = [self.health(container) for container in self.containers(service)]
            if states == ["healthy"] * count:
                return
            late = time.monotonic() > deadline
            assert not late, f"{service} is {states}, not {count} times healthy:\n{self.logs(service)}"
            time.sleep(1.0)

    def logs(self, service: str) -> str:
        return self.compose("logs", "--no-color", "--tail", "60", service)

    def scale(self, service: str, count: int) -> None:
        self.compose("up", "-d", "--no-deps", "--no-recreate", "--scale", f"{service}={count}", service)

    def kill_main_process(self, container: str) -> int:
        """`kill -9` the service itself, as the kernel would; returns how often it had been restarted before."""
        restarts = int(self.call(["docker", "inspect", "-f", "{{.RestartCount}}", container]))
        self.call(["docker", "exec", container, "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)"])
        return restarts

    def wait_restarted(self, container: str, restarts_before: int, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while int(self.call(["docker", "inspect", "-f", "{{.RestartCount}}", container])) <= restarts_before:
            assert time.monotonic() < deadline, f"{container} was not restarted"
            time.sleep(0.5)

    def client_environment(self, token: str = "admin") -> dict[str, str]:
        """What a person exports on the host."""
        return {
            **os.environ,
            "HEADWATER_ROUTER": f"127.0.0.1:{self.ports['ROUTER_PORT']}",
            "HEADWATER_TRAINER": f"127.0.0.1:{self.ports['TRAINER_PORT']}",
            "HEADWATER_TLS_CA": str(self.secrets / "ca.crt"),
            "HEADWATER_TLS_CERT": str(self.secrets / "client.crt"),
            "HEADWATER_TLS_KEY": str(self.secrets / "client.key"),
            "HEADWATER_TOKEN_FILE": str(self.secrets / f"{token}.token"),
        }

    def headwater(self, *arguments: str, token: str = "admin", timeout_s: float = 120.0) -> dict[str, Any]:
        """A command on the host with --json; what its last line says."""
        out = self.call([*HEADWATER, *arguments, "--json"], timeout_s, self.client_environment(token))
        return dict(json.loads(out.splitlines()[-1]))

    def leftovers(self) -> list[str]:
        """Containers, networks and volumes of the project, stopped ones included."""
        label = f"--filter=label=com.docker.compose.project={self.project}"
        listings = (["ps", "-aq"], ["network", "ls", "-q"], ["volume", "ls", "-q"])
        return [name for listing in listings for name in self.call(["docker", *listing, label]).split()]
