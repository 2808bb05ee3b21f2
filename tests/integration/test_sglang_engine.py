"""The SGLang engine in this process, on a CPU: samples, log-probabilities, weights, and what it leaves alone."""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from headwater_rollout.engine import load_engine
from headwater_rollout.engine.base import Engine, GroupRequest, GroupResult
from headwater_rollout.engine.noise import SampleNoise

from headwater.diffusion import families
from headwater.diffusion.transitions import grid_transition
from headwater.errors import FailedPrecondition, Internal, InvalidArgument
from headwater.sampling import ResolvedSampling
from headwater.weights.fingerprint import fingerprint

pytestmark = pytest.mark.engine

SAMPLING = ResolvedSampling(
    steps=6,
    height_px=64,
    width_px=64,
    frame_count=1,
    frames_per_second=None,
    guidance_scale=1.0,
    guidance_scale_2=1.0,
    negative_prompt="",
    flow_shift=None,
    transition="sde",
    noise_level=0.7,
    stochastic_steps=(0, 1, 2, 3, 4),
)
GUIDED = replace(SAMPLING, guidance_scale=4.0, guidance_scale_2=4.0, negative_prompt="blurry")


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The environment before the engine starts."""
    return dict(os.environ)


@pytest.fixture(scope="module")
def engine(tiny_sd3_dir: Path, environment: dict[str, str]) -> Iterator[Engine]:
    made = load_engine("sglang", tiny_sd3_dir)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(tiny_sd3_dir: Path) -> Engine:
    return load_engine("diffusers", tiny_sd3_dir)


def group(*seeds: int, sampling: ResolvedSampling = SAMPLING, prompt: str = "a red circle") -> GroupRequest:
    return GroupRequest(prompt, seeds, sampling, record_model_outputs=True)


def test_result_has_the_promised_shapes_and_types(engine: Engine):
    result = engine.generate(group(1, 2, 3, sampling=replace(SAMPLING, stochastic_steps=(1, 2))))
    assert (result.media.shape, result.media.dtype) == ((3, 1, 64, 64, 3), np.uint8)
    assert result.latent_positions == (1, 2, 3, 6)
    assert (result.latents.shape, result.latents.dtype) == ((3, 4, 4, 8, 8), torch.float32)
    assert result.timesteps.shape == result.sigmas.shape == (7,)
    assert result.timesteps[-1] == result.sigmas[-1] == 0
    assert result.trained_steps == (1, 2)
    assert (result.log_probs.shape, result.log_probs.dtype) == ((3, 2), torch.float32)
    assert {name: tuple(value.shape) for name, value in result.positive.items()} == {
        "encoder_hidden_states": (333, 64),
        "pooled_projections": (64,),
    }
    assert not result.negative
    assert not any(value.is_inference() for value in (result.latents, result.log_probs, *result.positive.values()))
    assert result.model_outputs is not None
    assert result.model_outputs.shape == (3, 2, 4, 8, 8)


def test_initial_latent_is_the_first_draw_of_the_samples_own_seed(engine: Engine):
    result = engine.generate(group(7, 2**64 - 1))
    assert torch.equal(result.latents[:, 0], SampleNoise((7, 2**64 - 1), (4, 8, 8), "cpu").draw())


def test_a_sample_does_not_depend_on_its_batch(engine: Engine):
    whole = engine.generate(group(*range(8)))
    shuffled = engine.generate(group(5, 3, 7, 0))
    assert torch.equal(shuffled.latents, whole.latents[[5, 3, 7, 0]])  # 4 and 8 rows take the same matrix kernels
    alone = engine.generate(group(5))
    assert torch.equal(alone.latents[0, 0], whole.latents[5, 0])  # noise: always
    assert torch.allclose(alone.latents[0], whole.latents[5], atol=1e-5)  # one row takes other kernels
    assert not torch.allclose(whole.latents[0], whole.latents[1], atol=0.1)


def test_repeating_a_request_gives_the_same_bits(engine: Engine):
    first, second = engine.generate(group(1, 2)), engine.generate(group(1, 2))
    assert torch.equal(first.latents, second.latents)
    assert np.array_equal(first.media, second.media)


def test_steps_outside_the_window_are_deterministic(engine: Engine):
    plain = replace(SAMPLING, transition="ode", noise_level=0.0, stochastic_steps=())
    ode = engine.generate(group(1, 2, sampling=plain))
    assert ode.log_probs.shape == (2, 0)
    assert ode.latent_positions == (6,)
    windowed = engine.generate(group(1, 2, sampling=replace(SAMPLING, stochastic_steps=(2, 5))))
    assert not torch.equal(windowed.latents[:, -1], ode.latents[:, -1])
    late = engine.generate(group(1, 2, sampling=replace(SAMPLING, stochastic_steps=(4,))))
    # Up to its first stochastic step a trajectory is the deterministic one.
    assert late.latent_positions == (4, 5, 6)
    early = engine.generate(group(1, 2, sampling=replace(SAMPLING, stochastic_steps=(5,))))
    ode_to_4 = late.latents[:, 0]
    ode_to_5 = early.latents[:, 0]
    velocity = (ode_to_5 - ode_to_4) / (late.sigmas[5] - late.sigmas[4])
    assert late.model_outputs is not None
    assert torch.allclose(velocity, late.model_outputs[:, 0], atol=1e-4)


@pytest.mark.parametrize("kind", ["sde", "cps", "dance"])
def test_log_probs_are_those_of_the_recorded_latents(engine: Engine, kind: str):
    result = engine.generate(group(1, 2, 3, sampling=replace(SAMPLING, transition=kind)))
    assert result.model_outputs is not None
    for index, step in enumerate(result.trained_steps):
        at = result.latent_positions.index(step)
        again = grid_transition(
            kind,
            result.latents[:, at],
            result.model_outputs[:, index],
            sigmas=result.sigmas,
            step=step,
            noise_level=SAMPLING.noise_level,
        )
        assert torch.equal(again.log_prob(result.latents[:, at + 1]), result.log_probs[:, index])


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLING,
        replace(SAMPLING, transition="cps"),
        replace(SAMPLING, transition="dance", noise_level=0.3),
        replace(SAMPLING, transition="ode", noise_level=0.0, stochastic_steps=()),
        replace(SAMPLING, flow_shift=1.5),
        GUIDED,
        replace(GUIDED, negative_prompt=""),
    ],
    ids=["sde", "cps", "dance", "ode", "flow_shift", "guided", "guided by nothing"],
)
def test_both_engines_make_the_same_samples(engine: Engine, reference: Engine, sampling: ResolvedSampling):
    ours, theirs = engine.generate(group(1, 2, sampling=sampling)), reference.generate(group(1, 2, sampling=sampling))
    assert torch.equal(ours.sigmas, theirs.sigmas)
    assert torch.equal(ours.timesteps, theirs.timesteps)
    # Their text encoders are different code, which rounds differently; all the rest is the same.
    assert torch.allclose(ours.latents, theirs.latents, atol=2e-5)
    assert torch.allclose(ours.log_probs, theirs.log_probs, atol=1e-6)
    assert np.abs(ours.media.astype(int) - theirs.media).max() <= 1
    assert ours.positive.keys() == theirs.positive.keys()
    assert ours.negative.keys() == theirs.negative.keys()
    assert bool(ours.negative) == (sampling.guidance_scale > 1)


def test_flow_shift_and_prompt_change_the_samples(engine: Engine):
    base = engine.generate(group(1))
    assert not torch.equal(engine.generate(group(1, sampling=replace(SAMPLING, flow_shift=1.5))).sigmas, base.sigmas)
    assert torch.equal(engine.generate(group(1)).sigmas, base.sigmas)  # the shift of one request does not stay
    other = engine.generate(group(1, prompt="the word HELLO"))
    assert (other.latents[:, -1] - base.latents[:, -1]).abs().max() > 0.1


def test_weight_views_are_the_live_weights(engine: Engine, tiny_sd3_dir: Path):
    family = families.resolve(tiny_sd3_dir)
    trained = family.load_component(tiny_sd3_dir, "transformer", torch.float32)
    original = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    views = engine.weight_views("transformer")
    assert set(views) == set(original)
    before = engine.generate(group(1, 2, 3, 4))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    try:
        for name, parameter in trained.named_parameters():
            (view,) = views[name]
            view.copy_(parameter.detach())
        engine.weights_changed()
        after = engine.generate(group(1, 2, 3, 4))
        live = engine.weight_views("transformer")
        assert all(fingerprint(live[name]) == fingerprint(value) for name, value in trained.named_parameters())
        assert not torch.allclose(after.latents[:, -1], before.latents[:, -1], atol=1e-2)
        assert after.model_outputs is not None
        for index, step in enumerate(after.trained_steps):
            assert torch.equal(_predict(family, trained, after, step), after.model_outputs[:, index])
    finally:
        for name, value in original.items():
            views[name][0].copy_(value)
    assert torch.equal(engine.generate(group(1, 2, 3, 4)).latents, before.latents)


def _predict(family: families.Family, module: torch.nn.Module, result: GroupResult, step: int) -> torch.Tensor:
    latents = result.latents[:, result.latent_positions.index(step)]
    batch = {name: value.expand(len(latents), *value.shape) for name, value in result.positive.items()}
    return family.predict(module, latents, result.timesteps[step].repeat(len(latents)), batch).detach()


def test_another_layout_of_the_checkpoint_is_an_error(engine: Engine, tiny_sd3_dir: Path):
    from headwater_rollout.engine.sglang.weights import live_views

    with pytest.raises(Internal, match="have no counterpart"):
        live_views(torch.nn.Linear(2, 2), tiny_sd3_dir / "transformer")


def test_other_threads_may_generate(engine: Engine):
    results: list[GroupResult] = []
    thread = threading.Thread(target=lambda: results.append(engine.generate(group(1, 2))))
    thread.start()
    thread.join(timeout=60)
    assert torch.equal(results[0].latents, engine.generate(group(1, 2)).latents)


def test_nothing_listens_beyond_loopback(engine: Engine):
    engine.generate(group(1))
    addresses = _listening_addresses()
    assert addresses  # gloo listens, so the reader below works
    assert all(address.startswith("127.") or address == "::1" for address in addresses), addresses


def _listening_addresses() -> set[str]:
    """Addresses that this process listens on, from the kernel's tables."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and path.exists()}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                words = bytes.fromhex(local.split(":")[0])
                packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, packed))
    return found


