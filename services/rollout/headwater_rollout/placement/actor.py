"""The Ray actor of one engine: a rollout worker as a process of the actor's machine. Imported there, so nothing heavy.

Only strings and numbers go through Ray's pickle, in both directions.
"""

import os
import signal
import sys

import ray

from headwater.supervisor.process import Process


class EngineActor:
    """Runs one worker process for as long as the actor lives: the process dies with it, and is never started twice."""

    def __init__(self, worker_id: str, arguments: list[str], env: dict[str, str]) -> None:
        """Start the worker. A process of its own, so that whatever the engine does, the actor can still be asked."""
        self._worker_id = worker_id
        command = [sys.executable, "-m", "headwater_rollout", *arguments]
        self._process = Process(command, env=env, death_signal=signal.SIGKILL)

    def __repr__(self) -> str:
        """What Ray puts before each line of the log."""
        return self._worker_id

    def poll(self) -> dict[str, str | int | None]:
        """Where the worker runs, its process, and its exit code or None."""
        return {
            "node_id": ray.get_runtime_context().get_node_id(),
            "ip": ray.util.get_node_ip_address(),
            "actor_pid": os.getpid(),
            "worker_pid": self._process.pid,
            "exit_code": self._process.exit_code(),
        }

    def stop(self, grace_s: float) -> bool:
        """Let the worker drain; whether it left by itself within `grace_s`."""
        return self._process.stop(grace_s)
