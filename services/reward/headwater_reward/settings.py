"""How a server hosts each reward: the file of `--reward-config`, one table a reward.

[pickscore]
model = "/models/PickScore_v1"    # an option of this reward: services/reward/README.md
device = "cuda:0"
max_batch = 32                    # of this reward's queue; also max_wait_ms, queue_limit and threads

[pickscore_bf16]                  # a name of your own, and which reward it is
kind = "pickscore"
precision = "bf16"
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headwater.errors import FailedPrecondition, InvalidArgument
from headwater_reward.validation import validated


class QueueSettings(BaseModel):
    """Limits of one reward's queue and thread; what is None is as the command line says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_batch: int | None = Field(default=None, ge=1)
    max_wait_ms: float | None = Field(default=None, ge=0, le=60_000)
    queue_limit: int | None = Field(default=None, ge=1)
    threads: int | None = Field(default=None, ge=1)


@dataclass(frozen=True)
class RewardSettings:
    """One table of the file: the declared reward, its queue, and its own options, not yet checked."""

    kind: str
    queue: QueueSettings = field(default_factory=lambda: QueueSettings())
    options: Mapping[str, Any] = field(default_factory=dict)


def read(path: str) -> dict[str, RewardSettings]:
    """The tables of a file by name; none for "". Raises `FailedPrecondition` or `InvalidArgument` naming the place."""
    if not path:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FailedPrecondition(f"--reward-config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--reward-config {path} is no TOML: {error}", field="reward_config") from error
    return {name: _settings(name, table, path) for name, table in tables.items()}


def _settings(name: str, table: Any, path: str) -> RewardSettings:
    if not isinstance(table, dict):
        raise InvalidArgument(f"{path}: {name} is no table; write [{name}] and its options below", field=name)
    options = dict(table)
    kind = options.pop("kind", name)
    queue = {key: options.pop(key) for key in QueueSettings.model_fields if key in options}
    checked = validated(QueueSettings, queue, field=name, reason="REWARD_CONFIG_INVALID")
    return RewardSettings(str(kind), checked, options)
