"""Command line of `--placement ray`. No Ray and no gRPC here: `--help` must be quick."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headwater.stream.address import split_password

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
PLACEMENTS = ("local", "ray")
_PATHS = ("tls_ca", "tls_cert", "tls_key", "token_file", "tokens", "redis_password_file")
_OF_EACH = ("bind", "metrics_bind", "worker_id")  # differ from worker to worker


@dataclass(frozen=True)
class Placement:
    """How many engines are placed, with what, and how each worker is started."""

    ray_address: str
    """host:port of the cluster's head, or "auto": the cluster that this machine is part of."""
    replicas: int = 1
    """Engines, one worker each."""
    cpus_per_engine: float = 1.0
    """Cores that are reserved for an engine; also its number of threads."""
    gpus_per_engine: float = 1.0
    """GPUs that are reserved for an engine; 0: it runs on the CPU."""
    strategy: str = "PACK"
    """Ray's placement strategy."""
    placement_timeout_s: float = 300.0
    """Longest wait for the resources at the start."""
    arguments: tuple[str, ...] = ()
    """Flags that all workers have."""

    def __post_init__(self) -> None:
        if not self.ray_address:
            raise ValueError(
                "--placement ray needs a cluster: start one with `ray start --head`, and give its host:port with "
                "--ray-address or $RAY_ADDRESS (or `--ray-address auto` on one of its machines)"
            )
        if "://" in self.ray_address:
            raise ValueError(
                f"--ray-address {self.ray_address} is a URL; give host:port of the head, on a machine of the cluster"
            )
        if self.replicas < 1:
            raise ValueError(f"--replicas is {self.replicas}; it must be at least 1")
        if not self.placement_timeout_s > 0:
            raise ValueError(f"--placement-timeout-s is {self.placement_timeout_s}; it must be above 0")
        if not (self.cpus_per_engine >= 0 and self.gpus_per_engine >= 0 and self.bundle):
            raise ValueError("--cpus-per-engine and --gpus-per-engine must be 0 or above, and not both 0")
        if self.gpus_per_engine > 1 and self.gpus_per_engine % 1:
            raise ValueError(f"--gpus-per-engine is {self.gpus_per_engine}; above 1 it must be a whole number")

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for one engine."""
        wanted = {"CPU": self.cpus_per_engine, "GPU": self.gpus_per_engine}
        return {name: amount for name, amount in wanted.items() if amount}

    @classmethod
    def take(cls, values: dict[str, Any]) -> "Placement | None":
        """Remove the placement's options from parsed arguments; None for `--placement local`.

        Sets `bind` and `device` where they depend on the placement. Raises `ValueError` naming the flag.
        """
        kind = values.pop("placement")
        names = [field.name for field in fields(cls) if field.name != "arguments"]
        given = {name: value for name in names if (value := values.pop(name)) is not None}
        if kind == "local":
            if given:
                raise ValueError(f"--{min(given).replace('_', '-')} needs --placement ray")
            return None
        from headwater.rpc.address import is_loopback  # which imports gRPC

        placement = cls(**{"ray_address": os.environ.get("RAY_ADDRESS", ""), **given})
        _check(values)
        values["bind"] = values["bind"] or ("127.0.0.1:0" if is_loopback(values["router"]) else "0.0.0.0:0")
        values["device"] = values["device"] or ("" if placement.gpus_per_engine else "cpu")
        return cls(**{**vars(placement), "arguments": _flags(values)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--placement and what belongs to it."""
    parser.add_argument(
        "--placement", choices=PLACEMENTS, default=PLACEMENTS[0],
        help="local: this process is the worker. ray: place workers on a Ray cluster, and keep them running",
    )  # fmt: skip
    group = parser.add_argument_group("with --placement ray", 'docs/deploy.md, "Beyond one machine"')
    default = Placement(ray_address="-")
    text = group.add_argument
    text("--ray-address", metavar="HOST:PORT", help='head of the cluster, or "auto" (default $RAY_ADDRESS)')
    text("--replicas", type=int, help=f"engines, one worker each (default {default.replicas})")
    text("--cpus-per-engine", type=float, metavar="N", help=f"also its threads (default {default.cpus_per_engine:g})")
    text("--gpus-per-engine", type=float, metavar="N", help=f"0: on the CPU (default {default.gpus_per_engine:g})")
    text("--strategy", choices=STRATEGIES, help=f"(default {default.strategy})")
    seconds = f"longest wait for room in the cluster (default {default.placement_timeout_s:g})"
    text("--placement-timeout-s", type=float, metavar="S", help=seconds)


def of_replica(arguments: tuple[str, ...], *, index: int, worker_id: str, bind: str, metrics_bind: str) -> list[str]:
    """The command line of worker `index`: ports that are not 0 count up from the first worker's."""
    words = ["--worker-id", worker_id, "--bind", _shifted(bind, index)]
    if metrics_bind:
        words += ["--metrics-bind", _shifted(metrics_bind, index)]
    return [*arguments, *words]


def _shifted(address: str, index: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + index if int(port) else 0}"


def _check(values: Mapping[str, Any]) -> None:
    if not values["router"]:
        raise ValueError("--placement ray needs --router, at which its workers register")
    if values["advertise"]:
        raise ValueError(
            "--advertise names one worker; with --placement ray each worker says the address of its machine that the "
            "router is reached from, or the host of --bind"
        )
    if split_password(values["redis"] or "")[1]:
        raise ValueError(
            "--redis holds a password, and Ray would carry it to other machines; put it into a file that every machine "
            "has, and name it with --redis-password-file"
        )


def _flags(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The command line that gives a worker these settings; paths are absolute, as its working folder is another."""
    words: list[str] = []
    for name, value in values.items():
        if name in _OF_EACH or not value:
            continue
        flag = "--reward" if name == "rewards" else "--" + name.replace("_", "-")
        is_path = name in _PATHS or (name == "blob_root" and "://" not in value) or (name == "model" and _exists(value))
        text = ",".join(value) if name == "rewards" else str(Path(value).absolute() if is_path else value)
        words += [flag] if value is True else [flag, text]
    return tuple(words)


def _exists(path: str) -> bool:
    return Path(path).exists()
