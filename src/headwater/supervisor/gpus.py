"""Which process gets which GPU, decided without importing torch."""

import os
import shutil
import subprocess
from collections.abc import Sequence


def visible_gpus() -> tuple[str, ...]:
    """Indices of this machine's GPUs as CUDA_VISIBLE_DEVICES wants them; empty without a driver."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(part.strip() for part in chosen.split(",") if part.strip())
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    try:
        listing = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return ()
    return tuple(str(index) for index, _ in enumerate(line for line in listing.splitlines() if line.startswith("GPU ")))


def assign(gpus: Sequence[str], trainer_ranks: int, workers: int) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Environment of the trainer and of each worker.

    Trainer ranks come first, then one GPU per worker; when there are too few, workers share. NCCL needs workers and
    ranks on different GPUs: on a shared one the weight update falls back to gRPC streams.
    """
    if not gpus:
        return {}, [{} for _ in range(workers)]
    trainer = ",".join(gpus[:trainer_ranks])
    own = [gpus[(trainer_ranks + index) % len(gpus)] for index in range(workers)]
    return {"CUDA_VISIBLE_DEVICES": trainer}, [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in own]
