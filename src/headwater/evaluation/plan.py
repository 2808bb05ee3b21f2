"""What an evaluation does: prompts, seeds, sampling, rewards. The same plan gives the same noise for every model."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from headwater import sampling as sampling_rules
from headwater.common.v1.reward_pb2 import RewardRole, RewardSpec
from headwater.common.v1.sample_pb2 import WeightVersion
from headwater.common.v1.sampling_pb2 import SamplingParams
from headwater.config.prompts import PromptItem
from headwater.errors import InvalidArgument, duration
from headwater.router.v1.router_pb2 import Prompt

NO_TAG = "all"


@dataclass(frozen=True)
class Plan:
    """One evaluation. `rewards` with role MONITOR stay out of the score. Raises `InvalidArgument` naming the option."""

    prompts_path: Path
    items: tuple[PromptItem, ...]
    sampling: SamplingParams
    rewards: tuple[RewardSpec, ...]
    samples_per_prompt: int = 1
    seed: int = 0
    min_version: WeightVersion | None = None
    timeout_s: float = 600.0
    pictures_per_tag: int = 4

    def __post_init__(self) -> None:
        for name, least in (("samples_per_prompt", 1), ("seed", 0), ("pictures_per_tag", 0)):
            if getattr(self, name) < least:
                flag = "--" + name.replace("_", "-")
                raise InvalidArgument(f"{flag} is {getattr(self, name)}; it must be at least {least}", field=name)
        if not self.timeout_s > 0:
            raise InvalidArgument(f"--timeout is {self.timeout_s}; it must be above 0", field="timeout")
        names = [spec.name for spec in self.rewards]
        if len(set(names)) < len(names):
            raise InvalidArgument(f"the rewards are {names}; each may be named once", field="rewards")
        if not self.scored:
            raise InvalidArgument(
                "no reward is named, so there is nothing to evaluate; pass --rewards NAME[,NAME], e.g. tiny-geneval",
                field="rewards",
            )
        sampling_rules.resolve(self.sampling, group_seed=0)

    @property
    def scored(self) -> tuple[RewardSpec, ...]:
        """The rewards whose weighted sum is the score."""
        return tuple(spec for spec in self.rewards if spec.role != RewardRole.REWARD_ROLE_MONITOR)

    def seeds(self, index: int) -> list[int]:
        """Seeds of prompt number `index`, 32 bits each: a function of the evaluation's seed and the prompt's place.

        More samples per prompt, or more prompts, leave the first ones as they are.
        """
        source = random.Random(f"{self.seed}:evaluation:{index}")
        return [source.getrandbits(32) for _ in range(self.samples_per_prompt)]

    def messages(self) -> Iterator[Prompt]:
        """The requests to the router, in file order; the request id ends in the prompt's index."""
        name = random.SystemRandom().getrandbits(48)
        pictured = self.pictured()
        for index, item in enumerate(self.items):
            prompt = Prompt(
                request_id=f"eval-{name:012x}-{index}",
                text=item.text,
                seeds=self.seeds(index),
                sampling=self.sampling,
                rewards=self.rewards,
                return_media=index in pictured,
                timeout=duration(self.timeout_s),
            )
            prompt.metadata.update(dict(item.metadata))
            if self.min_version is not None:
                prompt.min_weight_version.CopyFrom(self.min_version)
            yield prompt

    def pictured(self) -> set[int]:
        """Prompts whose images are asked for: the first of each tag, and all whose tag only the reward knows."""
        seen: dict[str, int] = {}
        chosen = set()
        for index, item in enumerate(self.items):
            tag = tag_of(item) or ""
            seen[tag] = seen.get(tag, 0) + 1
            if self.pictures_per_tag and (not tag or seen[tag] <= self.pictures_per_tag):
                chosen.add(index)
        return chosen

    def settings(self) -> dict[str, Any]:
        """What results.json says of the plan."""
        texts = "\n".join(item.text for item in self.items)
        return {
            "prompts": str(self.prompts_path),
            "prompt_count": len(self.items),
            "prompts_sha256": hashlib.sha256(texts.encode()).hexdigest(),
            "samples_per_prompt": self.samples_per_prompt,
            "seed": self.seed,
            "sampling": MessageToDict(self.sampling, preserving_proto_field_name=True),
            "rewards": [_reward_settings(spec) for spec in self.rewards],
        }


def tag_of(item: PromptItem) -> str | None:
    """The tag in a prompt's metadata, if it has one."""
    tag = item.metadata.get("tag")
    return tag if isinstance(tag, str) and tag else None


def _reward_settings(spec: RewardSpec) -> dict[str, Any]:
    monitor = spec.role == RewardRole.REWARD_ROLE_MONITOR
    return {
        "name": spec.name,
        "weight": spec.weight if spec.HasField("weight") else 1.0,
        "role": "monitor" if monitor else "score",
        "params": MessageToDict(spec.params),
    }