def test_the_process_stays_as_it_was(engine: Engine, environment: dict[str, str], capfd: pytest.CaptureFixture[str]):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        assert os.environ.get(name) == environment.get(name)
    assert not Path("/proc/self/cmdline").read_text().startswith("sgl_diffusion")
    assert torch.is_grad_enabled()
    assert not [handler for handler in logging.getLogger().handlers if "sglang" in type(handler).__module__]
    engine.generate(group(1, 2))
    assert capfd.readouterr() == ("", "")


def test_a_second_engine_in_the_process_is_refused(engine: Engine, tiny_sd3_dir: Path):
    with pytest.raises(FailedPrecondition, match="has an sglang engine already"):
        load_engine("sglang", tiny_sd3_dir)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (group(1, prompt=" "), "prompt"),
        (group(), "seeds"),
        (group(2**64), "seeds"),
        (group(1, sampling=replace(SAMPLING, height_px=65)), "sampling.height_px"),
        (group(1, sampling=replace(SAMPLING, width_px=8)), "sampling.width_px"),
        (group(1, sampling=replace(SAMPLING, frame_count=5)), "sampling.frame_count"),
        (group(1, sampling=replace(SAMPLING, guidance_scale_2=3.0)), "sampling.guidance_scale_2"),
    ],
)
def test_bad_requests_name_the_field(engine: Engine, reference: Engine, request_: GroupRequest, field: str):
    for each in (engine, reference):
        with pytest.raises(InvalidArgument) as caught:
            each.generate(request_)
        assert caught.value.field == field


def test_unknown_component(engine: Engine):
    with pytest.raises(InvalidArgument, match="'vae' does not exist"):
        engine.weight_views("vae")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("vllm", "MODEL"), "engine"),
        (("sglang", "/nowhere"), "model"),
        (("sglang", "MODEL", "fp8"), "precision"),
        (("diffusers", "MODEL", "fp32", "tpu:0"), "device"),
        (("diffusers", "MODEL", "fp32", "cuda:99"), "device"),
    ],
)
def test_load_engine_names_what_is_wrong(tiny_sd3_dir: Path, arguments: tuple[str, ...], field: str):
    with pytest.raises(InvalidArgument) as caught:
        load_engine(*(str(tiny_sd3_dir) if word == "MODEL" else word for word in arguments))
    assert caught.value.field == field
