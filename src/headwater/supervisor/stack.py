"""All services of one machine: their ports, commands and order."""

import os
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from headwater.errors import InvalidArgument
from headwater.rpc.health import serves
from headwater.rpc.security import PLAIN, Security
from headwater.stream.address import split_password
from headwater.supervisor.checks import check_ports_free, check_redis
from headwater.supervisor.gpus import assign, visible_gpus
from headwater.supervisor.process import ServiceSpec
from headwater.supervisor.supervisor import Supervisor
from headwater.supervisor.valkey import STREAM_DATABASE, valkey_spec

DEFAULT_PORT_BASE = 7400
HOST = "127.0.0.1"


@dataclass(frozen=True)
class StackOptions:
    """What `up` and `quickstart` can choose."""

    model: Path
    engine: str = "sglang"
    rollout_workers: int = 1
    trainer_ranks: int = 1
    redis_url: str | None = field(default=None, repr=False)  # with its password; None: the embedded Valkey
    port_base: int = DEFAULT_PORT_BASE
    rewards: str = "ocr,color_shape,tiny-geneval"
    precision: str = "fp32"
    security: Security = PLAIN  # of every service


@dataclass(frozen=True)
class Ports:
    """Ports of the services, counted from the base."""

    base: int

    @property
    def router(self) -> str:
        """host:port."""
        return f"{HOST}:{self.base}"

    @property
    def reward(self) -> str:
        """host:port."""
        return f"{HOST}:{self.base + 1}"

    @property
    def trainer(self) -> str:
        """host:port."""
        return f"{HOST}:{self.base + 2}"

    @property
    def trainer_store(self) -> int:
        """Port at which the trainer's ranks meet."""
        return self.base + 4

    @property
    def redis(self) -> int:
        """Port of the embedded Valkey."""
        return self.base + 9

    def rollout(self, index: int) -> str:
        """host:port of a worker."""
        return f"{HOST}:{self.base + 10 + index}"


class Stack:
    """The services of one machine; `start` brings them up below a supervisor."""

    def __init__(self, options: StackOptions, run_dir: Path) -> None:
        """Raises `InvalidArgument` for options that cannot be."""
        for name in ("rollout_workers", "trainer_ranks"):
            if getattr(options, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise InvalidArgument(f"{flag} is {getattr(options, name)}; it must be at least 1", field=name)
        if not (options.model / "model_index.json").is_file():
            raise InvalidArgument(
                f"--model {options.model} is not a pipeline folder: it has no model_index.json", field="model"
            )
        self.options = options
        self.run_dir = run_dir
        self.ports = Ports(options.port_base)
        self.embedded_redis = options.redis_url is None
        self.redis_url = options.redis_url or f"redis://{HOST}:{self.ports.redis}/{STREAM_DATABASE}"
        self._trainer_gpus, self._worker_gpus = assign(visible_gpus(), options.trainer_ranks, options.rollout_workers)

    def start(self, supervisor: Supervisor) -> None:
        """Check ports and Redis, start everything, wait until it serves. Raises what `wait_ready` raises."""
        check_ports_free(self._used_ports(), self.options.port_base)
        if self.embedded_redis:
            supervisor.wait_ready([supervisor.start(valkey_spec(self.run_dir / "valkey", self.ports.redis))])
        else:
            check_redis(self.redis_url)
        supervisor.wait_ready([supervisor.start(spec) for spec in (self.router_spec(), self.reward_spec())])
        workers = [self.rollout_spec(index) for index in range(self.options.rollout_workers)]
        supervisor.wait_ready([supervisor.start(spec) for spec in (*workers, self.trainer_spec())])

    def addresses(self) -> dict[str, str]:
        """Address of each service by name."""
        workers = {f"rollout-{i}": self.ports.rollout(i) for i in range(self.options.rollout_workers)}
        ours = {"router": self.ports.router, "reward": self.ports.reward, "trainer": self.ports.trainer}
        return {**ours, **workers, "redis": split_password(self.redis_url)[0]}

    def router_spec(self) -> ServiceSpec:
        """The front door."""
        command = _module("headwater_router", "--bind", self.ports.router, *self.options.security.flags())
        return _spec("router", self.ports.router, command)

    def reward_spec(self) -> ServiceSpec:
        """The reward server."""
        command = _module(
            "headwater_reward", "--bind", self.ports.reward, "--rewards", self.options.rewards,
            *self.options.security.flags(),
        )  # fmt: skip
        return _spec("reward", self.ports.reward, command)

    def rollout_spec(self, index: int) -> ServiceSpec:
        """One rollout worker."""
        name, address = f"rollout-{index}", self.ports.rollout(index)
        command = _module(
            "headwater_rollout", "--bind", address, "--router", self.ports.router, "--reward", self.ports.reward,
            "--model", str(self.options.model), "--engine", self.options.engine, "--precision", self.options.precision,
            *self._redis_flags(), "--blob-root", str(self.run_dir / "blobs"), "--worker-id", name,
            *self.options.security.flags(),
        )  # fmt: skip
        env = {**self._threads(self.options.rollout_workers), **self._worker_gpus[index]}
        return _spec(name, address, command, env, ready_timeout_s=300.0)

    def trainer_spec(self) -> ServiceSpec:
        """The trainer: one process, or ranks below torchrun."""
        ranks = self.options.trainer_ranks
        torchrun = () if ranks == 1 else (
            "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks),
            "--master-addr", HOST, "--master-port", str(self.ports.trainer_store), "-m",
        )  # fmt: skip
        command = _module(
            *torchrun, "headwater_trainer", "--bind", self.ports.trainer, "--router", self.ports.router,
            *self._redis_flags(), "--blob-root", str(self.run_dir / "blobs"),
            "--output-dir", str(self.run_dir / "trainer"), *self.options.security.flags(),
        )  # fmt: skip
        env = {**self._threads(ranks), **self._trainer_gpus}
        return _spec("trainer", self.ports.trainer, command, env, ready_timeout_s=300.0)

    def _redis_flags(self) -> tuple[str, ...]:
        """Where Redis is. A password travels in a file: a command line can be read by every user of the machine."""
        url, password = split_password(self.redis_url)
        if not password:
            return ("--redis", url)
        path = self.run_dir / "redis.password"
        path.touch(mode=0o600)
        path.write_text(password, encoding="utf-8")
        return ("--redis", url, "--redis-password-file", str(path))

    def _threads(self, processes: int) -> dict[str, str]:
        """Rollout and trainer mostly take turns, so that each side may use all cores.

        When they do overlap, threads that spin while they wait (the default of OpenMP) take the cores from those that
        work: on two cores that makes a run several times slower.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = {"OMP_NUM_THREADS": str(max(1, cores // processes)), "OMP_WAIT_POLICY": "PASSIVE"}
        return {name: os.environ.get(name, value) for name, value in wanted.items()}

    def _used_ports(self) -> dict[str, int]:
        base = self.ports.base
        ports = {"router": base, "reward": base + 1, "trainer": base + 2, "trainer ranks": self.ports.trainer_store}
        if self.embedded_redis:
            ports["valkey"] = self.ports.redis
        return {**ports, **{f"rollout-{i}": base + 10 + i for i in range(self.options.rollout_workers)}}


def _module(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", *arguments)


def _spec(
    name: str,
    address: str,
    command: tuple[str, ...],
    env: dict[str, str] | None = None,
    ready_timeout_s: float = 60.0,
) -> ServiceSpec:
    return ServiceSpec(
        name=name,
        command=command,
        address=address,
        ready=partial(serves, address),
        env=env or {},
        ready_timeout_s=ready_timeout_s,
    )
