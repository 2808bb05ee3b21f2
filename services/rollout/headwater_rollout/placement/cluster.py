"""The Ray cluster: connect to it, reserve room for the engines, give it back."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from headwater.errors import FailedPrecondition, InvalidArgument, Unavailable
from headwater.rpc.address import is_loopback
from headwater_rollout.placement.config import Placement

log = logging.getLogger(__name__)

NAMESPACE = "headwater"
_CONNECT_TIMEOUT_S = 10.0
_JOIN_TIMEOUT_S = 60.0
_JOIN = "import ray, sys; ray.init(sys.argv[1], namespace=sys.argv[2], configure_logging=False, log_to_driver=False)"
_POLL_S = 1.0


def import_ray() -> None:
    """Import Ray, so that it hands on every line of the workers' logs. Raises `FailedPrecondition` without Ray."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise FailedPrecondition(
            "--placement ray needs Ray: pip install 'headwater[ray]', of the version that the cluster has",
            field="placement",
        ) from error


@contextlib.contextmanager
def connected(address: str, router: str) -> Iterator[None]:
    """This process as a driver of the cluster. When it ends, however it ends, Ray ends its actors.

    Raises `Unavailable` without a cluster, and `InvalidArgument` for a router that its machines cannot reach.
    """
    import ray

    _check_answers(address)
    _try_to_join(address)
    ray.init(address=address, namespace=NAMESPACE, configure_logging=False)
    try:
        _check_router(router)
        yield
    finally:
        ray.shutdown()


def reserve(placement: Placement, name: str, stopping: threading.Event) -> Any:
    """A placement group with a bundle for each engine; None when `stopping` came first.

    Raises `Unavailable` after `placement_timeout_s`, with what was asked for and what there is.
    """
    from ray.util.placement_group import placement_group

    log.info("reserve %s", _wanted(placement))
    group = placement_group([placement.bundle] * placement.replicas, strategy=placement.strategy, name=name)
    deadline = time.monotonic() + placement.placement_timeout_s
    while not group.wait(min(_POLL_S, placement.placement_timeout_s)):
        if stopping.is_set() or time.monotonic() > deadline:
            message = _no_room(placement)
            release(group)
            if stopping.is_set():
                return None
            raise Unavailable(message, field="replicas", reason="NO_ROOM")
    return group


def release(group: Any) -> None:
    """Give the room back. What still runs in it is killed."""
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)
    log.info("the placement group is removed")


def _no_room(placement: Placement) -> str:
    import ray

    nodes = [
        f"  {node['NodeManagerAddress']} ({node['NodeID'][:8]}): {_amounts(node['Resources'])}"
        for node in ray.nodes()
        if node["Alive"]
    ]
    free = _amounts(ray.available_resources())
    return (
        f"no room within {placement.placement_timeout_s:g} s for {_wanted(placement)}. The cluster has\n"
        + "\n".join(nodes)
        + f"\nof which are free: {free}. Lower --replicas, --cpus-per-engine or --gpus-per-engine (0: on the CPU), "
        "choose another --strategy, or add machines with `ray start --address HOST:PORT`"
    )


def _wanted(placement: Placement) -> str:
    return f"{placement.replicas} × ({_amounts(placement.bundle)}), strategy {placement.strategy}"


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in ("CPU", "GPU"))


def _check_answers(address: str) -> None:
    """Say at once what Ray itself would say after minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidArgument(f'--ray-address {address!r} is not host:port or "auto"', field="ray_address")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise Unavailable(
            f"no Ray cluster answers at --ray-address {address}: {error}; start one with `ray start --head`, which "
            "prints its address",
            field="ray_address",
        ) from error


def _try_to_join(address: str) -> None:
    """In a process of its own: `ray.init` has no deadline, and for some reasons ends the process that calls it."""
    try:
        command = [sys.executable, "-c", _JOIN, address, NAMESPACE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_JOIN_TIMEOUT_S, check=False)
        problem = "" if done.returncode == 0 else (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
    except subprocess.TimeoutExpired:
        problem = f"no answer of Ray's within {_JOIN_TIMEOUT_S:.0f} s"
    if problem:
        raise Unavailable(
            f"the Ray cluster at --ray-address {address} cannot be joined: {problem}. This process must run on a "
            "machine of the cluster (`ray start --address HOST:PORT`), with its versions of Ray and "
            'Python and, where it asks for them, its token and TLS files (docs/security.md, "Ray")',
            field="ray_address",
        )


def _check_router(router: str) -> None:
    import ray

    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if is_loopback(router) and len(machines) > 1:
        raise InvalidArgument(
            f"--router {router} can be reached from one machine only, and the cluster has {len(machines)}: "
            f"{', '.join(sorted(machines))}; bind the router to an address of the network (docs/security.md) and "
            "give that",
            field="router",
        )
