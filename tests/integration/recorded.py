"""Scored groups as a rollout worker would publish them, made with the family's own model and transitions."""

import random
from pathlib import Path

import torch

from headwater.common.v1.reward_pb2 import RewardScore
from headwater.common.v1.sample_pb2 import Conditioning, SampleId, ScoredGroup, Trajectory, WeightVersion
from headwater.common.v1.tensor_pb2 import NamedTensor, Tensor
from headwater.config.recipe import Recipe
from headwater.diffusion import families
from headwater.diffusion.schedules import schedule
from headwater.diffusion.transitions import grid_transition
from headwater.sampling import resolve
from headwater.tensors import torch_codec
from headwater.tensors.blobs import BlobStore

PROMPT_LENGTH, WIDTH = 12, 64  # of the tiny SD3's conditioning


@torch.no_grad()
def make_groups(recipe: Recipe, store: BlobStore, run_id: str, count: int, *, version: int = 0) -> list[ScoredGroup]:
    """`count` groups sampled from the model that the recipe names, with one random reward value per sample."""
    family = families.resolve(recipe.model.path)
    module = family.load_component(recipe.model.path, "transformer", torch.float32)
    return [_make_group(recipe, store, run_id, number, family, module, version) for number in range(count)]


def _make_group(recipe, store, run_id, number, family, module, version):
    n = recipe.train.group_size
    generator = torch.Generator().manual_seed(1000 + number)
    sampling = resolve(recipe.rollout_sampling(), group_seed=number)
    grid = schedule(families.scheduler_config(recipe.model.path), sampling.steps, sampling.flow_shift)
    branches = [_conditioning(generator)]
    if sampling.guidance_scale != 1:
        branches.append(_conditioning(generator))
    latent = torch.randn(
        n, *family.latent_shape(recipe.model.path, sampling.height_px, sampling.width_px), generator=generator
    )
    latents, log_probs = [latent], []
    for step in range(sampling.steps):
        velocities = [
            family.predict(
                module, latent, grid.timesteps[step].expand(n), {k: v.expand(n, *v.shape) for k, v in branch.items()}
            )
            for branch in branches
        ]
        velocity = velocities[0] if len(branches) == 1 else family.guided(*velocities, sampling.guidance_scale)
        kind = sampling.transition if step in sampling.stochastic_steps else "ode"
        move = grid_transition(kind, latent, velocity, sigmas=grid.sigmas, step=step, noise_level=sampling.noise_level)
        latent = move.sample_next(torch.randn(latent.shape, generator=generator)) if kind != "ode" else move.mean
        latents.append(latent)
        if kind != "ode":
            log_probs.append(move.log_prob(latent))
    positions = sorted({p for s in sampling.stochastic_steps for p in (s, s + 1)} | {sampling.steps})
    return _encode(recipe, store, run_id, number, sampling, grid, branches, latents, log_probs, positions, version)


def _conditioning(generator):
    return {
        "encoder_hidden_states": torch.randn(PROMPT_LENGTH, WIDTH, generator=generator),
        "pooled_projections": torch.randn(WIDTH, generator=generator),
    }


def _encode(recipe, store, run_id, number, sampling, grid, branches, latents, log_probs, positions, version):
    group_id = f"g{number:08d}"
    writer = _Writer()
    group = ScoredGroup(
        run_id=run_id,
        group_id=group_id,
        prompt=f"prompt {number}",
        sampling=recipe.rollout_sampling(),
        reward_specs=[reward.to_proto() for reward in recipe.rewards],
        conditionings=[
            Conditioning(
                id="c", **{side: writer.named(b) for side, b in zip(("positive", "negative"), branches, strict=False)}
            )
        ],
    )
    rng = random.Random(number)
    for i in range(recipe.train.group_size):
        sample = group.samples.add(id=SampleId(run_id=run_id, group_id=group_id, index=i), seed=i)
        sample.first_step_version.CopyFrom(WeightVersion(run_id=run_id, step=version))
        sample.last_step_version.CopyFrom(sample.first_step_version)
        sample.rewards.extend(RewardScore(name=reward.name, value=rng.random()) for reward in recipe.rewards)
        sample.trajectory.CopyFrom(
            Trajectory(
                latents=writer.tensor(torch.stack([latents[p][i] for p in positions])),
                latent_positions=positions,
                timesteps=writer.tensor(grid.timesteps),
                sigmas=writer.tensor(grid.sigmas),
                trained_steps=sampling.stochastic_steps,
                log_probs=writer.tensor(torch.tensor([lp[i] for lp in log_probs])),
                conditioning_id="c",
            )
        )
    writer.flush(store, f"{run_id}/groups/{group_id}.bin", group)
    return group


class _Writer:
    """Tensors into one blob; references are filled in when it is written."""

    def __init__(self):
        self._tensors = []

    def tensor(self, value):
        if not value.numel():
            return torch_codec.encode(value)
        self._tensors.append(value.contiguous())
        spec = torch_codec.spec_of(value)
        message = Tensor(spec=spec)
        message.blob.offset_bytes = len(self._tensors) - 1  # position, replaced in flush
        return message

    def named(self, tensors):
        return [NamedTensor(name=name, tensor=self.tensor(value)) for name, value in tensors.items()]

    def flush(self, store, uri, group):
        refs = store.put(uri, [torch_codec.to_buffer(value) for value in self._tensors])
        for message in _tensors_of(group):
            if message.HasField("inline"):
                continue
            message.blob.CopyFrom(refs[message.blob.offset_bytes])


def _tensors_of(group):
    for conditioning in group.conditionings:
        for item in (*conditioning.positive, *conditioning.negative):
            yield item.tensor
    for sample in group.samples:
        t = sample.trajectory
        yield from (t.latents, t.timesteps, t.sigmas, t.log_probs)


def save_groups(path: Path, groups: list[ScoredGroup]) -> None:
    with path.open("wb") as file:
        for group in groups:
            data = group.SerializeToString()
            file.write(len(data).to_bytes(8, "big") + data)


def load_groups(path: Path) -> list[ScoredGroup]:
    data, groups, position = path.read_bytes(), [], 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 8], "big")
        groups.append(ScoredGroup.FromString(data[position + 8 : position + 8 + size]))
        position += 8 + size
    return groups
