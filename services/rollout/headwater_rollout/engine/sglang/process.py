"""Run SGLang's worker inside our own process without letting it change that process.

The stock worker opens a rendezvous port on every interface, renames the process, takes over the root logger, and
exports torchrun's variables, which our own process groups and child processes would then read.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

# Set by the worker, or here, while it starts; restored afterwards.
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_SIZE", "GLOO_SOCKET_IFNAME")


@contextmanager
def contained(device: torch.device) -> Iterator[None]:
    """Around the import of SGLang and the start of a worker: choose the platform, and undo side effects at the end."""
    if device.type == "cpu":
        os.environ["SGLANG_DIFFUSION_PLATFORM_OVERRIDE"] = "cpu"
    import setproctitle  # a dependency of SGLang

    title = setproctitle.getproctitle()
    saved = {name: os.environ.get(name) for name in _VARIABLES}
    root, log = logging.getLogger(), logging.getLogger("sglang")
    handlers, level = list(root.handlers), root.level
    log.setLevel(logging.ERROR)  # importing it warns of every optional kernel that is not installed
    try:
        with warnings.catch_warnings(), _no_progress_bars():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(logging.WARNING)
        root.handlers[:], root.level = handlers, level
        setproctitle.setproctitle(title)
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from tqdm import tqdm

    original = tqdm.__init__

    def disabled(self: tqdm, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **{**named, "disable": True})

    tqdm.__init__ = disabled
    try:
        yield
    finally:
        tqdm.__init__ = original


def init_local_group(backend: str) -> None:
    """Create the default process group of one rank that SGLang wants, without opening a port to other machines.

    The rendezvous stays in memory (SGLang's own listens on all interfaces), and gloo, which always listens, is bound to
    loopback. The group is not bound to a device: torch would otherwise make every later NCCL communicator by splitting
    this group instead of meeting the other ranks.
    """
    if distributed.is_initialized():
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
