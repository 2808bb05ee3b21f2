"""The placing process: reserve room, keep every engine running, and let them drain at the end."""

import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headwater.errors import Unavailable
from headwater_rollout.config import RolloutConfig
from headwater_rollout.placement import cluster
from headwater_rollout.placement.actor import EngineActor
from headwater_rollout.placement.config import Placement, of_replica
from headwater_rollout.placement.replica import Replica
from headwater_rollout.placement.router_view import RouterView

log = logging.getLogger(__name__)

TICK_S = 0.5
HEARTBEAT_S = 60.0
DRAIN_MARGIN_S = 10.0
"""What a worker needs after its groups have finished, or were given up, to leave."""
HOPELESS = 3
"""So many failures of a worker in a row, when none of the placement has ever served, are a mistake in the settings."""


def place(config: RolloutConfig, placement: Placement) -> None:
    """Run until SIGTERM or SIGINT. Raises `HeadwaterError` when nothing can be placed or no worker can be started."""
    prefix = config.worker_id or "rollout"
    with cluster.connected(placement.ray_address, config.router):
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        group = cluster.reserve(placement, f"headwater-{prefix}", stopping)
        if group is None:
            return
        try:
            replicas = [
                Replica(f"{prefix}-{index}", functools.partial(_create, config, placement, group, index, prefix))
                for index in range(placement.replicas)
            ]
            with contextlib.closing(RouterView(config.router)) as router:
                try:
                    _keep(replicas, router, stopping)
                finally:
                    _drain(replicas, config.drain_grace_s + DRAIN_MARGIN_S)
        finally:
            cluster.release(group)


def _create(config: RolloutConfig, placement: Placement, group: Any, index: int, prefix: str) -> Any:
    """A new actor in bundle `index`. It waits in Ray until the bundle has a machine."""
    worker_id = f"{prefix}-{index}"
    arguments = of_replica(
        placement.arguments, index=index, worker_id=worker_id, bind=config.bind, metrics_bind=config.metrics_bind
    )
    env = {name: os.environ[name] for name in ("HEADWATER_LOG_LEVEL",) if name in os.environ}
    return (
        ray.remote(EngineActor)
        .options(
            num_cpus=placement.cpus_per_engine,
            num_gpus=placement.gpus_per_engine,
            max_restarts=0,  # `Replica` starts it again: with a pause, and with a line in the log
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        .remote(worker_id, arguments, env)
    )


def _keep(replicas: Sequence[Replica], router: RouterView, stopping: threading.Event) -> None:
    heartbeat_at = time.monotonic() + HEARTBEAT_S
    while not stopping.wait(TICK_S):
        seen = router.workers()
        for replica in replicas:
            replica.tick(seen)
        if time.monotonic() >= heartbeat_at:
            heartbeat_at += HEARTBEAT_S
            for replica in replicas:
                log.info("placed %s", replica.describe())
        hopeless = [replica for replica in replicas if replica.failures >= HOPELESS]
        if hopeless and not any(replica.has_served for replica in replicas):
            raise Unavailable(
                f"worker {hopeless[0].worker_id} has ended {HOPELESS} times and none has ever served; what it said is "
                "above, and in Ray's log folder of its machine. Correct it and start again",
                reason="WORKERS_FAIL",
            )


def _drain(replicas: Sequence[Replica], grace_s: float) -> None:
    """All at once; those that do not leave in time are killed."""
    log.info("placement drains")
    asked = {ref: replica for replica in replicas if (ref := replica.drain(grace_s)) is not None}
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=grace_s + DRAIN_MARGIN_S) if asked else ([], [])
    for ref in done:
        try:
            clean = ray.get(ref)
        except RayError:
            clean = False
        log.info("replica worker=%s state=%s", asked[ref].worker_id, "drained" if clean else "killed")
    for ref in late:
        log.warning("replica worker=%s did not drain within %.0f s and is killed", asked[ref].worker_id, grace_s)
    for replica in replicas:
        replica.kill()
